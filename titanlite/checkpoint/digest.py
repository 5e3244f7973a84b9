"""Size and SHA-256 of every file of a checkpoint, computed while it is written and before it is used.

torch does not detect damaged files: 199 of 200 random bit flips in a DCP file load without an error, because
torch does not check the CRC of its zip records (pytorch issue 126952)."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePath
from typing import NamedTuple

from titanlite.files import FileFault, hash_stream
from titanlite.storage import storage_of

THREADS = 8  # hashing and file I/O release the GIL; one core hashes 1.5 to 2 GB/s


class FileDigest(NamedTuple):
    """Size in bytes and SHA-256 in hex of a file."""

    size: int
    sha256: str


class HashingFile:
    """A new file whose content is hashed while it is written. Takes sequential writes only."""

    def __init__(self, path: PurePath):
        self.path, self._file = path, storage_of(path).create(path)
        self._sha = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._sha.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Complete the file. Returns when it outlasts a power loss."""
        self._file.close()

    def abort(self) -> None:
        """Give up the file, which may be there in part."""
        self._file.abort()

    def digest(self) -> FileDigest:
        """The digest of the content so far."""
        return FileDigest(self.size, self._sha.hexdigest())


@contextmanager
def new_file(path: PurePath) -> Iterator[HashingFile]:
    """A new file that the body writes, and that is complete when the body ends without an error."""
    file = HashingFile(path)
    try:
        yield file
    except BaseException:
        file.abort()
        raise
    file.close()


def write_file(path: PurePath, data: bytes) -> FileDigest:
    """Write a new file, which outlasts a power loss."""
    with new_file(path) as file:
        file.write(data)
    return file.digest()


def digest_file(path: PurePath) -> FileDigest:
    """Read a file and hash it."""
    with storage_of(path).open(path) as file:
        return FileDigest(*hash_stream(file, path))


def first_fault(folder: PurePath, files: Mapping[str, FileDigest]) -> str | None:
    """Hash `files` in parallel. Returns a description of the first damaged file, or None. Raises OSError if a
    file cannot be read for another reason than damage, such as a file system that does not answer."""

    def fault(item: tuple[str, FileDigest]) -> str | None:
        return fault_of(folder / item[0], item[1], digest_file)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return next((reason for reason in pool.map(fault, files.items()) if reason), None)


def fault_of(path: PurePath, expected: FileDigest, read: Callable[[PurePath], FileDigest]) -> str | None:
    """A description of the damage of a file, or None. `read`: reads and hashes it. Raises as first_fault."""
    try:
        digest = read(path)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except FileFault as e:
        return f"{path.name} cannot be read: {e}"
    except OSError as e:
        if e.errno != errno.EIO:  # only a bad sector is damage
            raise
        return f"{path.name} cannot be read: {e.strerror}"
    if digest.size != expected.size:
        return f"{path.name} has {digest.size:,} bytes, {expected.size:,} were written"
    return None if digest == expected else f"{path.name} is not what was written: its SHA-256 differs"


def gib(size: int) -> str:
    """A number of bytes in GiB, or in MiB below half a GiB, for messages."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 29 else f"{size / 2**20:.1f} MiB"
