"""Records the changes of a folder in order: changes of names (create, rename, delete), of files' contents,
and fsyncs. Records every thread of this process; power_loss.py makes crash states from the recording."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"
}  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
RACY_NS = 50_000_000  # a file that changed this recently may change again within the same mtime
ROOT = 0
Slot = tuple[int, str]  # a name in a directory; directories, files and links are numbered


class Link(str):
    """The target of a symbolic link."""


@dataclass(frozen=True)
class Names:
    """An atomic change of directory entries. `slots`: for each name, the object before and now. `moves`: the
    object had a name before."""

    slots: dict[Slot, tuple[int | None, int | None]]
    moves: bool

    @property
    def directories(self) -> set[int]:
        """The directories that change."""
        return {directory for directory, _ in self.slots}

    @property
    def objects(self) -> set[int]:
        """The objects that have or had one of the names."""
        return {node for pair in self.slots.values() for node in pair if node is not None}


@dataclass(frozen=True)
class Content:
    """A write to a file, whose content is `data` now."""

    node: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    """An fsync of a file or a directory has returned."""

    node: int


@dataclass(frozen=True)
class Mark:
    """A place in the recorded code that the test wants to know."""

    value: Any


Operation = Names | Content | Sync | Mark


@dataclass
class Recording:
    """The files of the folder at the start, all synced, and the operations since then, in order. `links`: the
    objects that are symbolic links. `coarse`: how often several changes of names were seen at once, so that
    their order is a guess."""

    names: dict[Slot, int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    coarse: int = 0

    def mark(self, value: Any) -> None:
        """Record that the code has reached this place. `crashes` gives the newest mark with each state."""
        _recorder().look()
        self.operations.append(Mark(value))


# ---- recording


@contextmanager
def recorded(root: Path) -> Iterator[Recording]:
    """Record the work of this process below `root`, in all its threads. The folder is compared with its
    earlier state at every audit event of a change and at every fsync, so writes of libraries outside of
    Python are seen, too. The fsync itself is not carried out."""
    global _active
    assert _active is None, "one recording at a time"
    recorder, fsync, fdatasync = _Recorder(root), os.fsync, os.fdatasync
    if not _hooked:
        sys.addaudithook(_hook)  # an audit hook cannot be removed; it does nothing without a recorder
        _hooked.append(True)
    os.fsync = os.fdatasync = recorder.sync
    _active = recorder
    try:
        yield recorder.recording
        recorder.look()
    finally:
        _active = None
        os.fsync, os.fdatasync = fsync, fdatasync
        recorder.close()


_active: _Recorder | None = None
_hooked: list[bool] = []


def _recorder() -> _Recorder:
    assert _active is not None, "nothing is being recorded"
    return _active


def _hook(event: str, args: tuple[Any, ...]) -> None:
    recorder = _active
    if recorder is None or event not in EVENTS:
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & WRITES):
        return
    recorder.look()


class _Recorder:
    """Compares the folder with its earlier state. Every object that was seen is held open, so that no other
    object gets its inode number."""

    def __init__(self, root: Path):
        self.recording = Recording()
        self._root, self._lock, self._thread = root, threading.RLock(), 0
        self._nodes: dict[tuple[int, int], int] = {}
        self._held: list[int] = []  # by node
        self._times: dict[int, tuple[int, int]] = {}
        self._names: dict[Slot, int] = {}
        self._contents: dict[int, bytes] = {}
        self._thread = threading.get_ident()
        self._node(root)
        self._names = self._scan()
        self._read(self._names)
        self._thread = 0
        self.recording.names, self.recording.contents = dict(self._names), dict(self._contents)
        self.recording.operations.clear()

    def look(self) -> None:
        """Record the changes since the last look."""
        if self._thread == threading.get_ident():  # by the recorder itself
            return
        with self._lock:
            self._thread = threading.get_ident()
            try:
                self._compare()
            finally:
                self._thread = 0

    def sync(self, file: Any) -> None:
        """Replaces fsync."""
        status = os.fstat(file if isinstance(file, int) else file.fileno())
        with self._lock:
            self.look()
            node = self._nodes.get((status.st_dev, status.st_ino))
            if node is not None:
                self.recording.operations.append(Sync(node))

    def close(self) -> None:
        for fd in self._held:
            os.close(fd)

    def _compare(self) -> None:
        before, now = self._names, self._scan()
        while set(before.values()) - set(now.values()) and now != (again := self._scan()):
            now = again  # another thread renamed a file in the meantime
        changes = list(_changes(before, now))
        self.recording.coarse += len(changes) > 1
        self.recording.operations += changes
        self._names = now
        self._read(now)

    def _scan(self) -> dict[Slot, int]:
        names: dict[Slot, int] = {}
        todo = [(ROOT, str(self._root))]
        while todo:
            directory, path = todo.pop()
            with suppress(FileNotFoundError), os.scandir(path) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        node = self._node(Path(entry.path), entry.inode())
                        names[directory, entry.name] = node
                        if entry.is_dir(follow_symlinks=False):
                            todo.append((node, entry.path))
        return names

    def _node(self, path: Path, inode: int = 0) -> int:
        """The number of an object."""
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        if key in self._nodes:
            os.close(fd)
            return self._nodes[key]
        node = self._nodes[key] = len(self._held)
        self._held.append(fd)
        if stat.S_ISLNK(status.st_mode):
            self.recording.links[node] = Link(os.readlink(path))
        elif stat.S_ISREG(status.st_mode):
            self._contents[node] = self.recording.contents[node] = b""
        return node

    def _read(self, names: dict[Slot, int]) -> None:
        """Read files whose content may have changed."""
        for node in dict.fromkeys(names.values()):
            if node not in self._contents:
                continue
            status = os.fstat(self._held[node])
            times = (status.st_size, status.st_mtime_ns)
            if self._times.get(node) == times:
                continue
            recent = time.time_ns() - status.st_mtime_ns < RACY_NS
            with open(f"/proc/self/fd/{self._held[node]}", "rb") as file:
                data = file.read()
            self._times[node] = (-1, -1) if recent else times
            if data != self._contents[node]:
                self._contents[node] = data
                self.recording.operations.append(Content(node, data))


def _changes(before: dict[Slot, int], now: dict[Slot, int]) -> Iterator[Names]:
    """The changes from one set of names to another: new objects, parents first; then renames; then
    deletions."""
    changed = [slot for slot in {**before, **now} if before.get(slot) != now.get(slot)]
    gone = {before[slot]: slot for slot in changed if slot in before}
    known, made, moved = set(before.values()), list[Names](), list[Names]()
    for slot in (slot for slot in changed if slot in now):
        node, pair = now[slot], (before.get(slot), now[slot])
        if node in gone and gone[node] != slot:
            source = gone.pop(node)
            moved.append(Names({source: (node, now.get(source)), slot: pair}, moves=True))
        else:
            made.append(Names({slot: pair}, moves=node in known))
    done = {slot for change in made + moved for slot in change.slots}
    removed = [Names({slot: (before[slot], None)}, moves=False) for slot in changed if slot not in done]
    yield from sorted(made, key=lambda change: min(change.objects))  # in the order of their discovery
    yield from moved
    yield from sorted(removed, key=lambda change: -max(change.objects))
