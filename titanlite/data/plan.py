"""The plan of best-fit packing: which documents, or pieces of documents, share a row.

Windows of WINDOW documents are packed one by one, by best-fit decreasing (as Ding et al. 2024, arXiv
2404.10830): longest first, each into the fullest row that still has room. Documents longer than a row are cut
into rows first. Every token is in exactly one row. The plan is arrays on disk, made once and mapped, so a row
is found in O(1); it is a function of the dataset and the row's length alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json, expect, load_object
from titanlite.data.shards import TokenShards, file_sha256
from titanlite.data.worker_pool import num_cores, worker_pool
from titanlite.files import named, sync
from titanlite.log import logger
from titanlite.progress import Progress

VERSION = 2  # raise it when the same dataset gives another plan, or the files have another format
WINDOW = 1 << 16  # documents: enough that rows are full, few enough for one core in a fraction of a second
FILES = {"starts": "<u8", "lengths": "<u4", "rows": "<u8"}


class Plan:
    """A plan on disk: `pieces(row)` are (starts, lengths) of token ranges of the dataset.

    Opening hashes every file; raises OSError or ValueError if one is not what was written. `fingerprint`
    follows from the files' content. Picklable: a loader worker maps the files anew.
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
                raise ValueError(f"{file.name} has {size} bytes, not as plan.json says")
            if file_sha256(file) != hashes.get(name):
                raise ValueError(f"{file.name} has another SHA-256 than plan.json")
        self.num_rows: int = counts["rows"] - 1
        self.fingerprint = hashlib.sha256("".join(hashes[name] for name in FILES).encode()).hexdigest()[:16]
        self._maps: dict[str, np.ndarray] = {}

    def pieces(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and lengths of the row's pieces: int64 each."""
        begin, end = self._map("rows")[row : row + 2].astype(np.int64)
        return self._map("starts")[begin:end].astype(np.int64), self._map("lengths")[begin:end].astype(
            np.int64
        )

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            self._maps[name] = np.asarray(np.memmap(self.path / f"{name}.bin", FILES[name], mode="r"))
        return self._maps[name]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}


def open_plan(shards: TokenShards, capacity: int, cache_dir: Path) -> Plan:
    """The plan for rows of `capacity` tokens, made on first use, on all cores; one that is damaged is made
    again, and is the same."""
    key = hashlib.sha256(f"{VERSION} {shards.fingerprint} {capacity}".encode()).hexdigest()[:16]
    path = cache_dir / f"best_fit-{key}"
    if os.path.lexists(path):
        try:
            return Plan(path)
        except (OSError, ValueError) as e:
            logger.warning(f"{path}: the packing plan is damaged ({e}); it is made again")
            _remove(path)
    _write_plan(shards, capacity, path)
    return Plan(path)


def _partial(path: Path) -> Path:
    """A new name for what is not, or no longer, the plan at `path`."""
    return path.with_name(f".partial-{path.name}-{uuid.uuid4().hex[:8]}")


def _remove(path: Path) -> None:
    """At once for those who look for the plan, whatever lies in its place."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    damaged = _partial(path)
    os.rename(path, damaged)
    shutil.rmtree(damaged, ignore_errors=True)


def _write_plan(shards: TokenShards, capacity: int, path: Path) -> None:
    """All or nothing, under another name until it is whole."""
    if not shards.num_tokens:
        raise ConfigError(f"{shards.path} holds no tokens")
    partial = _partial(path)
    for old in path.parent.glob(f".partial-{path.name}-*"):
        if time.time() - old.lstat().st_mtime > 86_400:  # left by a killed process
            shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    digests, counts = {name: hashlib.sha256() for name in FILES}, dict.fromkeys(FILES, 0)
    try:
        with (
            named(path),
            open(partial / "starts.bin", "wb") as starts,
            open(partial / "lengths.bin", "wb") as lengths,
            open(partial / "rows.bin", "wb") as rows,
        ):
            files = {"starts": starts, "lengths": lengths, "rows": rows}

            def write(name: str, array: np.ndarray) -> None:
                data = array.astype(FILES[name]).tobytes()
                files[name].write(data)
                digests[name].update(data)
                counts[name] += len(array)

            write("rows", np.zeros(1))
            for start, length, sizes in _packed_windows(shards, capacity):
                write("rows", counts["starts"] + np.cumsum(sizes))
                write("starts", start)
                write("lengths", length)
        hashes = {name: digest.hexdigest() for name, digest in digests.items()}
        (partial / "plan.json").write_bytes(as_json({"counts": counts, "sha256": hashes}))
        for file in [*partial.iterdir(), partial]:
            sync(file)
        try:
            os.rename(partial, path)
        except OSError:
            if not path.exists():  # otherwise another process was faster, and has made the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _packed_windows(
    shards: TokenShards, capacity: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Each window's pieces ordered by row (starts and lengths), and how many pieces each row has."""
    windows = list(_windows(shards))
    with (
        worker_pool(min(num_cores(), -(-len(windows) // 8)), _nothing, None) as pool,
        Progress(total=shards.num_documents, desc="packing", unit="doc", unit_scale=True, delay=1) as bar,
    ):
        for begin in range(0, len(windows), 64):  # a few at a time: results may be large
            batch = windows[begin : begin + 64]
            for window, packed in zip(batch, pool.map(pack_window, *_arguments(shards, batch, capacity))):
                yield packed
                bar.update(window[2] - window[1])


def _nothing(state: None) -> None:
    pass


def _windows(shards: TokenShards) -> Iterator[tuple[int, int, int]]:
    """(shard, first document, end) of each window; none spans shards."""
    for shard, count in enumerate(shards.documents_by_shard):
        for begin in range(0, count, WINDOW):
            yield shard, begin, min(begin + WINDOW, count)


def _arguments(
    shards: TokenShards, windows: list[tuple[int, int, int]], capacity: int
) -> tuple[list[np.ndarray], list[int]]:
    offsets = [shards.token_offsets(shard)[begin : end + 1] for shard, begin, end in windows]
    return offsets, [capacity] * len(windows)


def pack_window(offsets: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best-fit decreasing over documents [offsets[i], offsets[i + 1]): the pieces' starts and lengths,
    ordered by row, and the number of pieces of each row."""
    begins, sizes = offsets[:-1].astype(np.int64), np.diff(offsets.astype(np.int64))
    pieces: np.ndarray = -(-sizes // capacity)  # an empty document has none
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = np.repeat(begins, pieces) + number * capacity
    length = np.minimum(np.repeat(begins + sizes, pieces) - start, capacity)
    row = np.empty(len(length), dtype=np.int64)
    order = np.argsort(-length, kind="stable")
    row[order] = _best_fit(length[order].tolist(), capacity)
    by_row = np.argsort(row, kind="stable")  # within a row in the documents' order
    return start[by_row], length[by_row], np.bincount(row)


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The row of each length; they come longest first."""
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that is left
    rooms = (
        0  # bit r is set where rows_with_room[r] is not empty: the least room that suffices is one shift away
    )
    placed, count = [], 0
    for length in lengths:
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            room, row, count = capacity, count, count + 1
        placed.append(row)
        if left := room - length:
            rows_with_room[left].append(row)
            rooms |= 1 << left
    return placed
