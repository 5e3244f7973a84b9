"""Datasets on a storage that is not the local disk.

dataset.json is read at every start. `materialise` brings the indices to the cache folder, compared with their
SHA-256, and records the size and the tag of each file of tokens there. From then on tokens are read on the
condition that their file still has that tag. In a run, `load` gets whole sequences from the SequenceCache;
programs without one read each range from the storage."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np

from titanlite.config.component import ConfigError, Unreadable
from titanlite.config.json_file import as_json, parse, read_object
from titanlite.config.paths import check_writable
from titanlite.data.packing import PackedSequences
from titanlite.data.sequence_cache import SequenceCache
from titanlite.data.shards import PreparedTokens, TokenShards, checked_description
from titanlite.files import hash_stream, make_folder, new_folder
from titanlite.log import logger
from titanlite.storage import parse_path, storage_of

T = TypeVar("T")
CONNECTIONS = 64  # requests at a time: S3 takes about 30 ms for a small one
ATTEMPTS, RETRY_S, MAX_DELAY_S = 7, 60.0, 10.0
# Errors that come again at every attempt.
FINAL = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ESTALE}


class FileRange(NamedTuple):
    """`length` tokens of a shard from `offset` on: ids (kind "tokens") or loss mask ("mask")."""

    kind: str
    shard: int
    offset: int
    length: int


class RemoteTokens(PreparedTokens):
    """A dataset at the URL `url`. `cache_dir`: for the indices. `cache`: has the sequences in a run."""

    is_remote = True

    def __init__(self, url: str, cache_dir: Path):
        self._url, self._cache_dir = url, cache_dir
        path = parse_path(url)
        content = _read_description(path, cache_dir, _key(url))
        self._folder = cache_dir / f"dataset-{_key(url)}-{hashlib.sha256(content).hexdigest()[:16]}"
        try:
            description = parse(content)
        except ValueError as e:
            raise ConfigError(f"{path / 'dataset.json'} does not describe a dataset: {e}") from None
        super().__init__(path, checked_description(description, path / "dataset.json"))
        self._description = content
        self._hashes = {
            f"{s['name']}.{kind}": s[f"{kind}_sha256"] for s in self._shards for kind in self._kinds
        }
        self.cache: SequenceCache | None = None
        self._loaded: dict[FileRange, np.ndarray] = {}

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token id and its part of the loss mask."""
        return self._dtype.itemsize + self.has_loss_mask

    def materialise(self) -> None:
        """Bring the indices to the cache folder, and check the sizes of all files. Once per node: other
        processes wait. Raises ConfigError, which names the file."""
        check_writable(self._cache_dir, "data.cache_dir")
        make_folder(self._cache_dir)
        with _locked(self._cache_dir / f".dataset-{_key(self._url)}.lock"):
            if not self._folder.exists():
                with new_folder(self._folder) as folder:
                    tags = dict(zip(self._hashes, self._for_all(partial(self._bring, folder))))
                    (folder / "tags.json").write_bytes(as_json(tags))
                    (folder / "dataset.json").write_bytes(self._description)
            elif not all(self.tags.values()):  # a storage without tags: what can be compared is sizes
                self._for_all(self._check_size)

    @cached_property
    def tags(self) -> dict[str, str]:
        """The tag that each file had when its size was checked."""
        return read_object(self._folder / "tags.json") if self._folder.exists() else {}

    def verify(self) -> None:
        def check(name: str) -> None:
            with storage_of(self.path).open(self.path / name) as file:
                sha256 = hash_stream(file, self.path / name)[1]
            if sha256 != self._hashes[name]:
                raise self._other_hash(name)

        self._for_all(check)

    def ranges(self, packed: PackedSequences, number: int) -> list[FileRange]:
        """Return the ranges of the files that a sequence consists of."""
        kinds = ("tokens", "mask") if self.has_loss_mask else ("tokens",)
        return [
            FileRange(kind, shard, offset, place.stop - place.start)
            for start, count in packed.reads(number)
            for kind in kinds
            for shard, offset, place in self._ranges(start, count)
        ]

    def read_range(self, place: FileRange) -> bytes:
        """Read a range from the storage, once. Raises OSError, with errno ESTALE if the file has changed."""
        name = f"{self._shards[place.shard]['name']}.{'bin' if place.kind == 'tokens' else 'mask'}"
        width, path, storage = self._type(place.kind).itemsize, self.path / name, storage_of(self.path)
        start, size = place.offset * width, place.length * width
        data = storage.read_tagged(path, self.tags.get(name, ""), start, size)
        if len(data) != size:
            is_shorter = storage.size(path) != self.sizes()[name]
            text = "it is shorter than dataset.json says" if is_shorter else "the storage sent too few bytes"
            raise OSError(errno.ESTALE if is_shorter else errno.EIO, text, str(path))
        return data

    def hold(self, ranges: Sequence[FileRange], data: bytes) -> None:
        """Keep the bytes of a sequence for the next reads of its ranges."""
        begin = 0
        for place in ranges:
            dtype = self._type(place.kind)
            self._loaded[place] = np.frombuffer(data, dtype, place.length, begin)
            begin += place.length * dtype.itemsize

    def release(self) -> None:
        """Drop the bytes of all sequences."""
        self._loaded.clear()

    def _slice(self, kind: str, shard: int, offset: int, count: int) -> np.ndarray:
        place = FileRange(kind, shard, offset, count)
        if place in self._loaded:
            return self._loaded[place]
        data = retried(partial(self.read_range, place), self.bin_file(shard))
        return np.frombuffer(data, self._type(kind))

    def _open_tokens(self, shard: int) -> np.ndarray:
        raise NotImplementedError  # _slice reads ranges

    def _open_offsets(self, shard: int) -> np.ndarray:
        name = f"{self._shards[shard]['name']}.idx"
        if (self._folder / name).exists():
            return np.asarray(np.memmap(self._folder / name, np.dtype("<u8"), mode="r"))
        return np.frombuffer(self._read_index(name), np.dtype("<u8"))

    def _type(self, kind: str) -> np.dtype:
        return self._dtype if kind == "tokens" else np.dtype(np.uint8)

    def _bring(self, folder: Path, name: str) -> str:
        """Return the tag of a file, whose size is checked. An index is written into `folder`."""
        if name.endswith(".idx"):
            (folder / name).write_bytes(self._read_index(name))
            return "in the cache"
        tag = storage_of(self.path).tag(self.path / name)  # first: a file that changes later has another one
        self._check_size(name)
        return tag

    def _read_index(self, name: str) -> bytes:
        data = retried(lambda: storage_of(self.path).read(self.path / name), self.path / name)
        if hashlib.sha256(data).hexdigest() != self._hashes[name]:
            raise self._other_hash(name)
        return data

    def _other_hash(self, name: str) -> ConfigError:
        said = "its SHA-256 differs from that in dataset.json; prepare the dataset again"
        return ConfigError(f"{self.path / name}: {said}")

    def _check_size(self, name: str) -> None:
        size, expected = storage_of(self.path).size(self.path / name), self.sizes()[name]
        if size != expected:
            said = f"has {size} bytes, dataset.json says {expected}; prepare the dataset again"
            raise ConfigError(f"{self.path / name} {said}")

    def _for_all(self, call: Callable[[str], T]) -> list[T]:
        """Call `call` with the name of each file, for many files at a time."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(lambda name: retried(lambda: call(name), self.path / name), self._hashes))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"path": type(storage_of(self.path)), "_loaded": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, path=state["path"]().path(state["_url"]))


def open_tokens(path: str, cache_dir: Path) -> PreparedTokens:
    """Open the dataset at a path or URL. `cache_dir`: for the indices of a dataset that is not on the local
    disk."""
    place = parse_path(path, "path")
    return TokenShards(place) if isinstance(place, Path) else RemoteTokens(path, cache_dir)


def load(located: Sequence[tuple[PackedSequences, int]]) -> None:
    """Get the sequences that are read next from the cache, all at once, if their datasets have one."""
    waiting: dict[int, tuple[RemoteTokens, list[FileRange]]] = {}
    cache = None
    for packed, number in located:
        shards = packed.shards
        if isinstance(shards, RemoteTokens) and shards.cache is not None:
            cache = shards.cache
            waiting[cache.first_id(packed.content) + number] = shards, shards.ranges(packed, number)
            shards.release()
    if cache is not None:
        for id_, data in cache.read(list(waiting)).items():
            shards, ranges = waiting[id_]
            shards.hold(ranges, data)


def retried(call: Callable[[], T], path: PurePath) -> T:
    """Return the result of `call`, which reads `path` and is repeated after an OSError that may pass. Raises
    ConfigError, and Unreadable if the error does not pass."""
    began = time.monotonic()
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except OSError as e:
            if is_final(e):
                raise ConfigError(explain(e, path)) from None
            if attempt + 1 == ATTEMPTS or time.monotonic() - began > RETRY_S:
                raise Unreadable(explain(e, path)) from None
            time.sleep(delay_s(attempt))
    raise AssertionError


def is_final(error: Exception) -> bool:
    """Whether another attempt would meet the same error."""
    return isinstance(error, OSError) and (error.errno in FINAL or isinstance(error, FileNotFoundError))


def delay_s(attempt: int) -> float:
    """Return the seconds before the next attempt, which grow and are random, so that ranks do not meet."""
    return min(MAX_DELAY_S, 0.1 * 3.0**attempt) * (0.5 + random.random() / 2)


def explain(error: Exception, path: PurePath) -> str:
    """Return one line on an error of reading `path`."""
    if getattr(error, "errno", None) == errno.ESTALE:
        return (
            f"{path}: the file has changed since a run first used the dataset. "
            "Compare it by `titanlite data verify`; if all hashes match, delete dataset-*/ in data.cache_dir"
        )
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    return f"{path}: {'no such file' if isinstance(error, FileNotFoundError) else reason}"


def _key(url: str) -> str:
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


def _read_description(path: PurePath, cache_dir: Path, key: str) -> bytes:
    """Return the content of dataset.json. If the storage does not answer, it is that of the last start."""
    try:
        return retried(lambda: storage_of(path).read(path / "dataset.json"), path / "dataset.json")
    except Unreadable as e:
        copies = sorted(
            cache_dir.glob(f"dataset-{key}-*/dataset.json"), key=lambda copy: copy.stat().st_mtime
        )
        if not copies:
            raise
        logger.info(f"{e}: the copy of an earlier start is used: {copies[-1]}")
        return copies[-1].read_bytes()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Run the body while no other process of this machine does."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
