"""The commit protocol: `step-N/` exists only if it is whole.

A checkpoint is written into `.partial-step-N/`, every file is synced, manifest.json comes last and names each
file with its size and SHA-256 and carries its own; then the directory is synced, renamed, and its parent
synced. Nothing is written inside a committed one. Deletion renames first, so a name never stands for half a
checkpoint.
"""

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
    """A checkpoint cannot be used or written, and the run must not go on without it."""

    exit_code = 3


MANIFEST = "manifest.json"
SHARD = ".distcp"
FORMAT = 3
SLACK = 1.05  # of the bytes of its tensors: for a checkpoint's index, and for the metrics meanwhile


def partial_path(folder: Path, step: int) -> Path:
    """A new name to write step N under before it is committed: a process of a run before, still alive on
    another node, must not write into it."""
    return folder / f".partial-step-{step}-{uuid.uuid4().hex[:8]}"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the committed checkpoints, oldest first."""
    found = [
        (m, p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name)) and p.is_dir()
    ]
    return sorted((int(m[1]), p) for m, p in found)


def check_space(folder: Path, needed: int, what: str = "a checkpoint") -> None:
    """Raises CheckpointError unless there is room for `what`, with `needed` bytes of tensors."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < needed * SLACK:
        raise CheckpointError(f"{folder} has {gib(free)} free, {what} needs {gib(needed)}; none is written")


def begin(folder: Path, step: int) -> Path:
    """An empty directory to write step N into. Raises CheckpointError if N is there already."""
    if (folder / f"step-{step}").exists():
        raise CheckpointError(f"{folder / f'step-{step}'} exists already")
    partial = partial_path(folder, step)
    partial.mkdir(parents=True)
    return partial


def partial_size(folder: Path) -> int:
    """Bytes in the files that are being written."""
    with suppress(OSError):  # it has just been committed, or the file system does not answer
        return sum(file.stat().st_size for file in folder.glob(".partial-*/*"))
    return 0


def discard(partial: Path) -> None:
    """Give up what was written."""
    shutil.rmtree(partial, ignore_errors=True)


def commit(
    partial: Path, step: int, texts: Mapping[str, str], files: dict[str, FileDigest], about: dict[str, Any]
) -> Path:
    """Make `partial` the checkpoint of `step`. By one rank, after all have written and synced their `files`.

    `texts`: small files, written here. `about`: plain values for the manifest. Raises CheckpointError if a
    file is not there in full.
    """
    for name, digest in files.items():  # another node's file may be short, or in another node's folder
        size = (partial / name).stat().st_size
        if size != digest.size:
            raise CheckpointError(f"{partial / name} has {size} bytes, {digest.size} were written")
    for name, text in texts.items():
        files[name] = write_file(partial / name, text.encode())
    manifest = {"format": FORMAT, "step": step, **about}
    manifest["files"] = {name: files[name]._asdict() for name in sorted(files)}
    write_file(partial / MANIFEST, sealed(manifest).encode())
    sync(partial)
    final = partial.with_name(f"step-{step}")
    os.rename(partial, final)  # fails if there is one: nothing is ever replaced
    sync(final.parent)
    return final


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises ValueError if it is not as it was written, CheckpointError if it
    is of another format: that is not damage."""
    manifest = load_object(path / MANIFEST)
    if "format" not in manifest:
        raise ValueError("it is no manifest")
    if manifest.pop("sha256", None) != _seal(manifest):  # first, and alike in all formats: it may be a flip
        raise ValueError("its own SHA-256 differs")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']}, this titanlite reads {FORMAT}")
    expect(manifest, step=int, saved_at=str, ranks=int, files=dict)
    for name, entry in manifest["files"].items():
        if name != Path(name).name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is no name of a file in it")
        expect(entry, size=int, sha256=str)
    return manifest


def digests(manifest: dict[str, Any]) -> dict[str, FileDigest]:
    """The files that a manifest names."""
    return {name: FileDigest(entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}


def fault(path: Path, step: int | None = None, sizes: bool = True) -> str | None:
    """Why a committed checkpoint cannot be trusted, or None: its manifest, that it is of `step`, and the
    presence and size of its files; contents are digest.first_fault's. Raises CheckpointError for one of
    another format and OSError for a disk that does not answer."""
    try:
        manifest = read_manifest(path)
        if step not in (None, manifest["step"]):
            return f"its manifest is of step {manifest['step']}"
        files = digests(manifest)
        for name, expected in files.items() if sizes else ():
            status = (path / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is no file"
            if status.st_size != expected.size:
                return f"{name} has {status.st_size:,} bytes, {expected.size:,} were written"
        if extra := {p.name for p in path.glob(f"*{SHARD}")} - files.keys():
            return f"{min(extra)} was not written with it"
    except FileNotFoundError as e:
        return f"{Path(e.filename).name} is missing"
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            raise
        return f"{Path(e.filename).name[:60]} is no file: {e.strerror}"
    except ValueError as e:
        return f"its manifest cannot be trusted: {e}"
    return None


def set_aside(path: Path, prefix: str = "bad") -> Path:
    """Rename a checkpoint that cannot be used to `bad-step-N-0`, so that its step can be saved again."""
    target = next(
        p for i in range(1 << 20) if not (p := path.with_name(f"{prefix}-{path.name}-{i}")).exists()
    )
    os.rename(path, target)
    if is_pinned(path):
        os.rename(pin_of(path), pin_of(target))
    sync(path.parent)
    return target


def set_aside_before(folder: Path) -> list[Path]:
    """Bad checkpoints that earlier starts have set aside."""
    return sorted(folder.glob("bad-*"))


def abandon(folder: Path, after: int) -> list[Path]:
    """Move the checkpoints after step `after` into `abandoned-<n>/`, the newest first, so that a kill between
    two moves leaves none that has a gap before it; after step 0 also the quarantined ones. Returns their new
    paths."""
    later = [path for step, path in committed(folder) if step > after]
    if after == 0:
        later = set_aside_before(folder) + later
    if later:
        branch = next(p for i in range(1 << 20) if not (p := folder / f"abandoned-{i}").exists())
        branch.mkdir()
        for path in reversed(later):
            os.rename(path, branch / path.name)
            if is_pinned(path):
                os.rename(pin_of(path), branch / pin_of(path).name)
        sync(branch)
        sync(folder)
        return [branch / path.name for path in later]
    return []


def is_pinned(path: Path) -> bool:
    """Whether a person keeps this checkpoint, by an empty file `step-N.keep` beside it."""
    return pin_of(path).exists()


def pin_of(path: Path) -> Path:
    """The file that says so."""
    return path.with_name(f"{path.name}.keep")


def retain(folder: Path, keep_latest: int, every: int = 0, keep: Collection[int] = ()) -> None:
    """Delete committed checkpoints but the newest `keep_latest` (0: delete none), those at multiples of
    `every` steps (0: none), those of the steps `keep` and the pinned ones. Only after a commit. Raises the
    first OSError when it has done what it could."""
    errors, trash = [], []
    for step, path in committed(folder)[:-keep_latest] if keep_latest else []:
        if step in keep or (every and step % every == 0) or is_pinned(path):
            continue
        trash.append(folder / f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(path, trash[-1])
        except OSError as e:
            errors.append(e)
    if trash:
        sync(folder)  # else a power loss could show them half deleted under their own names
    for path in trash:
        shutil.rmtree(path, ignore_errors=True)  # the next start tries again
    if errors:
        raise errors[0]


def clean(folder: Path, names: str = "*") -> None:
    """Remove what a killed run left half-written or half-deleted of such `names`. Only while no other run
    uses the folder."""
    for path in [p for kind in ("partial", "trash", "probe") for p in folder.glob(f".{kind}-{names}")]:
        shutil.rmtree(path, ignore_errors=True)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sealed(manifest: dict[str, Any]) -> str:
    """The text of a manifest file, with the hash of its own content."""
    return json.dumps({**manifest, "sha256": _seal(manifest)}, indent=1) + "\n"
