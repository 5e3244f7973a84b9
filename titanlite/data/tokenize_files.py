"""tokenize_files: makes token shards from text files, for sources that tokenise on first use.

The files are partitioned into splits (text_files.py), the splits are drawn at random into shards, and the
documents of each shard are shuffled. Training shuffles sequences over the whole dataset (order.py), so only
the documents within a sequence need mixing here. The bytes do not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.data.order import key_of, permute
from titanlite.data.shards import TokenShards, token_dtype, write_description, write_shard
from titanlite.data.text_files import (
    DEFAULT_LIMITS,
    FileSplit,
    Limits,
    read_split,
    split_files,
    version_of,
    where,
)
from titanlite.data.worker_pool import num_cores, worker_pool
from titanlite.files import new_folder
from titanlite.progress import Progress
from titanlite.tokenizers.base import Tokenizer

VERSION = 2  # increase it when a change of the code changes the bytes that the same input gives
SHARD_BYTES = 256 << 20  # of text, from 32 splits: about 128 MiB of uint16 tokens
SEED = 0  # of the shuffle
BATCH, BATCH_CHARACTERS = 64, 8 << 20  # largest batch for the tokenizer
T = TypeVar("T")


def tokenize_files(
    files: Sequence[Path], output: Path, tokenizer: Tokenizer, field: str, limits: Limits = DEFAULT_LIMITS
) -> TokenShards:
    """Make the dataset `output` from text files, on all cores. An interruption leaves nothing. Raises
    ConfigError for bad input."""
    splits, before = split_files(files, field), [version_of(file) for file in files]
    shards = group_splits(splits, SEED)
    encoder = _Encoder(tokenizer, field, limits)
    num_processes = min(num_cores(), len(splits))
    with (
        new_folder(output) as folder,
        worker_pool(num_processes, _begin, encoder) as pool,
        Progress(
            total=sum(split.size for split in splits), unit="B", unit_scale=True,
            desc=f"tokenising into {output.name}", mininterval=0.5,
        ) as bar,
    ):  # fmt: skip
        encoded = pool.map(_encode, (splits[i] for shard in shards for i in shard))
        entries = list[dict[str, Any]]()
        for number, shard in enumerate(shards):
            tokens, lengths = list[np.ndarray](), list[np.ndarray]()
            for i in shard:
                for results, array in zip((tokens, lengths), _next(encoded)):
                    results.append(array)
                bar.update(splits[i].size)
            documents = shuffle_documents(tokens, lengths, SEED, number)
            entries.append(write_shard(folder, f"{number:05}", documents, token_dtype(tokenizer.vocab_size)))
        if [version_of(file) for file in files] != before:
            raise ConfigError(f"{output.name}: its text files changed while they were read; run it again")
        if not any(entry["documents"] for entry in entries):
            raise ConfigError("the corpus is empty: no text in its files")
        origin = {"tokenizer": toml.as_tree(tokenizer.config)} if tokenizer.config else {}
        write_description(folder, tokenizer, entries, {"field": field, **origin})
    return TokenShards(output)


def group_splits(splits: Sequence[FileSplit], seed: int) -> list[list[int]]:
    """Draw splits at random into groups of about SHARD_BYTES. Returns the indices of each group's splits."""
    groups, size = list[list[int]](), SHARD_BYTES
    for index in permute(np.arange(len(splits)), len(splits), key_of("splits", seed)).tolist():
        if size >= SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += splits[index].size
    return groups


def shuffle_documents(
    arrays: Sequence[np.ndarray], lengths: Sequence[np.ndarray], seed: int, shard: int
) -> Iterator[np.ndarray]:
    """Yield the documents of a shard, shuffled. `arrays`: the concatenated documents of each split.
    `lengths`: the documents' lengths, int64 [num_documents] per split."""
    stops = [np.cumsum(n) for n in lengths]
    split = np.repeat(np.arange(len(lengths)), [len(n) for n in lengths])
    start, stop = np.concatenate([s - n for s, n in zip(stops, lengths)]), np.concatenate(stops)
    for i in permute(np.arange(len(split)), len(split), key_of("documents", seed, shard)):
        yield arrays[split[i]][start[i] : stop[i]]


def batches(documents: Iterable[T], length_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Group documents into batches that are handed to the tokenizer at once."""
    batch, size = list[T](), 0
    for document in documents:
        batch.append(document)
        size += length_of(document)
        if len(batch) == BATCH or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def check_ids(ids: np.ndarray, vocab_size: int, file: PurePath, place: int) -> None:
    """Raise ConfigError if a document has a token id outside the vocabulary."""
    if len(ids) and ids.max() >= vocab_size:
        raise ConfigError(f"{where(file, place)}: token id {ids.max()} >= vocab_size {vocab_size}")


def _next(encoded: Iterator[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    try:
        return next(encoded)
    except BrokenProcessPool:
        raise RuntimeError("a process that tokenises was killed, perhaps because memory ran out") from None


# ---- processes


@dataclass(frozen=True)
class _Encoder:
    tokenizer: Tokenizer
    field: str
    limits: Limits

    def encode(self, split: FileSplit) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated token ids of a split's documents, and the documents' lengths."""
        dtype = token_dtype(self.tokenizer.vocab_size)
        arrays, lengths = [np.empty(0, dtype)], list[int]()
        documents = read_split(split, self.field, limits=self.limits)
        for batch in batches(documents, lambda document: len(document.text)):
            for document, ids in zip(batch, self.tokenizer.encode_documents([d.text for d in batch])):
                check_ids(ids, self.tokenizer.vocab_size, document.file, document.place)
                arrays.append(ids.astype(dtype))
                lengths.append(len(ids))
        return np.concatenate(arrays), np.array(lengths, np.int64)


_encoder: list[_Encoder] = []  # one entry: the encoder of this process


def _begin(encoder: _Encoder) -> None:
    _encoder[:] = [encoder]


def _encode(split: FileSplit) -> tuple[np.ndarray, np.ndarray]:
    return _encoder[0].encode(split)
