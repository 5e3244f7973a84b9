"""Pins the grouping of duplicates: whatever shares a value in any band, directly or through others in any
order of the bands, is one group under its first document, as a union-find over all pairs has it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.corpus.dedup import first_of_each

Keys = list[list[int]]  # of each band, of each document


def band_of(keys: Keys) -> Callable[[int], np.ndarray]:
    """Each band made anew when it is asked for, as from a file."""
    return lambda b: np.array(keys[b], dtype=np.uint64)


def grouped(num_documents: int, keys: Keys) -> list[int]:
    """The answer, with its type checked."""
    first = first_of_each(num_documents, map(band_of(keys), range(len(keys))))
    assert (first.dtype, first.shape) == (np.int64, (num_documents,))
    return first.tolist()


def by_union_find(num_documents: int, keys: Keys) -> list[int]:
    """Every pair of every band; a group's root is its lowest number."""
    parent = list(range(num_documents))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for band in keys:
        for i in range(num_documents):
            for j in range(i):
                if band[i] == band[j]:
                    a, b = root(i), root(j)
                    parent[max(a, b)] = min(a, b)
    return [root(i) for i in range(num_documents)]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, Keys]:
    """From hardly any duplicates to nearly all; groups are joined again by later bands."""
    n = draw(st.integers(0, 24))
    value = st.integers(0, draw(st.sampled_from([0, n // 2 + 1, n, 2 * n, 4 * n])))
    return n, draw(st.lists(st.lists(value, min_size=n, max_size=n), max_size=6))


NO_DUPLICATES: Keys = [list(range(100)), list(range(100))[::-1]]
ROTATED: Keys = [[1, 2, 3], [2, 3, 1], [3, 1, 2]]  # a value in another band is another value
LATE: Keys = [[0, 1, 0, 1, 4, 5], [0, 1, 2, 2, 4, 5]]  # members that are first of neither group link two


@pytest.mark.parametrize("num_examples", [60, full(400)])
def test_as_by_union_find(num_examples: int) -> None:
    """Of any number of documents and bands, also of none."""

    @given(corpora())
    @settings(max_examples=num_examples, deadline=None)
    @example((0, []))
    @example((3, []))
    @example((1, [[5]] * 14))
    @example((100, NO_DUPLICATES))
    @example((3, ROTATED))
    @example((6, LATE))
    def check(corpus: tuple[int, Keys]) -> None:
        assert grouped(*corpus) == by_union_find(*corpus)

    check()


@pytest.mark.parametrize("seed", range(5))
def test_as_by_union_find_with_keys_of_64_bits(seed: int) -> None:
    """About as many documents as values, in three bands: groups of all sizes, and keys up to 2^64 - 1."""
    rng = np.random.default_rng(seed)
    values = np.append(rng.integers(0, 2**64, 399, dtype=np.uint64), np.uint64(2**64 - 1))
    keys: Keys = rng.choice(values, (3, 150)).tolist()
    expected = by_union_find(150, keys)
    assert 2 < len(set(expected)) < 140
    assert grouped(150, keys) == expected


def test_all_are_one() -> None:
    assert grouped(1000, [[7] * 1000]) == [0] * 1000


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chain_across_bands(backwards: bool) -> None:
    """Pairs (0, 1), (2, 3), ... in one band and (1, 2), (3, 4), ... in the next: no two bands link all."""
    keys = [[(i + b) // 2 for i in range(1001)] for b in range(2)]
    assert grouped(1001, keys[::-1] if backwards else keys) == [0] * 1001


def test_the_bands_are_left_as_they_were() -> None:
    bands = [np.array([3, 1, 3, 1], dtype=np.uint64), np.array([0, 1, 2, 0], dtype=np.uint64)]
    for band in bands:
        band.flags.writeable = False  # as of a mapped file
    assert first_of_each(4, bands).tolist() == [0, 0, 0, 0]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ConfigError, match=r"deduplication needs scipy: pip install") as e:
        grouped(2, [[1, 1]])
    assert e.value.key == "filters"
