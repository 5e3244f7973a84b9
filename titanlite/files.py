"""Reading files that a user names, and writing files and folders so that they are there whole or not at all.

Only regular files are read: a named pipe could block the reader for ever, and a device has no end.
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
from pathlib import Path, PurePath

READ_BYTES = 8 << 20  # read at a time from a file that is hashed
MAX_BYTES = 1 << 30  # largest file that is read as a whole
# Errors that a second attempt would meet again. Other errors, such as a stale mount, may be temporary.
REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE,
    errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR,
}  # fmt: skip
KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
HUB_CACHE_NAMES = ("models--", "datasets--", "spaces--")  # of a repository's folder in Hugging Face's cache
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_file_error(error: BaseException) -> bool:
    """Whether an error is one of the file system, and not of the program: a refusal, or an OSError that names
    the file. Files that may be missing are looked for, so a missing file that was not is a mistake of the
    program, and so is a file that exists already."""
    return isinstance(error, OSError) and (
        error.errno in REFUSALS
        or (error.filename is not None and not isinstance(error, (FileNotFoundError, FileExistsError)))
    )


class FileFault(ValueError):
    """A file has the wrong type or is too large. The message does not name the file: "it is a named pipe, not
    a file"; callers add the name."""


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a regular file, or a link to a regular file, for reading. Raises FileFault at once for anything
    else."""
    check_regular(path)
    return open(path, "rb")


def read_regular(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises FileFault for anything else, and for a file larger than
    `max_bytes`."""
    with open_regular(path) as file, named(path):
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise FileFault(f"it has more than {max_bytes:,} bytes, too many for a file of its kind")
    return data


def check_regular(path: str | Path) -> None:
    """Raises FileFault unless `path` is a regular file or a link to one. Called before a library opens it."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise FileFault(f"it is {KINDS.get(stat.S_IFMT(mode), 'of another kind')}, not a file")


def if_on_hub(path: str | Path, kind: str = "model") -> str:
    """Advice for a missing path that looks like a name on the Hugging Face hub; "" for other paths."""
    name = str(path)
    is_file = re.search(r"\.[A-Za-z]\w*$", name)  # not "Llama-3.1-8B"
    if is_file or not HUB_NAME.fullmatch(name) or Path(path).parent.exists():
        return ""
    if kind == "dataset":
        return f"; a dataset of the Hugging Face hub becomes token shards by `titanlite prepare hf:{name}`"
    return (
        "; titanlite downloads no models: if this is a name on the Hugging Face hub, run "
        f"`hf download {name} --local-dir DIR` and give DIR instead"
    )


def is_inside(file: Path, folder: Path) -> bool:
    """Return whether a file is in a folder or below it, after links are followed. Files of a folder in
    Hugging Face's cache, REPOSITORY/snapshots/COMMIT, are links to REPOSITORY/blobs, which counts as
    inside."""
    folder, target = (Path(os.path.realpath(path)) for path in (folder, file))
    repositories = [path.parent for path in folder.parents if path.name == "snapshots"]
    blobs = [path / "blobs" for path in repositories if path.name.startswith(HUB_CACHE_NAMES)]
    return any(target.is_relative_to(path) for path in (folder, *blobs))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Create or replace a file. If the process is killed or the power fails, the file has the old or the new
    content. A link at `path` is replaced, not followed. Only one process may write `path` at a time."""
    for leftover in path.parent.glob(f".partial-{glob.escape(path.name)}-*"):  # of a killed process
        leftover.unlink(missing_ok=True)
    partial = path.with_name(f".partial-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with named(path):
            write_new(partial, content.encode() if isinstance(content, str) else content)
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet, and sync it to the disk."""
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
    """Make a directory and its missing parents, and sync them, so that they outlast a power loss."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        with suppress(PermissionError):  # the existing parent may be a folder that this user may not read
            sync(folder.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a directory completely or not at all. Yields an empty directory next to `path`, which is synced
    and renamed to `path` when the body ends, and deleted if the body raises.

    If another process makes `path` in the meantime, its directory is kept and this one is deleted. Leftovers
    of killed processes are deleted after a day."""
    make_folder(path.parent)
    for leftover in path.parent.glob(f".unfinished-{glob.escape(path.name)}-????????"):
        if time.time() - leftover.lstat().st_mtime > 86_400:
            shutil.rmtree(leftover, ignore_errors=True)
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
    """Size in bytes and hexadecimal SHA-256 of a regular file. Raises FileFault for anything else."""
    with open_regular(path) as file:
        return hash_stream(file, path)


def hash_stream(file: io.BufferedIOBase, path: PurePath) -> tuple[int, str]:
    """Size in bytes and hexadecimal SHA-256 of the file at `path`, which `file` reads from its beginning."""
    sha, size = hashlib.sha256(), 0
    with named(path):
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        view = memoryview(bytearray(min(READ_BYTES, end + 1)))
        while count := file.readinto(view):
            sha.update(view[:count])
            size += count
    return size, sha.hexdigest()


@contextmanager
def named(path: str | PurePath) -> Iterator[None]:
    """Add `path` to an OSError of the body that names no file. An error of writing to a file descriptor, such
    as a full disk, has no name."""
    try:
        yield
    except OSError as e:
        if e.errno is None:  # numpy's, after a short write
            raise OSError(errno.EIO, f"not all could be written ({e})", str(path)) from None
        if e.filename is None:
            e.filename = str(path)
        raise
