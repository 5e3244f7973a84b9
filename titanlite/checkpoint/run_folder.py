"""Checks of a run folder before anything is written: whether the folder belongs to this run, and which
checkpoint the run resumes from. startup.py makes the first check before the data is opened, Checkpointer
makes all of them, and `titanlite config --ranks` makes them without starting a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlite.checkpoint import commit, resume
from titanlite.checkpoint.commit_record import CommitRecord
from titanlite.checkpoint.resume import Candidate, Fault
from titanlite.checkpoint.run_identity import check_identity, read_identity, unknown_names, with_source_labels
from titanlite.checkpoint.section import Checkpoint
from titanlite.config.component import ConfigError
from titanlite.log import logger


class RunFolder:
    """A run folder before the run starts. The methods run on one rank and write nothing. `identity`: the run
    identity of this job; None if it is not known, and then it is not compared with the checkpoint's."""

    def __init__(self, config: Checkpoint, dump_folder: Path, identity: dict[str, Any] | None):
        self._config, self._run_folder, self._identity = config, dump_folder, identity
        self._folder, self._identity_file = dump_folder / config.folder, dump_folder / "run_identity.json"
        self._record = CommitRecord(dump_folder, config)

    def is_new_run(self) -> bool:
        """Whether the run starts at step 1, because it has no checkpoint or restarts."""
        return self._record.restart_is_due() or not commit.list_committed(self._folder)

    def newest(self) -> Candidate | None:
        """The newest checkpoint of the run that is not damaged, or checkpoint.load_step; None for a new run
        or if there is none. choose_checkpoint() says which one the run resumes from."""
        if self._record.restart_is_due():
            return None
        return resume.newest(self._folder, self._config.load_step, [])

    def check_known_identity(self) -> None:
        """Raises ConfigError if the run in the folder has another run identity than this job, or if the
        folder is itself a checkpoint. Reads only small files. Called before the data sources are opened, so
        it compares only the keys that are known by then; choose_checkpoint() compares all keys."""
        config, ours = self._config, self._identity
        for folder in (self._run_folder, self._folder):
            if (folder / commit.MANIFEST).exists():
                raise ConfigError(
                    f"{folder} is a checkpoint, not the folder of a run; to start from its weights, give it "
                    "as --checkpoint.initial_load_path, with another --job.dump_folder",
                    "job.dump_folder",
                )
        if ours is None or config.restart or config.load_step != -1:
            return  # the checkpoint to resume from is not known yet
        faults: list[Fault] = []
        candidate = resume.newest(self._folder, -1, faults)
        last = self._record.read() if candidate is None else None
        if faults or (last is not None and last.step is not None):
            return  # checkpoints are damaged or missing; choose_checkpoint() decides
        if candidate is not None:
            theirs, num_sequences = candidate.train["identity"], candidate.train["sequences"]
            folder = self._folder
        elif self._identity_file.exists():
            theirs, num_sequences = read_identity(self._identity_file), 0
            folder = self._run_folder
        else:
            return
        check_identity(with_source_labels(theirs, ours), ours, config.allow_changed, folder, num_sequences)

    def choose_checkpoint(self, faults: list[Fault]) -> Candidate | None:
        """The checkpoint to resume from; None for a new run. Does not use the checkpoints in `faults`, and
        adds further unusable ones. Raises ConfigError if the folder belongs to another run, CheckpointError
        if its run cannot be resumed."""
        if self._record.restart_is_due():
            self._check_allowed()
            return None
        load_step = self._config.load_step
        if self._record.has_rewound_before_load_step():
            logger.info(f"load_step = {load_step} was already carried out, and the run has rewound since")
            load_step = -1
        candidate = resume.choose(self._folder, load_step, faults)
        if candidate is not None:
            self._compare(candidate.train["identity"], self._folder, candidate.train["sequences"])
        if not self._config.enable and (candidate or faults):
            raise ConfigError(
                f"{self._folder} holds a run; choose another --job.dump_folder to train without checkpoints",
                "checkpoint.enable",
            )
        if candidate is None:
            if error := resume.unusable(self._folder, faults):
                raise error
            self._record.check_nothing_was_saved()
            if self._config.restart or not self._identity_file.exists():
                self._check_allowed()
            else:
                self._compare(read_identity(self._identity_file), self._run_folder)
                logger.info(f"the earlier run in {self._run_folder} saved no checkpoint; starting at step 1")
        return candidate

    def _check_allowed(self) -> None:
        """Raises ConfigError for a name in allow_changed that the identity of this new run does not have."""
        if self._identity is not None:
            for mistake in unknown_names(self._config.allow_changed, self._identity):
                raise ConfigError(mistake, "checkpoint.allow_changed")

    def _compare(self, theirs: dict[str, Any], folder: Path, num_sequences: int = 0) -> None:
        if self._identity is None:
            return
        allow = self._config.allow_changed
        for mistake in unknown_names(allow, self._identity, theirs):
            # Not an error: the checkpoint that the run saves after an allowed change does not have its old
            # keys any more, and the same command must be able to resume from it.
            logger.warning(f"checkpoint.allow_changed: {mistake}")
        for change in check_identity(theirs, self._identity, allow, folder, num_sequences):
            logger.warning(f"changed, as checkpoint.allow_changed allows: {change}")
