"""The exports of a run: Hugging Face directories made from its committed checkpoints.

An export is due for every committed checkpoint at a step to be exported that has no export yet. So the next
save also exports the checkpoints that an earlier, killed or stopped process of the run did not export."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.section import EXPORTS, Checkpoint
from titanlite.interop.dcp import check_hashes
from titanlite.interop.export import DTYPES, ExportFormat, write_directory
from titanlite.interop.formats import open_checkpoint
from titanlite.interop.weights import ModelAndTokenizer
from titanlite.log import logger


class Exporter:
    """Exports checkpoints of the run in `run_folder`. Implements checkpointer.Exports.

    `last_step`: the run's final step, always exported. `is_stopping`: polled on the saving thread; a running
    export stops when it returns True. A failed export is logged as an error, tried again by the next start of
    the run, and loses no checkpoint."""

    def __init__(
        self,
        config: Checkpoint,
        run_folder: Path,
        model: ModelAndTokenizer,
        last_step: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ):
        self._config, self._model, self._last_step = config, model, last_step
        self._checkpoints, self._exports = run_folder / config.folder, run_folder / EXPORTS
        self._is_stopping = is_stopping
        self._given_up = threading.Event()
        self._failed: dict[int, CheckpointError] = {}  # by step; not tried again by this process

    def make(self, committed: int | None) -> None:
        """Export every checkpoint that is due and has no export, and `committed`, the step that was just
        saved, whose older export is replaced."""
        due = [
            (step, path)
            for step, path in commit.list_committed(self._checkpoints)
            if self._is_due(step) and step not in self._failed
            if step == committed or not (self._exports / path.name).exists()
        ]
        if missed := [str(step) for step, _ in due if step != committed]:
            logger.info(f"exporting checkpoints that have no export yet: step {', '.join(missed)}")
        for i, (step, path) in enumerate(due):
            if self._should_stop():
                rest = ", ".join(str(step) for step, _ in due[i:])
                self._postpone(rest)
                return
            self._export(step, path, verify=step != committed)

    def check_last(self) -> None:
        """Raise the CheckpointError of the last step's export, if that has failed."""
        if error := self._failed.get(self._last_step):
            raise error

    def give_up(self) -> None:
        """Stop a running export and delete its incomplete files."""
        self._given_up.set()

    def _should_stop(self) -> bool:
        return self._given_up.is_set() or self._is_stopping()

    def _postpone(self, steps: str) -> None:
        logger.warning(f"not exported yet: step {steps}; the next start exports it if its checkpoint is left")

    def _is_due(self, step: int) -> bool:
        interval = self._config.export_hf_interval
        return step == self._last_step or (interval > 0 and step % interval == 0)

    def _export(self, step: int, checkpoint: Path, verify: bool) -> None:
        target = self._exports / checkpoint.name
        try:
            commit.clean(self._exports, "step-*")  # incomplete exports of a killed process
            if target.exists():
                logger.info(f"{target} is an export of an earlier save of this step, and will be replaced")
            if verify:
                check_hashes(checkpoint)
            size = write_directory(
                open_checkpoint(checkpoint, self._model.family),
                target,
                self._model,
                ExportFormat(DTYPES[self._config.export_dtype]),
                replace=True,
                should_stop=self._should_stop,
            )
            logger.info(f"exported {target} ({gib(size)})")
        except Exception as e:  # a failed export must not end the run: the checkpoint is safe
            if self._should_stop():
                self._postpone(str(step))
                return
            self._failed[step] = CheckpointError(
                f"step {step} could not be exported: {e}; the run tries again when it is started again while "
                f"{checkpoint} exists, and so does `titanlite export {checkpoint} DIR`"
            )
            logger.error(str(self._failed[step]))
