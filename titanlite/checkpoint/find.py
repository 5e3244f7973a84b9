"""The checkpoints at a path that a user gave: a run folder, its checkpoint folder, or one checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.state import listed
from titanlite.config.component import ConfigError
from titanlite.config.paths import check_folder
from titanlite.storage import P, storage_of

MAX_LISTED = 10  # runs named in one error message
NO_RUN = re.compile(r"\.|(quarantined|archived|step)-")  # folders that are not searched for runs


def checkpoints_below(path: PurePath) -> list[tuple[int, Any]]:
    """(step, path) of the checkpoints at a path that the user gave, oldest first. `path`: a step folder, a
    checkpoint folder, or a folder with one run below it. Raises ConfigError if there is no run, or several.
    """
    if not isinstance(path, Path):
        return _checkpoints_in(path)
    check_folder(path)
    if exported := [p for p in (path, *path.glob("step-*")) if (p / "config.json").exists()]:
        raise ConfigError(f"{exported[-1]} is not a checkpoint but an export of one (config.json)")
    if (step := commit.step_of(path)) is not None:
        return [(step, path)]
    if (path / commit.MANIFEST).exists():  # a copy of a step folder under another name
        return [(_recorded_step(path), path)]
    folders = list(_checkpoint_folders(path))
    if not folders:
        raise ConfigError(f"{path} holds no checkpoint: give a run folder, or one of its step-N folders")
    if len(folders) > 1:
        runs = listed(sorted(map(str, folders)), MAX_LISTED)
        raise ConfigError(f"{path} holds the checkpoints of {len(folders)} runs; give one of them: {runs}")
    if checkpoints := _saved(folders[0]):
        return checkpoints
    quarantined = commit.list_quarantined(folders[0])
    raise CheckpointError(f"{folders[0]} has only quarantined checkpoints: {quarantined[-1].name}, ...")


def _checkpoints_in(path: P) -> list[tuple[int, P]]:
    """checkpoints_below for a path of another storage: a run folder, its checkpoint folder or a step."""
    if (step := commit.step_of(path)) is not None and storage_of(path).exists(path):
        return [(step, path)]
    if storage_of(path).exists(path / commit.MANIFEST):  # an average
        return [(_recorded_step(path), path)]
    if checkpoints := commit.list_committed(path) or commit.list_committed(path / "checkpoint"):
        return checkpoints
    raise ConfigError(f"{path} holds no checkpoint: give a run folder, or one of its step-N folders")


def _recorded_step(path: PurePath) -> int:
    """The step of a checkpoint whose path does not name it."""
    try:
        return commit.read_manifest(path)["step"]
    except commit.Damaged as e:
        raise commit.damaged(path, e) from None


def _checkpoint_folders(path: Path) -> Iterator[Path]:
    """The folders at and below `path` that hold titanlite checkpoints, usable or quarantined."""
    if _saved(path) or commit.list_quarantined(path):
        yield path
    try:
        below = sorted((e for e in os.scandir(path) if e.is_dir()), key=lambda e: e.name)
    except OSError:  # a folder that this user may not read
        return
    for entry in below:
        if NO_RUN.match(entry.name):
            continue
        if not entry.is_symlink():
            yield from _checkpoint_folders(Path(entry.path))
        elif _saved(Path(entry.path)):  # a checkpoint folder on another disk; other links are not followed
            yield Path(entry.path)


def _saved(folder: Path) -> list[tuple[int, Path]]:
    """The committed checkpoints in a folder, without Hugging Face exports, which have the same names."""
    checkpoints = commit.list_committed(folder)
    return [(step, path) for step, path in checkpoints if not (path / "config.json").exists()]


def find_checkpoint(path: P) -> P:
    """The newest checkpoint at a path that the user gave; see checkpoints_below(). Raises CheckpointError if
    files of that checkpoint are missing or have another size."""
    checkpoint: P = checkpoints_below(path)[-1][1]
    if reason := commit.fault(checkpoint):
        raise commit.damaged(checkpoint, reason)
    return checkpoint
