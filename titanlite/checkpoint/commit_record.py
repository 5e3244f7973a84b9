"""`last_commit.json` in the run folder records the newest checkpoint that the run has committed.

It lies outside the checkpoint folder. The checkpoint folder may be missing because its disk is not mounted or
`checkpoint.folder` was changed; without this record, such a run would start again at step 1."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.section import Checkpoint
from titanlite.config.component import ConfigError
from titanlite.config.json_file import expect, load_object
from titanlite.files import sync, write_atomically
from titanlite.log import logger

NAME = "last_commit.json"
METRICS = "metrics.jsonl"  # written by every run that has taken a step


class LastCommit(NamedTuple):
    """Content of last_commit.json. `step`: step of the newest checkpoint, None before the first commit.
    `folder`: checkpoint.folder at that time. `restarted`: whether checkpoint.restart was set at the last
    start and has been carried out. `load_step`: checkpoint.load_step of the last start."""

    step: int | None = None
    folder: str = ""
    restarted: bool = False
    load_step: int = -1


class CommitRecord:
    """Reads and writes last_commit.json of one run folder, on rank 0, which holds the folder's lock."""

    def __init__(self, run_folder: Path, config: Checkpoint):
        self._run_folder, self._config = run_folder, config
        self._file = run_folder / NAME

    def read(self) -> LastCommit | None:
        """The content of the file, or None if there is no file. Raises CheckpointError if it is damaged,
        OSError if it cannot be read at this time."""
        if not os.path.lexists(self._file):
            return None
        try:
            values = load_object(self._file)
            expect(values, folder=str, restarted=bool)
            if values.get("step") is not None:
                expect(values, step=int)
            return LastCommit(**values)
        except (ValueError, TypeError) as e:
            raise CheckpointError(
                f"{self._file} cannot be read ({e}): if this run has saved no checkpoint, delete that file; "
                "otherwise put the checkpoints back"
            ) from None

    def record_start(self, step: int | None) -> None:
        """Record that the run starts from the checkpoint of `step`, or None for a new run. Raises ConfigError
        if the disk is full."""
        try:
            self._write(step)
        except OSError as e:
            raise ConfigError(f"{self._file} cannot be written: {e}", "job.dump_folder") from None

    def record_commit(self, step: int) -> None:
        """Record that the checkpoint of `step` is committed. An error of the disk is only a warning, because
        the checkpoint exists and the next commit or start writes the file."""
        try:
            self._write(step)
        except OSError as e:
            logger.warning(f"{self._file} could not be written: {e}")

    def _write(self, step: int | None) -> None:
        config = self._config
        last = LastCommit(step, config.folder, config.restart, config.load_step)
        write_atomically(self._file, json.dumps(last._asdict()) + "\n")
        sync(self._run_folder)

    def restart_is_due(self) -> bool:
        """Whether this start carries out checkpoint.restart. That happens once: a later start with the same
        arguments resumes from the checkpoints saved since. It also happens if the file is damaged: a restart
        archives the earlier run and deletes nothing."""
        if not self._config.restart:
            return False
        try:
            last = self.read()
        except CheckpointError:
            return True
        return last is None or not last.restarted

    def has_rewound_before_load_step(self) -> bool:
        """Whether the run went back to checkpoint.load_step at an earlier start, and has rewound to a step
        before it since. The rewind has archived the checkpoint of load_step; going back there once more
        would undo the rewind."""
        load_step, last = self._config.load_step, None
        if load_step != -1:
            with suppress(CheckpointError):  # a damaged file tells nothing
                last = self.read()
        return last is not None and last.load_step == load_step and (last.step or 0) < load_step

    def quarantine_if_damaged(self) -> None:
        """Rename the file if it is damaged. Called before a new run replaces the file."""
        try:
            self.read()
        except CheckpointError:
            logger.warning(f"{self._file} is damaged; renamed to {commit.quarantine(self._file).name}")

    def check_nothing_was_saved(self) -> None:
        """Raises CheckpointError if the run may have committed checkpoints. Called when there is no
        checkpoint to resume from."""
        last, run_folder = self.read(), self._run_folder
        restart = "start at step 1 with --checkpoint.restart=true, " if self._config.enable else ""
        ways = f"{restart}or choose another --job.dump_folder"
        if last is None:
            metrics = run_folder / METRICS
            if metrics.is_file() and metrics.stat().st_size:
                raise CheckpointError(
                    f"{run_folder} has the metrics of a run, but no checkpoint in {self._config.folder!r}, "
                    f"and no {NAME} that tells whether the run had saved one: put its checkpoints back, "
                    f"{ways}"
                )
            return
        if last.step is None:
            return
        saved = run_folder / last.folder / f"step-{last.step}"
        if saved.exists():
            raise CheckpointError(
                f"this run's newest checkpoint is {saved}, and {run_folder / self._config.folder} has none: "
                f"set --checkpoint.folder={last.folder} to resume from it, {ways}"
            )
        if last.restarted and self._config.restart:
            ways = f"choose another --job.dump_folder, or delete {self._file} to restart once more"
        raise CheckpointError(
            f"this run has saved {saved}, and no checkpoint exists now: put it back (is a disk not "
            f"mounted?), {ways}"
        )
