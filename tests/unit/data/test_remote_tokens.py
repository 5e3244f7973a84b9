"""Pins that sources on a storage train as local ones do: the same batches for any number of ranks and workers,
with an empty and with a filled cache; that the cache reads about what Belady's rule needs, and less than LRU;
and that faults of the storage give the right tokens or one line, never wrong tokens."""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tests.support.counted_storage import plant, take_reads, url
from tests.support.datasets import FakeTokenizer, write_dataset
from titanlite.config.component import ConfigError, Unreadable
from titanlite.data import remote_shards, sequence_cache
from titanlite.data.dataset import Data, SequenceDataset
from titanlite.data.downloads import Downloader, Downloads, NodeOrder
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.order import NEVER, Mixture, permute, unpermute
from titanlite.data.remote_shards import RemoteTokens
from titanlite.data.sequence_cache import OwnedCache, SequenceCache
from titanlite.data.shards import token_dtype, write_description, write_shard
from titanlite.data.skips import SkippedSequences
from titanlite.data.sources import Source, Tokens
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.errors import LoaderError

SEQ_LEN, BATCH = 32, 24
LARGE = 64 << 20  # bytes of a cache that holds everything


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two datasets of random tokens in several shards; the first has loss masks."""
    folder, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    paths = [folder / "masked", folder / "plain"]
    paths[0].mkdir()
    entries = []
    for number in range(3):
        documents = [rng.integers(0, 1000, size) for size in rng.integers(2, 90, 40)]
        masks = [rng.integers(0, 2, len(document)).astype(bool) for document in documents]
        entries.append(write_shard(paths[0], f"{number:05}", documents, token_dtype(1000), masks))
    write_description(paths[0], FakeTokenizer(), entries, {})
    write_dataset(paths[1], [rng.integers(0, 1000, size) for size in rng.integers(2, 90, 150)], None, 2000)
    return paths


def build(paths: Sequence[str | Path], cache: Path, **keys: Any) -> SequenceDataset:
    sources: list[Source] = [Tokens(path=str(path), weight=i + 1) for i, path in enumerate(paths)]
    data = Data(sources=sources, cache_dir=str(cache), **keys)
    made = data.build(FakeTokenizer(), seq_len=SEQ_LEN, seed=0)
    assert isinstance(made, SequenceDataset)
    return made


def order_of(first: int = 0, rank: int = 0, ranks: int = 1, micro_batch: int = 4) -> MicroBatches:
    skipped = SkippedSequences.merge([[40, 45], [130, 200]])
    sizes = StepSizes([StepSize(0, BATCH), StepSize(100, 2 * BATCH)])
    return MicroBatches(first, sizes, micro_batch, rank, ranks, skipped)


class Node:
    """Ranks of a node without workers, and the work of its downloading process, in this process. `ranks`: the
    data-parallel ranks of the node, of `order.num_ranks`."""

    def __init__(
        self, sequences: SequenceDataset, cache: Path, max_bytes: int, order: MicroBatches, end: int = NEVER
    ):
        self.sequences, ranks = sequences, range(order.num_ranks)
        sequences.use_cache(SequenceCache(cache))
        self.cache = OwnedCache(cache, max_bytes)
        self.downloader = Downloader(sequences, NodeOrder(order, list(ranks), end), self.cache)
        self.loaders = [SequenceLoader(sequences, replace(order, rank=rank), 0, False) for rank in ranks]

    def next(self) -> list[int]:
        """The hashes of the next micro-batch of each rank."""
        position = min(loader.state_dict()["sequences"] for loader in self.loaders)
        while not self.downloader.cycle(position):
            pass
        return [next(loader).hash for loader in self.loaders]

    def close(self) -> None:
        self.downloader.close()
        self.cache.close()


@contextmanager
def node(*arguments: Any, **keys: Any) -> Iterator[Node]:
    made = Node(*arguments, **keys)
    try:
        yield made
    finally:
        made.close()


def local_hashes(
    paths: Sequence[Path], cache: Path, order: MicroBatches, count: int, **keys: Any
) -> list[list[int]]:
    sequences = build(paths, cache, **keys)
    ranks = range(order.num_ranks)
    loaders = [SequenceLoader(sequences, replace(order, rank=rank), 0, False) for rank in ranks]
    return [[next(loader).hash for loader in loaders] for _ in range(count)]


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
def test_batches_equal_those_of_local_files_with_any_ranks_and_after_a_resume(
    corpora: list[Path], tmp_path: Path, packing: str
) -> None:
    remote = [url(path) for path in corpora]
    keys = {"packing": packing, "mask_documents": True, "holdout_sequences": 6}
    position, cache = 0, tmp_path / "cache" / "sequences"
    for ranks, max_bytes in [
        (1, 160_000),
        (2, 160_000),
        (3, LARGE),
    ]:  # the second run finds what the first left
        order = order_of(position, ranks=ranks)
        expected = local_hashes(corpora, tmp_path / "local", order, 20, **keys)
        sequences = build(remote, tmp_path / "cache", **keys)
        with node(sequences, cache, max_bytes, order) as made:
            actual = [made.next() for _ in range(20)]
            position = made.loaders[0].state_dict()["sequences"]
        assert actual == expected
        other = local_hashes(corpora, tmp_path / "local", order_of(position + 1, ranks=ranks), 20, **keys)
        assert other != expected  # the control: hashes tell sequences apart
