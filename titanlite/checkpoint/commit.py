"""The commit protocol: the directory `step-N/` exists only if the checkpoint is complete.

A checkpoint is written into `.partial-step-N-<random>/` and every file is synced. manifest.json is written
last: it names each file with its size and SHA-256, and carries a SHA-256 of itself. Then the directory is
synced, renamed, and its parent is synced. Nothing is written into a committed directory. Deletion renames the
directory first, so the name `step-N` never stands for half a checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlite.checkpoint.digest import FileDigest, gib, write_file
from titanlite.config.json_file import expect, load_object
from titanlite.files import sync


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written, and the run must not continue without it."""

    exit_code = 3


MANIFEST = "manifest.json"
SHARD = ".distcp"
FORMAT = 4
SLACK = 1.05  # free space needed, as a multiple of the tensors' bytes: the rest is for metadata and metrics


def partial_path(folder: Path, step: int) -> Path:
    """A new directory name to write step N into. It is random, because a process of an earlier start that is
    still alive on another node must not write into the same directory."""
    return folder / f".partial-step-{step}-{uuid.uuid4().hex[:8]}"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the committed checkpoints, oldest first."""
    matches = [
        (m, p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name)) and p.is_dir()
    ]
    return sorted((int(m[1]), p) for m, p in matches)


def check_space(folder: Path, needed: int, what: str = "a checkpoint") -> None:
    """Raises CheckpointError unless the disk has room for `what`, whose tensors have `needed` bytes."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < needed * SLACK:
        raise CheckpointError(f"{folder} has {gib(free)} free, {what} needs {gib(needed)}; none is written")


def begin(folder: Path, step: int) -> Path:
    """Make the empty directory that step N is written into. Raises CheckpointError if `step-N` exists."""
    if (folder / f"step-{step}").exists():
        raise CheckpointError(f"{folder / f'step-{step}'} exists already")
    partial = partial_path(folder, step)
    partial.mkdir(parents=True)
    return partial


def partial_size(folder: Path) -> int:
    """Bytes in the files of checkpoints that are being written."""
    with suppress(OSError):  # the checkpoint was just committed, or the file system does not answer
        return sum(file.stat().st_size for file in folder.glob(".partial-*/*"))
    return 0


def discard(partial: Path) -> None:
    """Delete a directory that will not be committed."""
    shutil.rmtree(partial, ignore_errors=True)


def commit(
    partial: Path, step: int, texts: Mapping[str, str], files: dict[str, FileDigest], about: dict[str, Any]
) -> Path:
    """Make the directory `partial` the checkpoint of `step`, and return its path.

    Called on one rank, after all ranks have written and synced their `files`. `texts`: small files by name,
    which are written here. `about`: plain values for the manifest. Raises CheckpointError if a file is
    missing or too short."""
    for name, digest in files.items():  # a file of another node may be incomplete, or on a disk of that node
        size = (partial / name).stat().st_size
        if size != digest.size:
            raise CheckpointError(f"{partial / name} has {size} bytes, {digest.size} were written")
    for name, text in texts.items():
        files[name] = write_file(partial / name, text.encode())
    manifest = {"format": FORMAT, "step": step, **about}
    manifest["files"] = {name: files[name]._asdict() for name in sorted(files)}
    write_file(partial / MANIFEST, manifest_text(manifest).encode())
    sync(partial)
    final = partial.with_name(f"step-{step}")
    os.rename(partial, final)  # fails if step-N exists: nothing is ever replaced
    sync(final.parent)
    return final


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`. Raises ValueError if it is damaged, CheckpointError if it has
    the format of another version of titanlite, which is no damage."""
    manifest = load_object(path / MANIFEST)
    if "format" not in manifest:
        raise ValueError("it has no format number")
    if manifest.pop("sha256", None) != _own_sha256(
        manifest
    ):  # before the format, which a bit flip may have changed
        raise ValueError("its own SHA-256 differs")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {manifest['format']}, this version reads {FORMAT}; "
            "read it with the version that wrote it"
        )
    expect(manifest, step=int, saved_at=str, ranks=int, files=dict)
    for name, entry in manifest["files"].items():
        if name != Path(name).name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in the checkpoint")
        expect(entry, size=int, sha256=str)
    return manifest


def digests(manifest: dict[str, Any]) -> dict[str, FileDigest]:
    """The size and SHA-256 of every file that a manifest names."""
    return {name: FileDigest(entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}


def fault(path: Path, step: int | None = None, sizes: bool = True) -> str | None:
    """Why the committed checkpoint at `path` cannot be trusted, or None.

    Checks the manifest, its step against `step`, and with `sizes` the presence and size of each file;
    contents are checked by digest.first_fault. Raises CheckpointError for another checkpoint format and
    OSError for a disk that does not answer."""
    try:
        manifest = read_manifest(path)
        if step not in (None, manifest["step"]):
            return f"its manifest belongs to step {manifest['step']}"
        files = digests(manifest)
        for name, expected in files.items() if sizes else ():
            status = (path / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != expected.size:
                return f"{name} has {status.st_size:,} bytes, {expected.size:,} were written"
        if extra := {p.name for p in path.glob(f"*{SHARD}")} - files.keys():
            return f"{min(extra)} was not written with it"
    except FileNotFoundError as e:
        return f"{Path(e.filename).name} is missing"
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            raise
        return f"{Path(e.filename).name[:60]} is not a regular file: {e.strerror}"
    except ValueError as e:
        return f"its manifest cannot be trusted: {e}"
    return None


def quarantine(path: Path) -> Path:
    """Rename an unusable checkpoint or file to `quarantined-<name>-<n>`, so that its step can be saved again.
    Returns the new path."""
    target = next(
        p for i in range(1 << 20) if not (p := path.with_name(f"quarantined-{path.name}-{i}")).exists()
    )
    os.rename(path, target)
    if is_kept(path):
        os.rename(keep_file(path), keep_file(target))
    sync(path.parent)
    return target


def list_quarantined(folder: Path) -> list[Path]:
    """Checkpoints in `folder` that earlier starts have quarantined."""
    return sorted(folder.glob("quarantined-*"))


def archive_after(folder: Path, after: int) -> list[Path]:
    """Move the checkpoints after step `after` into `archived-<n>/`, and with `after` = 0 also the quarantined
    ones. Returns their new paths.

    The newest is moved first, so that a kill between two moves leaves no checkpoint behind a gap.
    """
    later = [path for step, path in committed(folder) if step > after]
    if after == 0:
        later = list_quarantined(folder) + later
    if later:
        branch = next(p for i in range(1 << 20) if not (p := folder / f"archived-{i}").exists())
        branch.mkdir()
        for path in reversed(later):
            os.rename(path, branch / path.name)
            if is_kept(path):
                os.rename(keep_file(path), branch / keep_file(path).name)
        sync(branch)
        sync(folder)
        return [branch / path.name for path in later]
    return []


def is_kept(path: Path) -> bool:
    """Whether the user keeps this checkpoint by an empty file `step-N.keep` beside it."""
    return keep_file(path).exists()


def keep_file(path: Path) -> Path:
    """The file that keeps the checkpoint at `path` from being deleted."""
    return path.with_name(f"{path.name}.keep")


def retain(folder: Path, keep_latest: int, every: int = 0, keep: Collection[int] = ()) -> None:
    """Delete old committed checkpoints. Called only after a commit.

    Kept are the newest `keep_latest` (0: all), those at multiples of `every` steps (0: none), those of the
    steps in `keep`, and those with a keep file. Raises the first OSError after all deletions were tried."""
    errors, trash = [], []
    for step, path in committed(folder)[:-keep_latest] if keep_latest else []:
        if step in keep or (every and step % every == 0) or is_kept(path):
            continue
        trash.append(folder / f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(path, trash[-1])
        except OSError as e:
            errors.append(e)
    if trash:
        sync(folder)  # else after a power loss `step-N` could be half deleted
    for path in trash:
        shutil.rmtree(path, ignore_errors=True)  # the next start of the run tries again
    if errors:
        raise errors[0]


def clean(folder: Path, names: str = "*") -> None:
    """Delete half-written and half-deleted directories whose names match the pattern `names`. Called only
    while no other process uses the folder."""
    for path in [p for kind in ("partial", "trash", "probe") for p in folder.glob(f".{kind}-{names}")]:
        shutil.rmtree(path, ignore_errors=True)


def _own_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def manifest_text(manifest: dict[str, Any]) -> str:
    """The text of a manifest file, which includes the SHA-256 of the manifest itself."""
    return json.dumps({**manifest, "sha256": _own_sha256(manifest)}, indent=1) + "\n"
