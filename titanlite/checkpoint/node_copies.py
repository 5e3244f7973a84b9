"""Copies of a checkpoint's shards on the disk of a node, for a resume from a bucket.

The first rank of a node that reads from a shard copies it to a folder in $TMPDIR and hashes it on the way;
the other ranks of the node wait, and read the copy. So a node reads each byte at most once, and no byte that
was not verified is loaded. A node needs as much free space as the shards that its ranks read: for one node,
the whole checkpoint. A shard that finds no room is read in place and hashed afterwards: it is read twice."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import SHARD_SUFFIX, Damaged, Manifest
from titanlite.checkpoint.digest import FileDigest, fault_of, first_fault
from titanlite.checkpoint.file_system import HashingFileSystem
from titanlite.checkpoint.resume import files_to_hash, tell_all
from titanlite.log import logger
from titanlite.ranks import Ranks
from titanlite.storage import storage_of

BLOCK_BYTES = 16 << 20  # in memory per thread; an object store reads a block by two requests at a time
SPARE_BYTES = 1 << 30  # left free on the disk, which has other users


class NodeCopies(HashingFileSystem):
    """Reads the shards of the checkpoint at `path` through copies. Has the interface of resume.Verification.
    The constructor and `result` are collective."""

    def __init__(self, path: PurePath, manifest: Manifest, ranks: Ranks):
        super().__init__()
        self._path, self._manifest, self._ranks = path, manifest, ranks
        digests = commit.digests(manifest).items()
        self._shards = {name: digest for name, digest in digests if name.endswith(SHARD_SUFFIX)}
        # The name tells which run a killed process has left a folder of: only one at a time uses that run.
        parent, run = Path(tempfile.gettempdir()), hashlib.sha256(str(path.parent).encode()).hexdigest()[:16]
        token = ranks.from_rank_zero(lambda: uuid.uuid4().hex[:8])
        self.folder = parent / f"titanlite-resume-{run}-{token}"
        for leftover in parent.glob(f"titanlite-resume-{run}-*"):
            if leftover != self.folder:
                shutil.rmtree(leftover, ignore_errors=True)
        self._verified = set[str]()
        self._fault: str | None = None
        self._error: Exception | None = None
        self._has_room = True

    def in_order(self, names: Collection[str]) -> Sequence[str]:
        """Each rank begins with other shards, so that the ranks of a node copy different ones."""
        ordered = sorted(names)
        start = self._ranks.rank * len(ordered) // self._ranks.size
        return [*ordered[start:], *ordered[:start]]

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        copy = self._copy(path)
        with open(copy, "rb") if copy else storage_of(path).open(path) as stream:
            yield stream

    def result(self) -> str | None:
        """Verify the shards that were not copied on any node; see resume.Verification.result."""
        copied = set(self._ranks.union(self._verified))
        rest = {name: digest for name, digest in self._shards.items() if name not in copied}
        fault, error = self._fault, self._error
        if fault is None and error is None:
            try:
                mine = files_to_hash(rest, self._ranks.rank, self._ranks.size, self._manifest["ranks"])
                fault = first_fault(self._path, mine)
            except Exception as e:
                error = e
        return tell_all(fault, error, self._path, self._ranks)

    def close(self) -> None:
        """Delete the copies. Ranks that still need one read in place."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _copy(self, path: PurePath) -> Path | None:
        """The verified copy of a shard; None if there is no room for it. Raises Damaged, and OSError if the
        storage does not answer."""
        if path.name not in self._shards:
            raise Damaged(f"{path.name} was not written with it")
        if not self._has_room:
            return None
        copy = self.folder / path.name
        try:
            with _local_disk():
                self.folder.mkdir(mode=0o700, exist_ok=True)
                lock = open(self.folder / f".{path.name}.lock", "wb")  # noqa: SIM115 -- closed below
            with lock:
                with _local_disk():
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not copy.exists():
                    self._make_copy(path, copy)
        except NoRoom as e:
            self._has_room = False
            logger.warning(
                f"no room for copies of the checkpoint in {self.folder.parent} ({e}): its shards are read "
                "twice, to load and to verify them; TMPDIR=FOLDER names a folder with more room"
            )
            return None
        except Damaged as e:
            self._fault = self._fault or str(e)
            raise
        except OSError as e:
            self._error = self._error or e
            raise
        self._verified.add(path.name)
        return copy

    def _make_copy(self, path: PurePath, copy: Path) -> None:
        expected, unfinished = self._shards[path.name], copy.with_suffix(".unfinished")
        try:
            with _local_disk():
                self._reserve(unfinished, expected.size)
            if reason := fault_of(path, expected, partial(_copy_and_hash, unfinished)):
                raise Damaged(reason)
            with _local_disk():
                unfinished.rename(copy)
        finally:
            with suppress(OSError):
                unfinished.unlink()

    def _reserve(self, file: Path, size: int) -> None:
        """Make a file that has its space on the disk already: the threads and ranks of a node begin copies
        together, which must not count on the same free space. Raises NoRoom."""
        with open(self.folder / ".room.lock", "wb") as lock, open(file, "wb") as new:
            fcntl.flock(lock, fcntl.LOCK_EX)
            free = shutil.disk_usage(self.folder).free
            if free < size + SPARE_BYTES:
                raise NoRoom(f"{free:,} bytes are free")
            try:
                os.posix_fallocate(new.fileno(), 0, size)
            except (AttributeError, OSError) as e:  # macOS and some file systems cannot: copies may use more
                if getattr(e, "errno", None) not in (None, errno.EINVAL, errno.EOPNOTSUPP):
                    raise


class NoRoom(Exception):
    """The disk of the node cannot take a copy."""


@contextmanager
def _local_disk() -> Iterator[None]:
    """Tells errors of the disk of the node from errors of the storage."""
    try:
        yield
    except OSError as e:
        raise NoRoom(str(e)) from None


def _copy_and_hash(target: Path, path: PurePath) -> FileDigest:
    """Copy the file at `path` over an existing one. Returns the digest of the bytes that it has read."""
    sha, size, block = hashlib.sha256(), 0, memoryview(bytearray(BLOCK_BYTES))
    with _local_disk():
        writer = open(target, "r+b", buffering=0)  # noqa: SIM115 -- closed below
    with writer, storage_of(path).open(path) as reader:
        while count := reader.readinto(block):
            sha.update(block[:count])
            size += count
            left = block[:count]
            while left:
                with _local_disk():
                    left = left[writer.write(left) or 0 :]
    return FileDigest(size, sha.hexdigest())
