"""How a run starts: at step 1, from a checkpoint, or at step 1 in the folder of an earlier run.

`decide` reads the run folder once, on rank 0, and changes nothing in it. Its small result is passed on: first
the run identity is compared with it, then the checkpoint is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar

from titanlite.checkpoint import commit, last_commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.last_commit import LastCommit
from titanlite.checkpoint.lock import FolderLock
from titanlite.checkpoint.resume import Candidate, Fault, choose, unusable
from titanlite.checkpoint.run_identity import check_identity, unknown_names, with_source_labels
from titanlite.checkpoint.section import Checkpoint
from titanlite.config.component import ConfigError
from titanlite.log import logger
from titanlite.storage import storage_of

METRICS = "metrics.jsonl"  # written by every run that has taken a step


@dataclass(frozen=True)
class New:
    """The run starts at step 1. `identity`: recorded in the folder by an earlier start that has saved no
    checkpoint, or None. `history`: see Resume."""

    identity: dict[str, Any] | None = None
    history: str = ""
    candidate: ClassVar[None] = None


@dataclass(frozen=True)
class Restart:
    """The run starts at step 1, and the earlier run in the folder is archived."""

    candidate: ClassVar[None] = None
    history: ClassVar[str] = ""


@dataclass(frozen=True)
class Resume:
    """The run continues from a checkpoint. `faults`: damaged checkpoints, renamed once this one is loaded.
    `history`: LastCommit.history of the copies in memory that are later states of this run; empty if none is.
    """

    candidate: Candidate
    faults: Sequence[Fault] = ()
    history: str = ""


Start = New | Restart | Resume


def decide(
    config: Checkpoint, run_folder: PurePath, faults: Sequence[Fault] = (), lock: FolderLock | None = None
) -> Start:
    """Decide how the run in a folder starts; the checkpoints in `faults` are not used. `lock`: taken first if
    the folder exists, because another process may still be saving there. Called on one rank. Raises
    ConfigError for a folder that is not a run's, CheckpointError if its run cannot be resumed."""
    folder, storage = run_folder / config.folder, storage_of(run_folder)
    for place in (run_folder, folder):
        if storage.exists(place / commit.MANIFEST):
            raise ConfigError(
                f"{place} is a checkpoint, not the folder of a run; to start from its weights, give it "
                "as --checkpoint.initial_load_path, with another --job.dump_folder",
                "job.dump_folder",
            )
    if lock is not None and storage.exists(run_folder):
        lock.take()
    last, damage = None, None
    try:
        last = last_commit.read(run_folder)
    except CheckpointError as e:
        damage = e
    # Once: a later start with the same arguments resumes from the checkpoints saved since.
    if config.restart and not (last and last.restarted):
        return Restart()
    found, load_step = list(faults), config.load_step
    history = last.history if last and load_step in (-1, last.load_step) else ""
    if last and last.load_step == load_step != -1 and (last.step or 0) < load_step:
        # The rewind has archived the checkpoint of load_step; going back there again would undo the rewind.
        logger.info(f"load_step = {load_step} was already carried out, and the run has rewound since")
        load_step = -1
    candidate = choose(folder, load_step, found)
    if not config.enable and (candidate or found):
        raise ConfigError(
            f"{folder} holds a run; choose another --job.dump_folder to train without checkpoints",
            "checkpoint.enable",
        )
    if candidate is not None:
        return Resume(candidate, tuple(found), history)
    if error := unusable(folder, found) or damage:
        raise error
    _check_nothing_was_saved(last, run_folder, config)
    file = run_folder / "run_identity.json"
    has_identity = storage.exists(file) and not config.restart
    return New(json.loads(storage.read(file)) if has_identity else None, history)


def _check_nothing_was_saved(last: LastCommit | None, run_folder: PurePath, config: Checkpoint) -> None:
    """Raises CheckpointError if the run may have committed checkpoints. Called when there is no checkpoint to
    resume from."""
    restart = "start at step 1 with --checkpoint.restart=true, " if config.enable else ""
    ways, storage = f"{restart}or choose another --job.dump_folder", storage_of(run_folder)
    if last is None:
        metrics = run_folder / METRICS
        if storage.exists(metrics) and storage.size(metrics):
            raise CheckpointError(
                f"{run_folder} has the metrics of a run, but no checkpoint in {config.folder!r}, "
                f"and no {last_commit.NAME} that tells whether the run had saved one: put its checkpoints "
                f"back, {ways}"
            )
        return
    if last.step is None:
        return
    saved = run_folder / last.folder / f"step-{last.step}"
    if storage.exists(saved):
        raise CheckpointError(
            f"this run's newest checkpoint is {saved}, and {run_folder / config.folder} has none: "
            f"set --checkpoint.folder={last.folder} to resume from it, {ways}"
        )
    if last.restarted and config.restart:
        record = run_folder / last_commit.NAME
        ways = f"choose another --job.dump_folder, or delete {record} to restart once more"
    raise CheckpointError(
        f"this run has saved {saved}, and no checkpoint exists now: put it back (is a disk not "
        f"mounted?), {ways}"
    )


def check_labels(
    start: Start, ours: dict[str, Any], allow_changed: Sequence[str], run_folder: PurePath
) -> None:
    """Raises ConfigError if the run that is continued has another run identity than this job, as far as that
    is known before the data sources are opened: `ours` has the labels of the sources, or no sources."""
    if (recorded := _recorded(start, run_folder)) is not None:
        theirs, folder, num_sequences = recorded
        check_identity(with_source_labels(theirs, ours), ours, allow_changed, folder, num_sequences)


def check_run_identity(
    start: Start, ours: dict[str, Any], allow_changed: Sequence[str], run_folder: PurePath
) -> None:
    """Raises ConfigError if the run that is continued has another run identity than this job, and, for a run
    that continues none, if its identity lacks a name in checkpoint.allow_changed. Logs allowed changes."""
    recorded = _recorded(start, run_folder)
    if recorded is None:
        for mistake in unknown_names(allow_changed, ours):
            raise ConfigError(mistake, "checkpoint.allow_changed")
        return
    theirs, folder, num_sequences = recorded
    for mistake in unknown_names(allow_changed, ours, theirs):
        # Not an error: the checkpoint that the run saves after an allowed change does not have its old keys
        # any more, and the same command must be able to resume from it.
        logger.warning(f"checkpoint.allow_changed: {mistake}")
    for change in check_identity(theirs, ours, allow_changed, folder, num_sequences):
        logger.warning(f"changed, as checkpoint.allow_changed allows: {change}")
    if isinstance(start, New):
        logger.info(f"the earlier run in {run_folder} saved no checkpoint; starting at step 1")


def _recorded(start: Start, run_folder: PurePath) -> tuple[dict[str, Any], PurePath, int] | None:
    """The identity of the run that is continued, the folder that holds it, and the number of sequences that
    the run has trained on; None if no run is continued."""
    if isinstance(start, Resume):
        train = start.candidate.train
        return train["identity"], start.candidate.path.parent, train["sequences"]
    if isinstance(start, New) and start.identity is not None:
        return start.identity, run_folder, 0
    return None
