"""The commit protocol: `step-N/` exists only if it is whole.

A checkpoint is written into `.partial-step-N/`, described by manifest.json (every file with its size; written
last), synced to disk and renamed; then the folder itself is synced. Nothing is written inside a committed
one. Deletion renames first, so a name never stands for half a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written, and the run must not go on without it."""

    exit_code = 3


MANIFEST = "manifest.json"
FORMAT = 1


def partial_path(folder: Path, step: int) -> Path:
    """Where step N is written before it is committed."""
    return folder / f".partial-step-{step}"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the committed checkpoints, oldest first."""
    found = [
        (m, p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name)) and p.is_dir()
    ]
    return sorted((int(m[1]), p) for m, p in found)


def commit(partial: Path, step: int) -> Path:
    """Make the finished directory `partial` the checkpoint of `step`. By one rank, after all have written."""
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    sizes = {p.relative_to(partial).as_posix(): p.stat().st_size for p in files}
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"size": size} for name, size in sizes.items()},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for file in [*files, partial / MANIFEST, partial]:
        sync(file)
    final = partial.with_name(f"step-{step}")
    os.rename(partial, final)
    sync(final.parent)
    return final


def fault(path: Path, step: int | None = None) -> str | None:
    """Why a committed checkpoint cannot be trusted, or None: its manifest, the presence and size of its
    files, and that it is of `step`. Raises CheckpointError for one of another format: that is not damage, and
    OSError for a disk that does not answer."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']}, this titanlite reads {FORMAT}")
        if step not in (None, manifest["step"]):
            return f"its manifest is of step {manifest['step']}"
        for name, entry in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size} bytes, {entry['size']} were written"
    except FileNotFoundError as e:
        return f"{Path(e.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        return f"its manifest cannot be read: {type(e).__name__}: {e}"
    return None


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used to `bad-...`, so that its step can be saved again."""
    target = next(p for i in range(1 << 20) if not (p := path.with_name(f"bad-{path.name}-{i}")).exists())
    os.rename(path, target)
    sync(path.parent)
    return target


def set_aside_before(folder: Path) -> list[Path]:
    """Checkpoints that earlier starts have set aside."""
    return sorted(folder.glob("bad-*"))


def retain(folder: Path, keep_latest: int) -> None:
    """Delete all but the newest `keep_latest` committed checkpoints (0: keep all). Only after a commit."""
    for _, path in committed(folder)[:-keep_latest] if keep_latest else []:
        trash = path.with_name(f".trash-{path.name}")
        os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what a killed run left half-written or half-deleted. Only while no other run uses the folder."""
    for path in [*folder.glob(".partial-*"), *folder.glob(".trash-*")]:
        shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
