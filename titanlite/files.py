"""Reading and writing single files that other people or programs may have touched.

Only regular files are read: a named pipe would make a reader wait for ever, and a device has no end. Files of
a run folder are written under a random new name and renamed, and no link is followed, so that nobody who can
place a link there chooses which file is overwritten.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

READ_BYTES = 8 << 20  # at a time, of a file that is hashed
MAX_BYTES = 1 << 30  # of a file that is read as a whole
# Refusals of the operating system that a second try would meet again. Others, such as an I/O error or a stale
# mount, may pass.
REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE,
    errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR,
}  # fmt: skip
KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class FileFault(ValueError):
    """A file is of the wrong kind or too large: "it is a named pipe, not a file". Callers add its name."""


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises FileFault for anything else, at once."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise FileFault("it is a link that leads to no file") from None
        if e.errno == errno.ENXIO:
            raise FileFault("it is a socket or a device, not a file") from None
        raise
    return io.BufferedReader(io.FileIO(_regular(fd)))


def read_regular(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises FileFault for anything else, and for over `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise FileFault(f"it has more than {max_bytes:,} bytes, too many for a file of its kind")
    return data


def check_regular(path: Path) -> None:
    """Raises FileFault unless `path` is a regular file or a link to one; for files that a library opens."""
    open_regular(path).close()


def if_on_hub(path: str | Path, kind: str = "model") -> str:
    """What to do about a path that is missing, if it looks like a name on the Hugging Face hub; else ""."""
    name = str(path)
    is_file = re.search(r"\.[A-Za-z]\w*$", name)  # not "Llama-3.1-8B"
    if is_file or not HUB_NAME.fullmatch(name) or Path(path).parent.exists():
        return ""
    what = "" if kind == "model" else f" --repo-type {kind}"
    return (
        "; titanlite downloads nothing: if this is a name on the Hugging Face hub, run "
        f"`hf download {name}{what} --local-dir DIR` and give DIR instead"
    )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Create or replace `path`, by one writer at a time: after a kill or a power loss it has the old content
    or the new. A link in its place is replaced, not followed."""
    for left in path.parent.glob(f".partial-{glob.escape(path.name)}-*"):  # by a writer that was killed
        left.unlink(missing_ok=True)
    partial = path.with_name(f".partial-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with named(path):
            write_new(partial, content.encode() if isinstance(content, str) else content)
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet, and sync it to the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a directory, and those above it that are missing, so that no power loss takes them away again."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        with suppress(PermissionError):  # the topmost may be in a folder that others own and nobody may read
            sync(folder.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a directory all or nothing: yields an empty directory beside `path`, which is synced and renamed
    to `path` when the body ends, and deleted when the body raises.

    If another process made `path` meanwhile, that directory stays. Directories that killed processes left are
    deleted after a day.
    """
    make_folder(path.parent)
    for left in path.parent.glob(f".unfinished-{glob.escape(path.name)}-????????"):
        if time.time() - left.lstat().st_mtime > 86_400:
            shutil.rmtree(left, ignore_errors=True)
    folder = path.with_name(f".unfinished-{path.name}-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        with named(path):
            yield folder
        for file in [*folder.iterdir(), folder]:
            sync(file)
        try:
            os.rename(folder, path)
        except OSError:
            if not path.exists():
                raise
        sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def hash_file(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 in hex of a regular file. Raises FileFault for anything else."""
    sha, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        view = memoryview(bytearray(min(READ_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(view):
            sha.update(view[:count])
            size += count
    return size, sha.hexdigest()


def open_own(path: Path) -> IO[str]:
    """Open a file of a run folder for reading and appending, and create it if it is missing. Raises FileFault
    for a link and for anything else that is not a regular file."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise FileFault(f"it is {_kind(os.lstat(path).st_mode)}, not a file") from None
        raise
    return os.fdopen(_regular(fd), "a+", encoding="utf-8", errors="replace")


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Make an OSError of the body that names no file name `path`: a full disk is found by writing to a file
    descriptor, which has no name."""
    try:
        yield
    except OSError as e:
        if e.errno is None:  # numpy's, after a short write
            raise OSError(errno.EIO, f"not all could be written ({e})", str(path)) from None
        if e.filename is None:
            e.filename = str(path)
        raise


def _regular(fd: int) -> int:
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise FileFault(f"it is {_kind(mode)}, not a file")
    return fd


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "of another kind")
