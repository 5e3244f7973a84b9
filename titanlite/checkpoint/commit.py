"""The commit protocol: the directory `step-N/` exists only if the checkpoint is complete.

A checkpoint is written into `.partial-step-N-<random>/` and every file is synced. manifest.json is written
last: it has the name, size and SHA-256 of each file, and a SHA-256 of itself. Then the directory is synced
and renamed, and its parent is synced. Nothing is written into a committed directory. Deletion renames the
directory first, so `step-N` is never half a checkpoint.

This is the commit rule "rename", which the manifest names; a storage without renames needs another."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import re
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, TypedDict

from titanlite.checkpoint.digest import FileDigest, gib, write_file
from titanlite.storage import P, storage_of


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written, and the run must not continue without it."""

    exit_code = 3


class Damaged(CheckpointError):
    """A checkpoint is not as it was written. The message is the reason, without the checkpoint's path."""


class FileEntry(TypedDict, total=False):
    """A manifest's record of one file: its bytes and SHA-256, always."""

    size: int
    sha256: str
    tag: str
    """Reserved: the version of the object that holds the file. No version of titanlite writes it yet."""


class Manifest(TypedDict, total=False):
    """The content of manifest.json. A reader ignores fields that it does not know."""

    format: int
    step: int
    commit: str
    """The rule that made the checkpoint exist: Storage.commit_rule of the storage that it was saved on."""
    files: dict[str, FileEntry]
    saved_at: str
    titanlite: str
    torch: str
    ranks: int
    """The number of ranks that wrote the shards."""
    resumed_from: int | None
    digest: dict[str, str]
    """With training.same_bits_on_any_ranks: `weights` and `state`, which do not depend on the layout."""
    bits: dict[str, Any]
    """The conditions under which another run computes the same bits."""
    history: str
    """Of a copy in memory only: last_commit.LastCommit.history when it was made."""
    newest_on_disk: int | None
    """Of a copy in memory only: the step of the newest checkpoint on disk when it was made."""
    sha256: str
    """The SHA-256 of the manifest without this field."""


MANIFEST = "manifest.json"
SHARD_SUFFIX = ".distcp"
FORMAT = 5
SLACK = 1.05  # free space needed per byte of tensors; metadata and metrics need some space, too


def partial_path(folder: P, step: int) -> P:
    """A new name for the directory that step N is written into. It is random, because a process of an earlier
    start may still be alive on another node and must not write into the same directory."""
    return folder / f".partial-step-{step}-{uuid.uuid4().hex[:8]}"


def list_committed(folder: P) -> list[tuple[int, P]]:
    """(step, path) of the committed checkpoints, oldest first."""
    disk = storage_of(folder)
    steps = [(step_of(path), path) for path in disk.list(folder, "step-*") if disk.is_folder(path)]
    return sorted((step, path) for step, path in steps if step is not None)


def step_of(path: PurePath) -> int | None:
    """The step in the name of a checkpoint, which need not exist; None: `path` has no such name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


def damaged(path: PurePath, reason: object) -> CheckpointError:
    """The error for a damaged checkpoint that a user has asked for. It names the checkpoint before it."""
    step, before = step_of(path), list[PurePath]()
    if step is not None:
        with suppress(OSError):  # of a storage that does not answer
            before = [other for saved, other in list_committed(path.parent) if saved < step]
    hint = f"; the checkpoint before it is {before[-1]}" if before else ""
    return CheckpointError(f"{path} is damaged: {reason}{hint}")


def check_space(folder: PurePath, needed_bytes: int, name: str = "a checkpoint") -> None:
    """Raises CheckpointError unless the storage has room for a directory whose tensors have `needed_bytes`.
    `name`: the directory's name in the error."""
    free_bytes, needed_bytes = storage_of(folder).free_bytes(folder), int(needed_bytes * SLACK)
    if free_bytes is not None and free_bytes < needed_bytes:
        raise CheckpointError(
            f"{name} needs {gib(needed_bytes)}, and {folder} has {gib(free_bytes)} free; nothing is written"
        )


def begin(folder: P, step: int) -> P:
    """Create the directory that step N is written into. Raises CheckpointError if `step-N` exists."""
    disk = storage_of(folder)
    if disk.exists(folder / f"step-{step}"):
        raise CheckpointError(f"{folder / f'step-{step}'} exists already")
    partial = partial_path(folder, step)
    try:
        disk.make_folder(partial)
    except OSError:
        with suppress(OSError):
            disk.delete(partial)
        raise
    return partial


def partial_size(folder: PurePath) -> int:
    """Bytes written so far for checkpoints that are not committed yet."""
    disk = storage_of(folder)
    with suppress(OSError):  # the checkpoint was just committed, or the file system does not answer
        return sum(disk.size(file) for path in disk.list(folder, ".partial-*") for file in disk.list(path))
    return 0


def commit(
    partial: P, step: int, texts: Mapping[str, str], files: dict[str, FileDigest], about: dict[str, Any]
) -> P:
    """Commit the directory `partial` as the checkpoint of `step`, and return its new path. Called on one
    rank. Arguments and errors: see complete()."""
    disk = storage_of(partial)
    complete(partial, step, texts, files, about)
    disk.sync(partial)
    final = partial.with_name(f"step-{step}")
    disk.rename(partial, final)  # fails if step-N has files: nothing is ever replaced
    disk.sync(final.parent)
    return final


def complete(
    folder: PurePath, step: int, texts: Mapping[str, str], files: dict[str, FileDigest], about: dict[str, Any]
) -> None:
    """Write the small files and the manifest of a checkpoint, after all ranks have written and synced its
    `files`.

    `texts`: content of small files by name. `about`: plain values for the manifest. Raises OSError if a file
    is missing, CheckpointError if it does not have its size."""
    disk = storage_of(folder)
    # Another node's file may be incomplete here, or on a disk that this node does not see.
    for name, digest in files.items():
        size = disk.size(folder / name)
        if size != digest.size:
            raise CheckpointError(f"{folder / name} has {size} bytes, {digest.size} were written")
    write_manifest(folder, step, texts, files, about)


def write_manifest(
    folder: PurePath, step: int, texts: Mapping[str, str], files: dict[str, FileDigest], about: dict[str, Any]
) -> None:
    """The same as complete(), without looking for the files of other ranks."""
    for name, text in texts.items():
        files[name] = write_file(folder / name, text.encode())
    rule = storage_of(folder).commit_rule
    manifest = {"format": FORMAT, "step": step, "commit": rule, **about}
    manifest["files"] = {name: files[name]._asdict() for name in sorted(files)}
    write_file(folder / MANIFEST, manifest_text(manifest).encode())


def read_manifest(path: PurePath) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises Damaged, or CheckpointError if another version of
    titanlite wrote it."""
    try:
        manifest: Manifest = json.loads(storage_of(path).read(path / MANIFEST))
        if manifest.get("sha256") != _own_sha256(manifest):
            raise Damaged("its manifest cannot be trusted: its own SHA-256 differs")
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (ValueError, AttributeError) as e:
        raise Damaged(f"its manifest cannot be trusted: {e!r}") from None
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {manifest['format']}, this version reads {FORMAT}; "
            "read it with the version that wrote it"
        )
    return manifest


def digests(manifest: Manifest) -> dict[str, FileDigest]:
    """The size and SHA-256 of every file that a manifest names."""
    return {name: FileDigest(entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}


def total_size(manifest: Manifest) -> int:
    """Bytes of all files that a manifest names."""
    return sum(entry["size"] for entry in manifest["files"].values())


def check(path: PurePath, step: int | None = None) -> Manifest:
    """The manifest of the committed checkpoint at `path`, whose step and files are compared with it: the
    presence and the size of each file; digest.first_fault and read_file check contents. Raises Damaged,
    CheckpointError for another checkpoint format, OSError for a disk that does not answer."""
    manifest, disk = read_manifest(path), storage_of(path)
    if step not in (None, manifest["step"]):
        raise Damaged(f"its manifest belongs to step {manifest['step']}")
    for name, expected in digests(manifest).items():
        try:
            size = disk.size(path / name)
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        if size != expected.size:
            raise Damaged(f"{name} has {size:,} bytes, {expected.size:,} were written")
    if extra := {p.name for p in disk.list(path, f"*{SHARD_SUFFIX}")} - manifest["files"].keys():
        raise Damaged(f"{min(extra)} was not written with it")
    return manifest


def fault(path: PurePath, step: int | None = None) -> str | None:
    """The reason why check() finds the checkpoint at `path` damaged, or None."""
    try:
        check(path, step)
    except Damaged as e:
        return str(e)
    return None


def read_file(path: PurePath, name: str, manifest: Manifest) -> bytes:
    """The content of a small file of the checkpoint at `path`. Raises Damaged unless its hash is right."""
    try:
        data = storage_of(path).read(path / name)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as e:
        if e.errno != errno.EIO:  # only a bad sector is damage
            raise
        raise Damaged(f"{name} cannot be read: {e.strerror}") from None
    if name not in manifest["files"] or hashlib.sha256(data).hexdigest() != manifest["files"][name]["sha256"]:
        raise Damaged(f"{name} is not what was written: its SHA-256 differs")
    return data


def quarantine(path: P) -> P:
    """Rename an unusable checkpoint or file to `quarantined-<name>-<n>`, so that its step can be saved again.
    Returns the new path."""
    target = _first_unused(path.with_name(f"quarantined-{path.name}-"))
    _move(path, target)
    storage_of(path).sync(path.parent)
    return target


def list_quarantined(folder: P) -> list[P]:
    """The quarantined checkpoints in `folder`."""
    return sorted(storage_of(folder).list(folder, "quarantined-*"))


def archive_after(folder: P, after: int) -> list[P]:
    """Move the checkpoints after step `after` into `archived-<n>/`, and, if `after` is 0, also the
    quarantined checkpoints. Returns their new paths.

    The newest is moved first: if the process is killed between two moves, the remaining steps have no gap."""
    later = list_quarantined(folder) if after == 0 else []
    later += [path for step, path in list_committed(folder) if step > after]
    if not later:
        return []
    disk, archive = storage_of(folder), _first_unused(folder / "archived-")
    disk.make_folder(archive)
    for path in reversed(later):
        _move(path, archive / path.name)
    disk.sync(archive)
    disk.sync(folder)
    return [archive / path.name for path in later]


def is_kept(path: PurePath) -> bool:
    """Whether the user keeps this checkpoint with an empty file `step-N.keep` beside it."""
    return storage_of(path).exists(_keep_file(path))


def _keep_file(path: P) -> P:
    return path.with_name(f"{path.name}.keep")


def _first_unused(prefix: P) -> P:
    """The first of `<prefix>0`, `<prefix>1`, ... that does not exist."""
    paths = (prefix.with_name(f"{prefix.name}{i}") for i in itertools.count())
    return next(path for path in paths if not storage_of(path).exists(path))


def _move(path: PurePath, target: PurePath) -> None:
    """Rename a checkpoint and its keep file."""
    disk = storage_of(path)
    disk.rename(path, target)
    if is_kept(path):
        disk.rename(_keep_file(path), _keep_file(target))


def retain(folder: PurePath, keep_latest: int, every: int = 0, keep: Collection[int] = ()) -> None:
    """Delete old committed checkpoints. Called after each commit.

    Keeps the newest `keep_latest` checkpoints (0: all), the steps that are multiples of `every` (0: none),
    the steps in `keep`, and checkpoints with a keep file. Tries all deletions, then raises the first OSError.
    """
    disk, errors, trash = storage_of(folder), list[OSError](), list[PurePath]()
    for step, path in list_committed(folder)[:-keep_latest] if keep_latest else []:
        if step in keep or (every and step % every == 0) or is_kept(path):
            continue
        trash.append(folder / f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            disk.rename(path, trash[-1])
        except OSError as e:
            errors.append(e)
    if trash:
        disk.sync(folder)  # before any deletion; otherwise a power loss could leave half of `step-N`
    for path in trash:
        disk.delete(path)  # if it fails, the next start of the run tries again
    if errors:
        raise errors[0]


def clean(folder: PurePath) -> None:
    """Delete half-written and half-deleted directories. Called only while no other process uses the
    folder."""
    disk = storage_of(folder)
    for kind in ("partial", "trash", "probe"):
        for path in disk.list(folder, f".{kind}-*"):
            disk.delete(path)


def _own_sha256(manifest: Mapping[str, Any]) -> str:
    values = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest file, which includes the SHA-256 of the manifest itself."""
    return json.dumps({**manifest, "sha256": _own_sha256(manifest)}, indent=1) + "\n"
