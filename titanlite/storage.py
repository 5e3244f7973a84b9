"""Where a run keeps its files: checkpoints, metrics, samples and the records of its start.

All of them are read and written through the storage of their path. A path is a PurePath, which cannot do I/O
by itself: a pathlib.Path is on the local disk, and the path of another storage has that storage as its
attribute `storage`. `job.dump_folder` chooses: the component named `scheme` makes the path of
`scheme://...`."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import BufferedIOBase
from pathlib import Path, PurePath
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from titanlite import files
from titanlite.config.component import Component, ConfigError, suggest
from titanlite.config.paths import URL, check_writable
from titanlite.log import logger

P = TypeVar("P", bound=PurePath)
COPY_BYTES = 16 << 20  # of a file that is copied, in memory at a time


class NewFile(Protocol):
    """A file that is being written. Either `close` or `abort` is called at its end."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append all of `data`."""

    def flush(self) -> None:
        """Hand over what was written so far."""

    def close(self) -> None:
        """Complete the file. Returns when it outlasts a power loss; raises OSError if it may not."""

    def abort(self) -> None:
        """Give up: the file may be missing afterwards, or there in part."""


class Lock(ABC):
    """The lock at a path, which at most one process has. It is free again when that process ends."""

    @abstractmethod
    def try_take(self) -> bool:
        """Whether this process has the lock now."""

    @abstractmethod
    def owner(self) -> str:
        """The text that the process with the lock has written; empty if it has written none."""

    @abstractmethod
    def write_owner(self, text: str) -> None:
        """Write a text for processes that want the lock, too. Raises OSError."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the lock was removed, moved or replaced while this process had it."""

    @abstractmethod
    def release(self) -> None:
        """Give the lock back."""


class FileVersion(NamedTuple):
    """Tells a file from an earlier one of its name. `tag`: as of Storage.tag, but for quotes around it."""

    size: int
    tag: str


class FolderId(NamedTuple):
    """Tells a folder from a copy of it. A move keeps `device` and `number`."""

    path: str
    device: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Storage(Component):
    """The base class of storages. A folder is a name that paths begin with; a storage may have no folders
    apart from that. Errors are OSErrors as those of the local disk: FileNotFoundError for a missing file,
    FileExistsError for one that exists already."""

    has_folders: ClassVar[bool] = True
    """Whether there can be an empty folder. If not, a folder is there with its first file."""

    commit_rule: ClassVar[str]
    """How a reader of a checkpoint knows that it is complete; written into its manifest. "rename": the folder
    has its final name."""

    @abstractmethod
    def path(self, text: str) -> PurePath:
        """The path that a text names, such as the value of job.dump_folder. `storage` is its attribute."""

    @abstractmethod
    def check_writable(self, folder: PurePath, key: str) -> None:
        """Raises ConfigError if it is known that `folder` cannot be written to. Writes nothing. `key`: the
        TOML key that names the folder."""

    @abstractmethod
    def exists(self, path: PurePath) -> bool:
        """Whether there is a file or a folder."""

    @abstractmethod
    def is_folder(self, path: PurePath) -> bool:
        """Whether there is a folder."""

    @abstractmethod
    def size(self, path: PurePath) -> int:
        """The bytes of a file."""

    @abstractmethod
    def list(self, folder: P, pattern: str = "*") -> list[P]:
        """The files and folders directly in a folder whose names match, in no order; none if there is no such
        folder."""

    def files_below(self, folder: P) -> dict[P, FileVersion]:
        """All files in a folder and its folders."""
        found = dict[P, FileVersion]()
        for path in self.list(folder):
            if self.is_folder(path):
                found |= self.files_below(path)
            else:
                found[path] = FileVersion(self.size(path), self.tag(path))
        return found

    @abstractmethod
    def open(self, path: PurePath) -> BufferedIOBase:
        """A file to read from, with `seek`. Several threads may each open the same file."""

    def read(self, path: PurePath, start: int = 0, size: int = -1) -> bytes:
        """`size` bytes of a file from the byte `start` on; fewer at its end. -1: all bytes to its end."""
        with self.open(path) as file:
            file.seek(start)
            return file.read(size)

    def tag(self, path: PurePath) -> str:
        """A text that changes with the content of a file, such as its e-tag; "" if the storage has none."""
        return ""

    def read_tagged(self, path: PurePath, tag: str, start: int, size: int) -> bytes:
        """As `read`, of a file that has this tag; "": any. Raises OSError with errno ESTALE if it has another
        one. A storage that can make a request on this condition does so."""
        data = self.read(path, start, size)
        if tag and self.tag(path) != tag:
            raise OSError(errno.ESTALE, "the file has changed", str(path))
        return data

    @abstractmethod
    def create(self, path: PurePath) -> NewFile:
        """A new file to write to, from one end to the other. Raises FileExistsError, here or when the file is
        closed, if there is such a file."""

    @abstractmethod
    def put(self, path: PurePath, data: bytes) -> None:
        """Create or replace a small file. After a kill or a power loss it has the old or the new content.
        Only one process may write to `path` at a time."""

    def put_record(self, path: PurePath, data: bytes) -> None:
        """As `put`, for a file of records that training waits for: a storage that did not answer a short time
        ago may raise OSError at once."""
        self.put(path, data)

    @abstractmethod
    def append(self, path: PurePath, data: bytes) -> None:
        """Append to a file all of `data` or, if the storage is full, nothing. Creates a missing file."""

    @abstractmethod
    def rename(self, path: PurePath, target: PurePath) -> None:
        """Rename a file, or a folder to a name that nothing has, at once. Raises OSError if `target` is a
        folder with anything in it."""

    @abstractmethod
    def delete(self, path: PurePath) -> None:
        """Delete a file, or a folder and as much of its content as possible. A missing one is no error."""

    @abstractmethod
    def make_folder(self, path: PurePath) -> None:
        """Make a folder and its missing parents, so that they outlast a power loss."""

    @abstractmethod
    def sync(self, path: PurePath) -> None:
        """Return when the names in a folder outlast a power loss."""

    @abstractmethod
    def free_bytes(self, folder: PurePath) -> int | None:
        """The bytes that can still be written, or None if the storage knows no limit."""

    @abstractmethod
    def lock(self, path: PurePath) -> Lock:
        """The lock at a path, not taken yet. Raises OSError if nothing can be written there."""

    @abstractmethod
    def folder_id(self, folder: PurePath) -> FolderId:
        """Tells an existing folder from a copy of it."""


@dataclass(frozen=True, kw_only=True)
class LocalDisk(Storage, name="file"):
    """The disks of this machine, and file systems that several machines share."""

    commit_rule: ClassVar[str] = "rename"

    def path(self, text: str) -> Path:
        return Path(text.removeprefix("file://"))

    def check_writable(self, folder: PurePath, key: str) -> None:
        check_writable(Path(folder), key)

    def exists(self, path: PurePath) -> bool:
        return _mode(path) is not None

    def is_folder(self, path: PurePath) -> bool:
        return stat.S_ISDIR(_mode(path) or 0)

    def size(self, path: PurePath) -> int:
        return os.stat(path).st_size

    def list(self, folder: P, pattern: str = "*") -> list[P]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return [folder / name for name in os.listdir(folder) if fnmatchcase(name, pattern)]
        return []

    def open(self, path: PurePath) -> BufferedIOBase:
        return files.open_regular(Path(path))

    def create(self, path: PurePath) -> NewFile:
        return _NewLocalFile(path)

    def put(self, path: PurePath, data: bytes) -> None:
        files.write_atomically(Path(path), data)

    def append(self, path: PurePath, data: bytes) -> None:
        # `cp -rl` copies a run folder as hard links, and the copy must not get the records of this run.
        if os.path.exists(path) and os.stat(path).st_nlink > 1:
            self.put(path, self.read(path))
        with open(path, "ab") as file, files.named(Path(path)):
            end, written = file.tell(), 0
            try:
                while written < len(data):
                    written += os.write(file.fileno(), data[written:])
            except OSError:
                file.truncate(end)
                raise

    def rename(self, path: PurePath, target: PurePath) -> None:
        os.rename(path, target)

    def delete(self, path: PurePath) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)

    def make_folder(self, path: PurePath) -> None:
        files.make_folder(Path(path))

    def sync(self, path: PurePath) -> None:
        files.sync(Path(path))

    def free_bytes(self, folder: PurePath) -> int:
        disk = os.statvfs(folder)
        return disk.f_bavail * disk.f_frsize

    def lock(self, path: PurePath) -> Lock:
        return _RecordLock(path)

    def folder_id(self, folder: PurePath) -> FolderId:
        status = os.stat(folder)
        return FolderId(os.path.realpath(folder), status.st_dev, status.st_ino)


class _NewLocalFile:
    """A new file, which is never an existing one."""

    def __init__(self, path: PurePath):
        self._file = open(path, "xb")  # noqa: SIM115 -- the caller closes it

    def write(self, data: bytes | memoryview, /) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        with self._file:
            self._file.flush()  # Python's buffer, which fsync does not know
            os.fsync(self._file.fileno())

    def abort(self) -> None:
        with suppress(OSError):  # a full disk; the file is closed all the same
            self._file.close()


class _RecordLock(Lock):
    """A POSIX record lock. The system releases it however the process ends, child processes do not inherit
    it, and it works on NFS."""

    def __init__(self, path: PurePath):
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        self._file = open(descriptor, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115

    def try_take(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                return False
            logger.warning(  # a file system without locks
                f"{self._path} cannot be locked ({e}): make sure that no second run uses this folder"
            )
        return True

    def owner(self) -> str:
        self._file.seek(0)
        return self._file.read().strip()

    def write_owner(self, text: str) -> None:
        self._file.truncate(0)
        self._file.write(f"{text}\n")
        self._file.flush()

    def is_lost(self) -> bool:
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not os.path.samestat(there, os.fstat(self._file.fileno()))

    def release(self) -> None:
        with suppress(OSError):  # a full disk; the file is closed all the same
            self._file.close()


def _mode(path: PurePath) -> int | None:
    """The type and permissions of a file or folder, None if there is none. Unlike os.path.exists, this raises
    for a file system that does not answer."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


LOCAL = LocalDisk()


def storage_of(path: PurePath) -> Storage:
    """The storage of a path."""
    storage: Storage = getattr(path, "storage", LOCAL)
    return storage


def parse_path(text: str, key: str | None = None) -> PurePath:
    """The path that a text names, such as the value of the TOML key `key`. Raises ConfigError for a scheme
    that no storage has, and for a misspelt one, which would name a local folder `s3:`."""
    scheme = match[1] if (match := URL.match(text)) else None
    start = text.partition(":")[0].lower()
    if ":" in text and start in Storage.choices and scheme != start:
        raise ConfigError(f"{text}: a URL of this storage begins with {start}://", key)
    if scheme is None:
        return Path(text)
    if scheme not in Storage.choices:
        known = suggest(scheme, Storage.choices)
        raise ConfigError(f"{text}: there is no storage for {scheme}:// paths{known}", key)
    storage = Storage.choices[scheme]()
    assert isinstance(storage, Storage)
    try:
        return storage.path(text)
    except ConfigError as e:
        raise ConfigError(str(e), key) from None


def upload(file: Path, target: PurePath) -> None:
    """Copy a local file to the storage of `target`, where it replaces another file."""
    storage = storage_of(target)
    if storage.exists(target):
        storage.delete(target)
    new = storage.create(target)
    try:
        with open(file, "rb") as reader:
            while block := reader.read(COPY_BYTES):
                new.write(block)
    except BaseException:
        new.abort()
        raise
    new.close()


def local_path(path: PurePath, purpose: str) -> Path:
    """A path on the local disk as it is. Raises ConfigError for any other path; `purpose` names its user in
    the message, such as "titanlite report"."""
    if isinstance(path, Path):
        return path
    raise ConfigError(f"{path}: {purpose} needs a folder on a local disk")
