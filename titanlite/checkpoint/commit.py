"""The commit protocol: the directory `step-N/` exists only if the checkpoint is complete.

A checkpoint is written into `.partial-step-N-<random>/` and every file is synced. manifest.json is written
last: it has the name, size and SHA-256 of each file, and a SHA-256 of itself. Then the directory is synced
and renamed, and its parent is synced. Nothing is written into a committed directory. Deletion renames the
directory first, so `step-N` is never half a checkpoint."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlite.checkpoint.digest import FileDigest, gib, write_file
from titanlite.files import sync


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written, and the run must not continue without it."""

    exit_code = 3


class Damaged(CheckpointError):
    """A checkpoint is not as it was written. The message is the reason, without the checkpoint's path."""


MANIFEST = "manifest.json"
SHARD_SUFFIX = ".distcp"
FORMAT = 5
SLACK = 1.05  # free space needed per byte of tensors; metadata and metrics need some space, too


def partial_path(folder: Path, step: int) -> Path:
    """A new name for the directory that step N is written into. It is random, because a process of an earlier
    start may still be alive on another node and must not write into the same directory."""
    return folder / f".partial-step-{step}-{uuid.uuid4().hex[:8]}"


def list_committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the committed checkpoints, oldest first."""
    steps = [(step_of(path), path) for path in folder.glob("step-*") if path.is_dir()]
    return sorted((step, path) for step, path in steps if step is not None)


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint, which need not exist; None: `path` has no such name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


def check_space(folder: Path, needed_bytes: int, name: str = "a checkpoint") -> None:
    """Raises CheckpointError unless the disk has room for a directory whose tensors have `needed_bytes`.
    `name`: what the error calls the directory."""
    disk, needed_bytes = os.statvfs(folder), int(needed_bytes * SLACK)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{name} needs {gib(needed_bytes)}, and {folder} has {gib(free_bytes)} free; nothing is written"
        )


def begin(folder: Path, step: int) -> Path:
    """Create the directory that step N is written into. Raises CheckpointError if `step-N` exists."""
    if (folder / f"step-{step}").exists():
        raise CheckpointError(f"{folder / f'step-{step}'} exists already")
    partial = partial_path(folder, step)
    partial.mkdir(parents=True)
    return partial


def partial_size(folder: Path) -> int:
    """Bytes written so far for checkpoints that are not committed yet."""
    with suppress(OSError):  # the checkpoint was just committed, or the file system does not answer
        return sum(file.stat().st_size for file in folder.glob(".partial-*/*"))
    return 0


def discard(folder: Path) -> None:
    """Delete as much of a directory as possible."""
    shutil.rmtree(folder, ignore_errors=True)


def commit(
    partial: Path, step: int, texts: Mapping[str, str], files: dict[str, FileDigest], about: dict[str, Any]
) -> Path:
    """Commit the directory `partial` as the checkpoint of `step`, and return its new path. Called on one
    rank. Arguments and errors: see complete()."""
    complete(partial, step, texts, files, about)
    sync(partial)
    final = partial.with_name(f"step-{step}")
    os.rename(partial, final)  # fails if step-N exists: nothing is ever replaced
    sync(final.parent)
    return final


def complete(
    folder: Path, step: int, texts: Mapping[str, str], files: dict[str, FileDigest], about: dict[str, Any]
) -> None:
    """Write the small files and the manifest of a checkpoint, after all ranks have written and synced its
    `files`.

    `texts`: content of small files by name. `about`: plain values for the manifest. Raises OSError if a file
    is missing, CheckpointError if it does not have its size."""
    # Another node's file may be incomplete here, or on a disk that this node does not see.
    for name, digest in files.items():
        size = (folder / name).stat().st_size
        if size != digest.size:
            raise CheckpointError(f"{folder / name} has {size} bytes, {digest.size} were written")
    for name, text in texts.items():
        files[name] = write_file(folder / name, text.encode())
    manifest = {"format": FORMAT, "step": step, **about}
    manifest["files"] = {name: files[name]._asdict() for name in sorted(files)}
    write_file(folder / MANIFEST, manifest_text(manifest).encode())


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`. Raises Damaged, or CheckpointError if another version of
    titanlite wrote it."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
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


def digests(manifest: dict[str, Any]) -> dict[str, FileDigest]:
    """The size and SHA-256 of every file that a manifest names."""
    return {name: FileDigest(entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}


def total_size(manifest: dict[str, Any]) -> int:
    """Bytes of all files that a manifest names."""
    return sum(entry["size"] for entry in manifest["files"].values())


def check(path: Path, step: int | None = None) -> dict[str, Any]:
    """The manifest of the committed checkpoint at `path`, whose step and files are compared with it: the
    presence and the size of each file; digest.first_fault and read_file check contents. Raises Damaged,
    CheckpointError for another checkpoint format, OSError for a disk that does not answer."""
    manifest = read_manifest(path)
    if step not in (None, manifest["step"]):
        raise Damaged(f"its manifest belongs to step {manifest['step']}")
    for name, expected in digests(manifest).items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        if size != expected.size:
            raise Damaged(f"{name} has {size:,} bytes, {expected.size:,} were written")
    if extra := {p.name for p in path.glob(f"*{SHARD_SUFFIX}")} - manifest["files"].keys():
        raise Damaged(f"{min(extra)} was not written with it")
    return manifest


def fault(path: Path, step: int | None = None) -> str | None:
    """The reason why check() finds the checkpoint at `path` damaged, or None."""
    try:
        check(path, step)
    except Damaged as e:
        return str(e)
    return None


def read_file(path: Path, name: str, manifest: dict[str, Any]) -> bytes:
    """The content of a small file of the checkpoint at `path`. Raises Damaged unless its hash is right."""
    try:
        data = (path / name).read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as e:
        if e.errno != errno.EIO:  # only a bad sector is damage
            raise
        raise Damaged(f"{name} cannot be read: {e.strerror}") from None
    if name not in manifest["files"] or hashlib.sha256(data).hexdigest() != manifest["files"][name]["sha256"]:
        raise Damaged(f"{name} is not what was written: its SHA-256 differs")
    return data


def quarantine(path: Path) -> Path:
    """Rename an unusable checkpoint or file to `quarantined-<name>-<n>`, so that its step can be saved again.
    Returns the new path."""
    target = _first_unused(path.with_name(f"quarantined-{path.name}-"))
    _move(path, target)
    sync(path.parent)
    return target


def list_quarantined(folder: Path) -> list[Path]:
    """The quarantined checkpoints in `folder`."""
    return sorted(folder.glob("quarantined-*"))


def archive_after(folder: Path, after: int) -> list[Path]:
    """Move the checkpoints after step `after` into `archived-<n>/`, and, if `after` is 0, also the
    quarantined checkpoints. Returns their new paths.

    The newest is moved first: if the process is killed between two moves, the remaining steps have no gap."""
    later = list_quarantined(folder) if after == 0 else []
    later += [path for step, path in list_committed(folder) if step > after]
    if not later:
        return []
    archive = _first_unused(folder / "archived-")
    archive.mkdir()
    for path in reversed(later):
        _move(path, archive / path.name)
    sync(archive)
    sync(folder)
    return [archive / path.name for path in later]


def is_kept(path: Path) -> bool:
    """Whether the user keeps this checkpoint with an empty file `step-N.keep` beside it."""
    return _keep_file(path).exists()


def _keep_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.keep")


def _first_unused(prefix: Path) -> Path:
    """The first of `<prefix>0`, `<prefix>1`, ... that does not exist."""
    paths = (prefix.with_name(f"{prefix.name}{i}") for i in itertools.count())
    return next(path for path in paths if not path.exists())


def _move(path: Path, target: Path) -> None:
    """Rename a checkpoint and its keep file."""
    os.rename(path, target)
    if is_kept(path):
        os.rename(_keep_file(path), _keep_file(target))


def retain(folder: Path, keep_latest: int, every: int = 0, keep: Collection[int] = ()) -> None:
    """Delete old committed checkpoints. Called after each commit.

    Keeps the newest `keep_latest` checkpoints (0: all), the steps that are multiples of `every` (0: none),
    the steps in `keep`, and checkpoints with a keep file. Tries all deletions, then raises the first OSError.
    """
    errors, trash = [], []
    for step, path in list_committed(folder)[:-keep_latest] if keep_latest else []:
        if step in keep or (every and step % every == 0) or is_kept(path):
            continue
        trash.append(folder / f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(path, trash[-1])
        except OSError as e:
            errors.append(e)
    if trash:
        sync(folder)  # before any deletion; otherwise a power loss could leave half of `step-N`
    for path in trash:
        discard(path)  # if it fails, the next start of the run tries again
    if errors:
        raise errors[0]


def clean(folder: Path, names: str = "*") -> None:
    """Delete half-written and half-deleted directories whose names match the pattern `names`. Called only
    while no other process uses the folder."""
    for kind in ("partial", "trash", "probe"):
        for path in folder.glob(f".{kind}-{names}"):
            discard(path)


def _own_sha256(manifest: dict[str, Any]) -> str:
    values = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def manifest_text(manifest: dict[str, Any]) -> str:
    """The text of a manifest file, which includes the SHA-256 of the manifest itself."""
    return json.dumps({**manifest, "sha256": _own_sha256(manifest)}, indent=1) + "\n"
