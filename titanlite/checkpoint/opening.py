"""What a run finds out about its folder before it writes anything: which checkpoint it goes on from, and
whether it may. `titanlite config --ranks` asks the same without starting a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlite.checkpoint import commit, resume
from titanlite.checkpoint.commit_record import CommitRecord
from titanlite.checkpoint.resume import Candidate, Fault
from titanlite.checkpoint.run_identity import before_opening, check_allowed, check_recipe, read_recipe
from titanlite.checkpoint.section import Checkpoint
from titanlite.config.component import ConfigError
from titanlite.log import logger


class Opening:
    """The checks of one run folder. On one rank; they write nothing. `recipe`: None where it is not known,
    and then it is not compared with the checkpoint's."""

    def __init__(self, config: Checkpoint, dump_folder: Path, recipe: dict[str, Any] | None):
        self._config, self._run_folder, self._recipe = config, dump_folder, recipe
        self._folder, self._recipe_file = dump_folder / config.folder, dump_folder / "recipe.json"
        self._record = CommitRecord(dump_folder, config)

    def is_new_run(self) -> bool:
        """Whether the run starts at step 1: it has no checkpoint, or checkpoint.restart is to be carried
        out."""
        return self._record.restarts() or not commit.committed(self._folder)

    def check_known(self) -> None:
        """Raises ConfigError if the folder's run has another recipe than this job, whose sources are not
        opened yet. Reads small files only. `candidate` compares all of it."""
        c = self._config
        if self._recipe is None or c.restart or c.load_step != -1:
            return  # which run this one goes on from is not known yet
        faults: list[Fault] = []
        found = resume.newest(self._folder, -1, faults, c.verify)
        last = self._record.read() if found is None else None
        if faults or (last is not None and last.step is not None):
            return  # checkpoints are damaged or gone, which `candidate` judges
        if found is not None:
            theirs, where = found.train["recipe"], self._folder
        elif self._recipe_file.exists():
            theirs, where = read_recipe(self._recipe_file), self._run_folder
        else:
            return
        num_sequences = found.train["sequences"] if found else 0
        check_recipe(
            before_opening(theirs, self._recipe), self._recipe, c.allow_changed, where, num_sequences
        )

    def candidate(self, faults: list[Fault]) -> Candidate | None:
        """The checkpoint to go on from; None for a new run. Adds to `faults`, the checkpoints that cannot be
        used. Raises ConfigError or CheckpointError if the folder is another run's, or holds a run that cannot
        go on."""
        if self._record.restarts():
            self._check_allowed()
            return None
        found = resume.choose(self._folder, self._config.load_step, faults, self._config.verify)
        if found is not None:
            self._compare(found.train["recipe"], self._folder, found.train["sequences"])
        if not self._config.enable and (found or faults):
            raise ConfigError(
                f"{self._folder} holds a run; choose another --job.dump_folder to go without",
                "checkpoint.enable",
            )
        if found is None:
            if error := resume.unusable(self._folder, faults):
                raise error
            self._record.check_nothing_was_saved()
            if self._config.restart or not self._recipe_file.exists():
                self._check_allowed()
            else:
                self._compare(read_recipe(self._recipe_file), self._run_folder)
                logger.info(
                    f"the run before in {self._run_folder} saved no checkpoint: starting again at step 1"
                )
        return found

    def _check_allowed(self) -> None:
        if self._recipe is not None:
            check_allowed(self._config.allow_changed, self._recipe)

    def _compare(self, theirs: dict[str, Any], where: Path, num_sequences: int = 0) -> None:
        if self._recipe is None:
            return
        allow = self._config.allow_changed
        for said in check_recipe(theirs, self._recipe, allow, where, num_sequences):
            logger.warning(f"changed, as checkpoint.allow_changed says: {said}")
