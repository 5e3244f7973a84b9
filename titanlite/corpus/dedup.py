"""Finds duplicates in a corpus: documents that share a band of a signature, by a sort of each band and
connected components.

Memory is about 70 bytes per document for any number of bands, because bands are read one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from titanlite.config.component import ConfigError


def first_of_each(num_documents: int, bands: Iterable[np.ndarray]) -> np.ndarray:
    """Return for each document the first document of its group: int64 [num_documents].

    `bands`: each uint64 [num_documents]; documents that have the same value in a band are in one group.
    """
    first = np.arange(num_documents, dtype=np.int64)
    for keys in bands:
        order = np.argsort(keys, kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        _join(first, first[order[:-1][same]], first[order[1:][same]])
    return first


def _join(first: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Merge pairs of groups, in place. A group is identified by its first document."""
    try:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components
    except ImportError:
        raise ConfigError("deduplication needs scipy: pip install 'titanlite[data]'", "filters") from None
    differ = left != right
    groups, pairs = np.unique(np.stack([left[differ], right[differ]]), return_inverse=True)
    if not len(groups):
        return
    pairs = pairs.reshape(2, -1)
    links = coo_matrix((np.ones(pairs.shape[1], dtype=bool), (pairs[0], pairs[1])), shape=(len(groups),) * 2)
    _, component = connected_components(links, directed=False)
    lowest = np.full(component.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, component, groups)
    place = np.searchsorted(groups, first).clip(max=len(groups) - 1)
    inside = groups[place] == first
    first[inside] = lowest[component[place[inside]]]
