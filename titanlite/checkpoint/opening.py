"""The checks of a run folder before anything is written: which checkpoint the run resumes from, and whether
the folder belongs to this run. `titanlite config --ranks` makes them without starting a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlite.checkpoint import commit, resume
from titanlite.checkpoint.commit_record import CommitRecord
from titanlite.checkpoint.resume import Candidate, Fault
from titanlite.checkpoint.run_identity import before_opening, check_allowed, check_identity, read_identity
from titanlite.checkpoint.section import Checkpoint
from titanlite.config.component import ConfigError
from titanlite.log import logger


class Opening:
    """The checks of one run folder. Made on one rank; they write nothing. `identity`: the run identity, or
    None if it is not known, and then it is not compared with the checkpoint's."""

    def __init__(self, config: Checkpoint, dump_folder: Path, identity: dict[str, Any] | None):
        self._config, self._run_folder, self._identity = config, dump_folder, identity
        self._folder, self._identity_file = dump_folder / config.folder, dump_folder / "run_identity.json"
        self._record = CommitRecord(dump_folder, config)

    def is_new_run(self) -> bool:
        """Whether the run starts at step 1: it has no checkpoint, or checkpoint.restart is to be carried
        out."""
        return self._record.restarts() or not commit.committed(self._folder)

    def check_known(self) -> None:
        """Raises ConfigError if the run in the folder has another run identity than this job, as far as it is
        known before the sources are opened. Reads small files only. candidate() compares all of it."""
        c = self._config
        if self._identity is None or c.restart or c.load_step != -1:
            return  # the checkpoint to resume from is not known yet
        faults: list[Fault] = []
        found = resume.newest(self._folder, -1, faults, c.verify)
        last = self._record.read() if found is None else None
        if faults or (last is not None and last.step is not None):
            return  # checkpoints are damaged or missing: candidate() decides
        if found is not None:
            theirs, where = found.train["identity"], self._folder
        elif self._identity_file.exists():
            theirs, where = read_identity(self._identity_file), self._run_folder
        else:
            return
        num_sequences = found.train["sequences"] if found else 0
        check_identity(
            before_opening(theirs, self._identity), self._identity, c.allow_changed, where, num_sequences
        )

    def candidate(self, faults: list[Fault]) -> Candidate | None:
        """The checkpoint to resume from; None for a new run. Adds unusable checkpoints to `faults`. Raises
        ConfigError or CheckpointError if the folder belongs to another run, or holds a run that cannot be
        resumed."""
        if self._record.restarts():
            self._check_allowed()
            return None
        found = resume.choose(self._folder, self._config.load_step, faults, self._config.verify)
        if found is not None:
            self._compare(found.train["identity"], self._folder, found.train["sequences"])
        if not self._config.enable and (found or faults):
            raise ConfigError(
                f"{self._folder} holds a run; choose another --job.dump_folder to train without checkpoints",
                "checkpoint.enable",
            )
        if found is None:
            if error := resume.unusable(self._folder, faults):
                raise error
            self._record.check_nothing_was_saved()
            if self._config.restart or not self._identity_file.exists():
                self._check_allowed()
            else:
                self._compare(read_identity(self._identity_file), self._run_folder)
                logger.info(f"the earlier run in {self._run_folder} saved no checkpoint; starting at step 1")
        return found

    def _check_allowed(self) -> None:
        if self._identity is not None:
            check_allowed(self._config.allow_changed, self._identity)

    def _compare(self, theirs: dict[str, Any], where: Path, num_sequences: int = 0) -> None:
        if self._identity is None:
            return
        allow = self._config.allow_changed
        for change in check_identity(theirs, self._identity, allow, where, num_sequences):
            logger.warning(f"changed, as checkpoint.allow_changed allows: {change}")
