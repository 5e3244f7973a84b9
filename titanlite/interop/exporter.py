"""A run's own exports, made from its committed checkpoints beside the training.

An export is due for every committed checkpoint that should have one and has none, whoever saved it: what a
killed or stopped run has not exported, its next start does. A checkpoint is kept until its export is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.section import Checkpoint
from titanlite.interop.dcp import check_whole, open_titanlite
from titanlite.interop.export import DTYPES, write_directory
from titanlite.interop.weights import Exchange
from titanlite.log import logger

WAIT_S = 60.0  # far below the timeout of the ranks that wait for the one that exports
MANY = 3  # exports that wait: they take longer than the steps between them


class Exporter:
    """Exports the checkpoints in `ranks.folder` as `exports`/step-N, on rank 0, one after the other. A failed
    export is an error in the log, and its checkpoint is not kept for it."""

    def __init__(self, config: Checkpoint, ranks: Ranks, exports: Path, exchange: Exchange):
        self._config, self._ranks, self._exchange = config, ranks, exchange
        self._folder = exports
        self._thread = ThreadPoolExecutor(1, "export")
        self._begun: dict[int, Future[None]] = {}
        self._saved: set[int] = set()  # by this process
        self._last = -1  # the step with which the run is over, once it is
        self._given_up = threading.Event()

    @property
    def steps(self) -> list[int]:
        """The steps whose checkpoints are still to be read."""
        return [step for step, export in self._begun.items() if not export.done()]

    def committed(self, step: int, checkpoint: Path) -> None:
        """On rank 0: export a checkpoint that has just been committed, if it is due."""
        self._saved.add(step)
        if self._is_periodic(step):
            self._begin(step, checkpoint)
            if len(self.steps) == MANY:
                logger.warning(
                    f"{MANY} exports wait: they take longer than export_hf_interval; checkpoints are kept "
                    "until they are exported"
                )

    def catch_up(self) -> None:
        """Collective: begin the exports that are due and were not made by an earlier start."""
        self._ranks.agree(lambda: self._begin_due(is_over=False))

    def finish(self, retain: Callable[[], None]) -> None:
        """Collective: export what is due, the last step too, and wait for it; `retain` deletes checkpoints
        that were kept until now. Raises the CheckpointError of the last step's export; that of an earlier
        step's is in the log, and the run's next start tries it again."""
        self._ranks.agree(lambda: self._begin_due(is_over=True))
        while not self._ranks.agree(lambda: self._is_done(retain)):
            pass

    def close(self) -> None:
        """Give up what is not done yet; nothing half-written stays."""
        self._given_up.set()
        if waiting := [str(step) for step in self.steps]:
            logger.warning(f"not exported yet: step {', '.join(waiting)}; the run's next start does it")
        self._thread.shutdown(cancel_futures=True)

    def _begin_due(self, is_over: bool) -> None:
        there = commit.committed(self._ranks.folder)
        self._last = there[-1][0] if there and is_over else -1
        due = {
            step: path
            for step, path in there
            if (self._is_periodic(step) or step == self._last)
            and step not in self._begun
            and (step in self._saved or not (self._folder / path.name).exists())
        }
        if missed := [str(step) for step in due if step not in self._saved]:
            logger.info(f"exporting what an earlier start has not: step {', '.join(missed)}")
        for step, path in due.items():
            self._begin(step, path)

    def _is_done(self, retain: Callable[[], None]) -> bool:
        """Whether all exports are done, after waiting a while."""
        waiting = wait(self._begun.values(), WAIT_S).not_done
        retain()
        if not waiting and (last := self._begun.get(self._last)):
            last.result()
        return not waiting

    def _is_periodic(self, step: int) -> bool:
        every = self._config.export_hf_interval
        return every > 0 and step % every == 0

    def _begin(self, step: int, checkpoint: Path) -> None:
        self._begun[step] = self._thread.submit(self._export, step, checkpoint)

    def _export(self, step: int, checkpoint: Path) -> None:
        target = self._folder / checkpoint.name
        try:
            commit.clean(self._folder, "step-*")  # what a killed run left
            if target.exists():
                logger.info(f"{target} is of the step as it was saved before, and will be replaced")
            if step not in self._saved:
                check_whole(checkpoint)
            weights = open_titanlite(checkpoint, self._exchange.family)
            size = write_directory(
                weights,
                target,
                self._exchange,
                DTYPES[self._config.export_dtype],
                replace=True,
                given_up=self._given_up,
            )
            logger.info(f"exported {target} ({gib(size)})")
        except Exception as e:  # the checkpoint is there, whatever happened
            if self._given_up.is_set():  # close() has said so
                return
            problem = CheckpointError(
                f"step {step} could not be exported: {e}; the run's next start tries again while "
                f"{checkpoint} is there, and so does `titanlite export {checkpoint} DIR`"
            )
            logger.error(str(problem))
            raise problem from e
