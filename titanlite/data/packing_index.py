"""The index of best-fit packing, which assigns documents, or chunks of long documents, to sequences.

Each window of WINDOW documents is packed by best-fit decreasing (as in Ding et al. 2024, arXiv 2404.10830):
longest document first, each into the fullest sequence that still has room. Documents longer than a sequence
are first split at multiples of the sequence length. Every token is in exactly one sequence. The index
consists of arrays on disk, made once and memory-mapped, so reading an entry costs O(1). It depends only on
the dataset and the sequence length."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json, expect, load_object
from titanlite.config.paths import check_writable
from titanlite.data.sharded_tokens import ShardedTokens
from titanlite.data.worker_pool import num_cores, worker_pool
from titanlite.files import hash_file, new_folder
from titanlite.log import logger
from titanlite.progress import Progress

VERSION = 2  # increase it if the index of the same dataset or the file format changes
WINDOW = 1 << 16  # documents: enough to fill sequences, packed by one core in a fraction of a second
# The starts and lengths of all spans, and the index of each sequence's first span.
FILES = {"starts": "<u8", "lengths": "<u4", "rows": "<u8"}


class PackingIndex:
    """A packing index on disk.

    Opening hashes every file; raises OSError or ValueError if a file has changed. `fingerprint` is a hash of
    the files' contents. Picklable: each loader worker maps the files itself.
    """

    def __init__(self, path: Path):
        self.path = path
        description = load_object(path / "plan.json")
        expect(description, counts=dict, sha256=dict)
        counts, hashes = description["counts"], description["sha256"]
        expect(counts, **dict.fromkeys(FILES, int))
        for name, dtype in FILES.items():
            file = path / f"{name}.bin"
            if (size := file.stat().st_size) != counts[name] * np.dtype(dtype).itemsize:
                raise ValueError(f"{file.name} has {size} bytes, which differs from plan.json")
            if hash_file(file)[1] != hashes.get(name):
                raise ValueError(f"the SHA-256 of {file.name} differs from plan.json")
        self.num_sequences: int = counts["rows"] - 1
        self.fingerprint = hashlib.sha256("".join(hashes[name] for name in FILES).encode()).hexdigest()[:16]
        self._maps: dict[str, np.ndarray] = {}

    def spans(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranges of the dataset's tokens in sequence `number`: starts and lengths, int64 [spans]
        each."""
        begin, end = self._map("rows")[number : number + 2].astype(np.int64)
        starts, lengths = self._map("starts")[begin:end], self._map("lengths")[begin:end]
        return starts.astype(np.int64), lengths.astype(np.int64)

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            self._maps[name] = np.asarray(np.memmap(self.path / f"{name}.bin", FILES[name], mode="r"))
        return self._maps[name]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}


def open_packing_index(shards: ShardedTokens, capacity: int, cache_dir: Path) -> PackingIndex:
    """Open the index for sequences of `capacity` tokens. A missing or damaged index is made, on all cores; it
    always has the same bytes."""
    key = hashlib.sha256(f"{VERSION} {shards.fingerprint} {capacity}".encode()).hexdigest()[:16]
    path = cache_dir / f"best_fit-{key}"
    if os.path.lexists(path):
        try:
            return PackingIndex(path)
        except (OSError, ValueError) as e:
            check_writable(cache_dir, "data.cache_dir")
            logger.warning(f"{path}: the packing index is damaged ({e}) and is made again")
            _remove(path)
    check_writable(cache_dir, "data.cache_dir")
    _write_index(shards, capacity, path)
    return PackingIndex(path)


def _remove(path: Path) -> None:
    """Remove the file or folder at `path`. A folder is renamed before its files are deleted, so that other
    processes never open a half-deleted index. If the process is killed in between, new_folder deletes the
    rest."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    damaged = path.with_name(f".unfinished-{path.name}-{uuid.uuid4().hex[:8]}")
    os.rename(path, damaged)
    shutil.rmtree(damaged, ignore_errors=True)


def _write_index(shards: ShardedTokens, capacity: int, path: Path) -> None:
    if not shards.num_tokens:
        raise ConfigError(f"{shards.path} holds no tokens")
    digests, counts = {name: hashlib.sha256() for name in FILES}, dict.fromkeys(FILES, 0)
    with new_folder(path) as folder, ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in FILES}

        def write(name: str, array: np.ndarray) -> None:
            data = array.astype(FILES[name]).tobytes()
            files[name].write(data)
            digests[name].update(data)
            counts[name] += len(array)

        write("rows", np.zeros(1))
        for start, length, spans_per_sequence in _packed_windows(shards, capacity):
            write("rows", counts["starts"] + np.cumsum(spans_per_sequence))
            write("starts", start)
            write("lengths", length)
        hashes = {name: digest.hexdigest() for name, digest in digests.items()}
        (folder / "plan.json").write_bytes(as_json({"counts": counts, "sha256": hashes}))


def _packed_windows(
    shards: ShardedTokens, capacity: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the result of pack_window for each window of the dataset, in order."""
    windows = [  # (shard, first document, end)
        (shard, begin, min(begin + WINDOW, count))
        for shard, count in enumerate(shards.documents_by_shard)
        for begin in range(0, count, WINDOW)
    ]
    with (
        worker_pool(min(num_cores(), -(-len(windows) // 8))) as pool,
        Progress(total=shards.num_documents, desc="packing", unit="doc", unit_scale=True, delay=1) as bar,
    ):
        for begin in range(0, len(windows), 64):  # results may be large, so few are pending at a time
            offsets = [
                shards.token_offsets(shard, first, end) for shard, first, end in windows[begin : begin + 64]
            ]
            yield from pool.map(partial(pack_window, capacity=capacity), offsets)
            bar.update(sum(len(documents) - 1 for documents in offsets))


def pack_window(offsets: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack documents by best-fit decreasing; document i is tokens [offsets[i], offsets[i + 1]). Returns the
    starts and lengths of the spans, ordered by sequence, and the number of spans in each sequence."""
    begins, sizes = offsets[:-1].astype(np.int64), np.diff(offsets.astype(np.int64))
    num_spans: np.ndarray = -(-sizes // capacity)  # 0 for an empty document
    number = np.arange(num_spans.sum()) - np.repeat(np.cumsum(num_spans) - num_spans, num_spans)
    start = np.repeat(begins, num_spans) + number * capacity
    length = np.minimum(np.repeat(begins + sizes, num_spans) - start, capacity)
    sequence = np.empty(len(length), dtype=np.int64)
    order = np.argsort(-length, kind="stable")
    num_full = int((length == capacity).sum())  # each fills a sequence; a document may have millions
    sequence[order[:num_full]] = np.arange(num_full)
    sequence[order[num_full:]] = _best_fit(length[order[num_full:]].tolist(), capacity)
    sequence[order[num_full:]] += num_full
    by_sequence = np.argsort(sequence, kind="stable")  # stable: in document order within a sequence
    return start[by_sequence], length[by_sequence], np.bincount(sequence)


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the number of the sequence for each length. Lengths must be in descending order."""
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences by remaining room
    rooms = 0  # bit r is set if with_room[r] is not empty: one shift finds the least sufficient room
    placed, count = [], 0
    for length in lengths:
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence, count = capacity, count, count + 1
        placed.append(sequence)
        if left := room - length:
            with_room[left].append(sequence)
            rooms |= 1 << left
    return placed
