"""`last_commit.json` in the run folder: the newest checkpoint that the run has committed.

It lies outside the checkpoint folder. A run whose checkpoint folder is gone (a disk that is not mounted,
another `checkpoint.folder`) would otherwise look like one that has saved nothing, and start again over its
remains.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.section import Checkpoint
from titanlite.config.component import ConfigError
from titanlite.files import read_regular, sync, write_atomically
from titanlite.log import logger

NAME = "last_commit.json"
METRICS = "metrics.jsonl"  # written by every run that has taken a step


class LastCommit(NamedTuple):
    """`step`: None before the first commit. `folder`: its `checkpoint.folder`. `restarted`: whether
    `checkpoint.restart` was set at the last start, and so has been carried out."""

    step: int | None = None
    folder: str = ""
    restarted: bool = False


class CommitRecord:
    """Reads and writes the file of one run folder. On one rank, while it holds the folder's lock."""

    def __init__(self, run_folder: Path, config: Checkpoint):
        self._run_folder, self._config = run_folder, config
        self._file = run_folder / NAME

    def read(self) -> LastCommit | None:
        """None if there is no file. Raises CheckpointError if it is damaged, OSError if it cannot be read
        now."""
        if not os.path.lexists(self._file):
            return None
        try:
            last = LastCommit(**json.loads(read_regular(self._file)))
            if type(last.step) not in (int, type(None)) or type(last.folder) is not str:
                raise ValueError(f"step {last.step!r} in folder {last.folder!r}")
            if type(last.restarted) is not bool:
                raise ValueError(f"restarted is {last.restarted!r}")
            return last
        except (ValueError, TypeError, RecursionError) as e:
            raise CheckpointError(
                f"{self._file} cannot be read ({e}): if this run has saved no checkpoint, delete that file; "
                "else bring the checkpoints back"
            ) from None

    def start(self, step: int | None) -> None:
        """Record a start from `step`, None for a new run. Raises ConfigError if the disk is full."""
        try:
            self._write(step)
        except OSError as e:
            raise ConfigError(f"{self._file} cannot be written: {e}", "job.dump_folder") from None

    def committed(self, step: int) -> None:
        """Record a commit. If the disk does not take it, the checkpoint is there all the same, and the next
        commit or start makes up for it."""
        try:
            self._write(step)
        except OSError as e:
            logger.warning(f"{self._file} could not be written: {e}")

    def _write(self, step: int | None) -> None:
        last = LastCommit(step, self._config.folder, self._config.restart)
        write_atomically(self._file, json.dumps(last._asdict()) + "\n")
        sync(self._run_folder)

    def restarts(self) -> bool:
        """Whether this start is to begin a new run over the remains: `checkpoint.restart` does so once, and
        a start with the same arguments goes on from what was saved since. A damaged file cannot tell whether
        that was done: it is done then, which deletes nothing."""
        if not self._config.restart:
            return False
        try:
            last = self.read()
        except CheckpointError:
            return True
        return last is None or not last.restarted

    def quarantine_if_damaged(self) -> None:
        """Before a new run replaces the file: keep a damaged one under another name."""
        try:
            self.read()
        except CheckpointError:
            logger.warning(f"{self._file} is damaged, and archived as {commit.quarantine(self._file).name}")

    def check_nothing_was_saved(self) -> None:
        """Raises CheckpointError if the run has committed a checkpoint, none being left to go on from."""
        last, here = self.read(), self._run_folder
        restart = "start again at step 1 with --checkpoint.restart=true, " if self._config.enable else ""
        ways = f"{restart}or choose another --job.dump_folder"
        if last is None:
            metrics = here / METRICS
            if metrics.is_file() and metrics.stat().st_size:
                raise CheckpointError(
                    f"{here} has the metrics of a run but no checkpoint in {self._config.folder!r}, and no "
                    f"{NAME} to tell whether there was one: bring its checkpoints back, {ways}"
                )
            return
        if last.step is None:
            return
        saved = here / last.folder / f"step-{last.step}"
        if saved.exists():
            raise CheckpointError(
                f"this run's newest checkpoint is {saved}, and {here / self._config.folder} has none: set "
                f"--checkpoint.folder={last.folder} to go on from it, {ways}"
            )
        if last.restarted and self._config.restart:
            ways = f"choose another --job.dump_folder, or delete {self._file} to restart once more"
        raise CheckpointError(
            f"this run has saved {saved}, and no checkpoint is there now: bring it back (is a disk not "
            f"mounted?), {ways}"
        )
