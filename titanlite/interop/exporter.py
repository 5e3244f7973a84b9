"""The exports of a run: Hugging Face directories made from its committed checkpoints.

An export is due for every committed checkpoint whose step asks for one and that has no export yet, whoever
saved it. So the next save makes up for an export that a killed or stopped run has left out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.section import EXPORTS, Checkpoint
from titanlite.interop.dcp import check_hashes, open_titanlite
from titanlite.interop.export import DTYPES, write_directory
from titanlite.interop.weights import ModelAndTokenizer
from titanlite.log import logger


class Exporter:
    """Exports checkpoints of the run in `run_folder`; it implements checkpointer.Exports.

    `last_step`: the step with which the run is over, always exported. `is_stopping`: polled on the saving
    thread; an export in flight is given up when it becomes true. A failed export is logged as an error, tried
    again by the next start of the run, and loses no checkpoint."""

    def __init__(
        self,
        config: Checkpoint,
        run_folder: Path,
        exchange: ModelAndTokenizer,
        last_step: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ):
        self._config, self._exchange, self._last_step = config, exchange, last_step
        self._checkpoints, self._exports = run_folder / config.folder, run_folder / EXPORTS
        self._is_stopping = is_stopping
        self._given_up = threading.Event()
        self._failed: dict[int, CheckpointError] = {}  # by step; not tried again by this process

    def make(self, committed: int | None) -> None:
        """Export every checkpoint that is due and has no export, and `committed`, the step that was just
        saved, even over an export of that step from before."""
        due = [
            (step, path)
            for step, path in commit.committed(self._checkpoints)
            if self._is_due(step) and (step == committed or not self._has_export(path))
        ]
        due = [(step, path) for step, path in due if step not in self._failed]
        if missed := [str(step) for step, _ in due if step != committed]:
            logger.info(f"exporting checkpoints that have no export yet: step {', '.join(missed)}")
        for i, (step, path) in enumerate(due):
            if self.gives_up():
                rest = ", ".join(str(step) for step, _ in due[i:])
                logger.warning(f"not exported yet: step {rest}; the next start of the run does it")
                return
            self._export(step, path, verify=step != committed)

    def check_last(self) -> None:
        """Raises the CheckpointError of the last step's export, if that has failed."""
        if error := self._failed.get(self._last_step):
            raise error

    def give_up(self) -> None:
        """Stop an export in flight; nothing half-written stays."""
        self._given_up.set()

    def gives_up(self) -> bool:
        """Whether exports are to stop."""
        return self._given_up.is_set() or self._is_stopping()

    def _is_due(self, step: int) -> bool:
        interval = self._config.export_hf_interval
        return step == self._last_step or (interval > 0 and step % interval == 0)

    def _has_export(self, checkpoint: Path) -> bool:
        return (self._exports / checkpoint.name).exists()

    def _export(self, step: int, checkpoint: Path, verify: bool) -> None:
        target = self._exports / checkpoint.name
        try:
            commit.clean(self._exports, "step-*")  # left by a run that was killed
            if target.exists():
                logger.info(f"{target} is an export of an earlier save of this step, and will be replaced")
            if verify:
                check_hashes(checkpoint)
            size = write_directory(
                open_titanlite(checkpoint, self._exchange.family),
                target,
                self._exchange,
                DTYPES[self._config.export_dtype],
                replace=True,
                gives_up=self.gives_up,
            )
            logger.info(f"exported {target} ({gib(size)})")
        except Exception as e:  # the checkpoint is there, whatever happened
            if self.gives_up():
                logger.warning(f"not exported yet: step {step}; the next start of the run does it")
                return
            self._failed[step] = CheckpointError(
                f"step {step} could not be exported: {e}; the run tries again when it is started again while "
                f"{checkpoint} exists, and so does `titanlite export {checkpoint} DIR`"
            )
            logger.error(str(self._failed[step]))
