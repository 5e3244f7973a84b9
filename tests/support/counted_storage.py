"""A storage for tests, `counted://...`: serves a folder of the local disk, records every read in a file, and
fails as `plant` says. It works across processes, because its whole state is files in the folder."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, ClassVar

from titanlite.storage import LOCAL, FolderId, Lock, NewFile, P, Storage

READS, FAULTS = ".reads", ".faults.json"


class CountedPath(PurePosixPath):
    """Prints as a URL. `local`: the file on the disk."""

    def __str__(self) -> str:
        return f"counted:/{super().__str__()}"

    @property
    def storage(self) -> Counted:
        return Counted()

    @property
    def local(self) -> Path:
        return Path("/", *self.parts[1:])


@dataclass(frozen=True, kw_only=True)
class Counted(Storage, name="counted"):
    """Reads only."""

    commit_rule: ClassVar[str] = "rename"

    def path(self, text: str) -> CountedPath:
        return CountedPath(text.removeprefix("counted:/"))

    def open(self, path: PurePath) -> Any:
        return io.BytesIO(self.read(path))

    def read(self, path: PurePath, start: int = 0, size: int = -1) -> bytes:
        local = self._local(path)
        faults = self._faults(local)
        time.sleep(faults.get("slow", 0))
        record(local.parent, f"{local.name} {start} {size}")
        with LOCAL.open(local) as file:
            file.seek(start)
            data = file.read(size)
        return data[: len(data) // 2] if faults.get("short") else data

    def size(self, path: PurePath) -> int:
        local = self._local(path)
        self._faults(local)
        return local.stat().st_size

    def tag(self, path: PurePath) -> str:
        local = self._local(path)
        self._faults(local)
        status = local.stat()
        return f"{status.st_mtime_ns} {status.st_size} {status.st_ino}"

    def read_tagged(self, path: PurePath, tag: str, start: int, size: int) -> bytes:
        if tag and self.tag(path) != tag:
            raise OSError(errno.ESTALE, "the file has changed", str(path))
        return self.read(path, start, size)

    def _local(self, path: PurePath) -> Path:
        assert isinstance(path, CountedPath)
        return path.local

    def _faults(self, local: Path) -> dict[str, Any]:
        """Raise the error that is planned for a file; return what else is."""
        file = local.parent / FAULTS
        faults: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if faults.get("pid") == os.getpid() or any(
            local.name.endswith(end) for end in faults.get("error", [])
        ):
            raise OSError(errno.EIO, "503 Slow Down", str(local))
        return faults

    def exists(self, path: PurePath) -> bool:
        return LOCAL.exists(self._local(path))

    def is_folder(self, path: PurePath) -> bool:
        return LOCAL.is_folder(self._local(path))

    def list(self, folder: P, pattern: str = "*") -> list[P]:
        return [folder / path.name for path in LOCAL.list(self._local(folder), pattern)]

    def check_writable(self, folder: PurePath, key: str) -> None:
        raise NotImplementedError

    def create(self, path: PurePath) -> NewFile:
        raise NotImplementedError

    def put(self, path: PurePath, data: bytes) -> None:
        raise NotImplementedError

    def append(self, path: PurePath, data: bytes) -> None:
        raise NotImplementedError

    def rename(self, path: PurePath, target: PurePath) -> None:
        raise NotImplementedError

    def delete(self, path: PurePath) -> None:
        raise NotImplementedError

    def make_folder(self, path: PurePath) -> None:
        raise NotImplementedError

    def sync(self, path: PurePath) -> None:
        raise NotImplementedError

    def free_bytes(self, folder: PurePath) -> int | None:
        raise NotImplementedError

    def lock(self, path: PurePath) -> Lock:
        raise NotImplementedError

    def folder_id(self, folder: PurePath) -> FolderId:
        raise NotImplementedError


def url(folder: Path) -> str:
    """The URL of a folder of the local disk."""
    return f"counted:/{folder.absolute()}"


def record(folder: Path, line: str) -> None:
    descriptor = os.open(folder / READS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def take_reads(folder: Path, end: str = ".bin") -> list[tuple[str, int, int]]:
    """The reads of files whose names end in `end` since the last call: name, start, size."""
    file = folder / READS
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    reads = [line.split() for line in lines]
    return [(name, int(start), int(size)) for name, start, size in reads if name.endswith(end)]


def plant(folder: Path, **faults: Any) -> None:
    """Make the storage misbehave for a folder: `error`: ends of names that answer 503; `short=True`: half of
    the bytes; `slow`: seconds per read. Without faults, it is well again."""
    partial = folder / f"{FAULTS}.new"
    partial.write_text(json.dumps(faults))
    os.replace(partial, folder / FAULTS)
