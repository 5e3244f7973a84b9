"""The states in which a power loss may leave a disk, at any point of a recording by file_operations.py.

The states are those of the model of Pillai et al., "All File Systems Are Not Created Equal" (ALICE, OSDI
2014), for POSIX on a journalling file system:

- A file's content is on the disk up to its last fsync. Later writes may be lost: the states have the synced
  content, every version written since, an empty file, half of the newest version, and zeros of its length.
- A change of a directory's names is on the disk once that directory is synced; for a rename between two
  directories, once both are. Later changes may be on the disk in any combination that keeps the order of
  changes of one name and of one object. A file is never in a directory that does not exist, and a directory
  is removed after its content. A rename is atomic. An fsync of a file does not sync its name: this is POSIX;
  most file systems do more.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tests.support.file_operations import ROOT, Content, Link, Mark, Names, Operation, Recording, Slot, Sync

EXHAUSTIVE = 6  # up to this many unsynced changes of names, every combination is made
Tree = dict[str, bytes | Link | None]  # by path: a file's content, a link's target, or None for a directory


# ---- the disk


@dataclass
class _Unsynced:
    """A change of names that may or may not be on the disk. `waits_for`: directories whose fsync puts it
    there. `needs`: changes that are on the disk if this one is."""

    names: Names
    waits_for: set[int]
    needs: list[_Unsynced]


class _Disk:
    """The names and contents that are certainly on the disk, and those that may be."""

    def __init__(self, recording: Recording):
        self.links = recording.links
        self.names, self.contents = dict(recording.names), dict(recording.contents)  # on the disk
        self.unsynced: list[_Unsynced] = []
        self.versions: dict[int, list[bytes]] = {}  # contents of a file since its last sync
        self.newest = dict(recording.contents)

    def do(self, operation: Operation) -> None:
        """Apply one operation."""
        if isinstance(operation, Names):
            needs = [other for other in self.unsynced if _needs(operation, other.names)]
            self.unsynced.append(_Unsynced(operation, operation.directories, needs))
        elif isinstance(operation, Content):
            self.versions.setdefault(operation.node, []).append(operation.data)
            self.newest[operation.node] = operation.data
        elif isinstance(operation, Sync):
            if operation.node in self.versions:
                self.contents[operation.node] = self.versions.pop(operation.node)[-1]
            there: list[_Unsynced] = []
            for change in self.unsynced:
                change.waits_for.discard(operation.node)
                if not change.waits_for:
                    _with_needs(change, there)
            for change in self.unsynced:
                if _is_in(change, there):
                    _apply(change.names, self.names)
            self.unsynced = [change for change in self.unsynced if not _is_in(change, there)]

    def names_as_killed(self) -> dict[Slot, int]:
        """The names if the process is killed now: all changes of names have happened."""
        names = dict(self.names)
        for change in self.unsynced:
            _apply(change.names, names)
        return names

    def as_killed(self) -> Tree:
        """The files if the process is killed now and the system survives."""
        paths = _paths(self.names_as_killed())
        return {path: self.newest.get(node, self.links.get(node)) for path, node in paths.items()}

    def choices(self, rng: random.Random, samples: int) -> Iterator[list[_Unsynced]]:
        """Sets of unsynced changes of names that may be on the disk together."""
        every = self.unsynced
        if len(every) <= EXHAUSTIVE:
            for mask in product((False, True), repeat=len(every)):
                chosen = [change for change, use in zip(every, mask) if use]
                if all(_is_in(need, chosen) for change in chosen for need in change.needs):
                    yield chosen
            return
        for i in range(len(every) + 1):
            yield every[:i]
        for change in every:
            yield self._closed([change])
            yield self._without(change)
        for _ in range(samples):
            yield self._closed([change for change in every if rng.random() < 0.5])

    def _closed(self, changes: list[_Unsynced]) -> list[_Unsynced]:
        there: list[_Unsynced] = []
        for change in changes:
            _with_needs(change, there)
        return [change for change in self.unsynced if _is_in(change, there)]

    def _without(self, absent: _Unsynced) -> list[_Unsynced]:
        chosen: list[_Unsynced] = []
        for change in self.unsynced:
            if change is not absent and all(_is_in(need, chosen) for need in change.needs):
                chosen.append(change)
        return chosen

    def trees(self, rng: random.Random, samples: int, settled: Sequence[str]) -> Iterator[Tree]:
        """Every state that the disk may be in now."""
        for chosen in self.choices(rng, samples):
            names = dict(self.names)
            for change in chosen:
                _apply(change.names, names)
            paths = _paths(names)
            files = {path: node for path, node in paths.items() if node in self.newest}
            tree: Tree = {path: self.links.get(node) for path, node in paths.items()}
            tree |= {path: self.newest[node] for path, node in files.items()}
            dirty = {
                node for p, node in files.items() if node in self.versions and Path(p).name not in settled
            }
            for contents in self._contents(sorted(dirty), rng, samples):
                yield tree | {path: contents[node] for path, node in files.items() if node in contents}

    def _contents(self, dirty: list[int], rng: random.Random, samples: int) -> Iterator[dict[int, bytes]]:
        """Contents of files that are not synced: all files of one kind; one file of another kind than the
        rest; random kinds."""
        yield {}
        kinds = {node: _kinds(self.contents.get(node, b""), self.versions[node]) for node in dirty}
        for kind in range(4 if dirty else 0):
            yield {node: contents[kind] for node, contents in kinds.items()}
        for node, contents in kinds.items() if len(dirty) > 1 else ():
            yield from ({node: data} for data in contents)
            yield {other: self.contents.get(other, b"") for other in dirty if other != node}
        for _ in range(samples if len(dirty) > 1 else 0):
            yield {node: rng.choice(contents) for node, contents in kinds.items()}
        for contents in kinds.values() if len(dirty) == 1 else ():
            yield from ({dirty[0]: data} for data in contents[4:])


def _kinds(synced: bytes, versions: list[bytes]) -> list[bytes]:
    new = versions[-1]
    return [synced, b"", new[: len(new) // 2], bytes(len(new)), *versions[-4:]]


def _needs(later: Names, earlier: Names) -> bool:
    """Whether the earlier change is on the disk if the later change is."""
    if later.slots.keys() & earlier.slots.keys() or later.objects & earlier.objects:
        return True
    if later.moves and len(later.directories) > 1 and later.directories & earlier.objects:
        return True  # otherwise the object would lose its name
    removed = {old for old, new in later.slots.values() if new is None and old is not None}
    return not later.moves and bool(removed & earlier.directories)


def _is_in(change: _Unsynced, changes: list[_Unsynced]) -> bool:
    return any(change is other for other in changes)


def _with_needs(change: _Unsynced, there: list[_Unsynced]) -> None:
    if not _is_in(change, there):
        there.append(change)
        for need in change.needs:
            _with_needs(need, there)


def _apply(change: Names, names: dict[Slot, int]) -> None:
    for slot, (_, new) in change.slots.items():
        if new is None:
            names.pop(slot, None)
        else:
            names[slot] = new


def _paths(names: dict[Slot, int]) -> dict[str, int]:
    """Inode numbers by path, of everything below the root."""
    below: dict[int, list[tuple[str, int]]] = {}
    for (directory, name), node in names.items():
        below.setdefault(directory, []).append((name, node))
    paths: dict[str, int] = {}
    todo = [(ROOT, "")]
    while todo:
        directory, path = todo.pop()
        for name, node in below.get(directory, ()):
            paths[path + name] = node
            todo.append((node, f"{path}{name}/"))
    return paths


# ---- what a crash may leave


@dataclass(frozen=True)
class Crash:
    """A state of the disk. `mark`: the newest mark before the crash. `at`: the number of operations before
    the crash."""

    tree: Tree
    mark: Any
    at: int

    @property
    def names(self) -> frozenset[str]:
        """The names in this state. Of folders with a leading dot, which are only ever deleted, only whether
        they are empty."""
        return frozenset(re.sub(r"(^|/)(\.[^/]*)/.*", r"\1\2/...", path) for path in self.tree)

    def put(self, folder: Path, there: Tree | None = None) -> Path:
        """Write the state to the new folder `folder`, or change a folder that has the state `there`: states
        differ little."""
        before = there or {}
        if there is None:
            folder.mkdir()
        stays = {path for path, value in self.tree.items() if path in before and before[path] == value}
        for path in sorted(before.keys() - stays, reverse=True):  # files before their directory
            if before[path] is None:
                (folder / path).rmdir()
            else:
                (folder / path).unlink()
        for path in sorted(self.tree.keys() - stays):
            value = self.tree[path]
            if isinstance(value, bytes):
                (folder / path).write_bytes(value)
            elif value is None:
                (folder / path).mkdir()
            else:
                os.symlink(value, folder / path)
        return folder


def crashes(
    recording: Recording, *, samples: int = 4, seed: int = 0, settled: Sequence[str] = (), start: Any = None
) -> Iterator[Crash]:
    """The states that a power loss during the recording may leave, each once per mark: all states while at
    most EXHAUSTIVE changes of names are unsynced, a sample beyond.

    After every operation: the state that a kill would leave. Before every fsync, before every mark and at the
    end, where the number of possible states is largest because only an fsync removes some: if at most
    EXHAUSTIVE changes of names are unsynced, all combinations of them; otherwise their prefixes, all but one
    change and those that need it, only one change and those that it needs, and `samples` random combinations.
    Each with the newest content of every file and with the contents from `_Disk._contents`.

    `settled`: names of files of which only the newest content is tried. `start`: the mark before the first
    one."""
    disk, mark, rng = _Disk(recording), start, random.Random(seed)
    seen: set[Any] = set()

    def new(trees: Iterator[Tree], at: int) -> Iterator[Crash]:
        for tree in trees:
            key = (frozenset(tree.items()), mark)
            if key not in seen:
                seen.add(key)
                yield Crash(tree, mark, at)

    for at, operation in enumerate(recording.operations):
        if isinstance(operation, (Sync, Mark)):
            yield from new(disk.trees(rng, samples, settled), at)
        if isinstance(operation, Mark):
            mark = operation.value
        disk.do(operation)
        if isinstance(operation, (Names, Content)):
            yield from new(iter([disk.as_killed()]), at + 1)
    yield from new(disk.trees(rng, samples, settled), len(recording.operations))


def check_all(
    states: Iterator[Crash],
    folder: Path,
    look: Callable[[Path, Any], Any],
    start: Callable[[Path, Any], None] | None = None,
    most: int = 1 << 30,
    all_contents: bool = False,
) -> tuple[int, int]:
    """Call `look` on every state, with its place in `folder` and its mark; it changes nothing. Call `start`
    on one state of each set of names and of the value that `look` returned, or on each state if
    `all_contents`; with `most`, on about that many, drawn at random with a fixed seed. Returns the numbers of
    both calls."""
    key_of = (lambda crash: frozenset(crash.tree.items())) if all_contents else (lambda crash: crash.names)
    if most < 1 << 30:
        states = iter(every := list(states))
        share = most / max(len({key_of(crash) for crash in every}), 1)
    else:
        share = 1.0
    rng = random.Random(0)
    started: set[Any] = set()
    count, starts, there, place = 0, 0, None, folder / "crash"
    for count, crash in enumerate(states, 1):
        result = look(crash.put(place, there), crash.mark)
        there = crash.tree
        if start is not None and (key := (key_of(crash), repr(result))) not in started:
            started.add(key)
            if rng.random() >= share:
                continue
            starts += 1
            start(place, result)
            place, there = folder / f"crash{count}", None
    return count, starts


def replayed(recording: Recording) -> Tree:
    """The files after the whole recording, without a crash."""
    disk = _Disk(recording)
    for operation in recording.operations:
        disk.do(operation)
    return disk.as_killed()


def tree_of(folder: Path) -> Tree:
    """The files of a folder."""
    tree: Tree = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            tree[name] = Link(os.readlink(path))
        else:
            tree[name] = None if path.is_dir() else path.read_bytes()
    return tree


def described(recording: Recording) -> list[str]:
    """The operations in words, without random parts of names. Successive writes to a file are one line."""
    disk, said = _Disk(recording), list[str]()
    for operation in recording.operations:
        paths = {node: path for path, node in _paths(disk.names_as_killed()).items()} | {ROOT: "."}
        disk.do(operation)
        if isinstance(operation, Mark):
            words = f"mark {operation.value}"
        elif isinstance(operation, Names):
            slots = operation.slots.items()
            words = ", ".join(
                f"{'+' if new else '-'} {paths[folder]}/{name}" for (folder, name), (_, new) in slots
            )
        else:
            words = f"{type(operation).__name__.lower()} {paths.get(operation.node, '(deleted)')}"
        words = re.sub(r"-[0-9a-f]{8}\b", "-*", words)
        if words not in said[-1:]:
            said.append(words)
    return said


def without_syncs(recording: Recording, unwanted: Callable[[str], bool]) -> Recording:
    """The recording without the fsyncs of the `unwanted` paths; the root is "". For controls."""
    disk, kept = _Disk(recording), list[Operation]()
    for operation in recording.operations:
        disk.do(operation)
        if isinstance(operation, Sync):
            paths = {"": ROOT} | _paths(disk.names_as_killed())
            if any(node == operation.node and unwanted(path) for path, node in paths.items()):
                continue
        kept.append(operation)
    return replace(recording, operations=kept)
