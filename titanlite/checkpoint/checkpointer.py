"""Checkpoints of one run: when to save, what to resume from, what to keep.

Rank 0 decides and all ranks follow. The contents of a checkpoint are in state.py, its writing in saver.py,
the commit protocol in commit.py, the choice of the checkpoint to resume from in resume.py and opening.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from titanlite.checkpoint import commit, resume
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.commit_record import CommitRecord
from titanlite.checkpoint.lock import FolderLock
from titanlite.checkpoint.opening import Opening
from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.reader import MisfitError, load_tensors
from titanlite.checkpoint.resume import Candidate, Fault, newest_healthy
from titanlite.checkpoint.run_identity import check_optimizer
from titanlite.checkpoint.saver import Saver, Snapshot
from titanlite.checkpoint.section import EXPORTS, Checkpoint
from titanlite.checkpoint.state import (
    TRAIN,
    Tensors,
    TrainState,
    listed,
    non_finite,
    tensors_of,
)
from titanlite.config.component import ConfigError
from titanlite.errors import Diverged
from titanlite.log import logger
from titanlite.optim.base import make_state

EXPORT_POLL_S = 60.0  # far below the timeout of the ranks that wait for the rank that exports


class Exports(Protocol):
    """Makes the exports of a run from its checkpoints. Called on rank 0, on the saving thread."""

    def make(self, committed: int | None) -> None:
        """Export every checkpoint that is due and has no export, and `committed`, the step that was just
        saved. An export that fails does not raise; check_last() tells."""

    def check_last(self) -> None:
        """Raises CheckpointError if the export of the run's last step has failed."""

    def give_up(self) -> None:
        """Stop an export in flight, and begin no other. Called on any thread."""


class Checkpointer:
    """Checkpoints of one run. Making it locks the run folder, chooses and verifies what to resume from, and
    refuses a folder with the run of another identity (ConfigError). Collective, as are all its methods that
    save or load.

    `identity`: nested plain values that a resumed run must share. `job_toml`: stored in every checkpoint.
    `exports`: makes exports of committed checkpoints; None for a run without exports.
    """

    def __init__(
        self,
        config: Checkpoint,
        dump_folder: Path,
        identity: dict[str, Any],
        job_toml: str,
        exports: Exports | None = None,
    ):
        self.config, self.folder = config, dump_folder / config.folder
        self.identity, self.job_toml = identity, job_toml
        self._identity_file = dump_folder / "run_identity.json"
        self._record = CommitRecord(dump_folder, config)
        self._opening = Opening(config, dump_folder, identity)
        self.ranks = Ranks(self.folder)
        self._lock: FolderLock | None = None
        self._save_is_late = False  # a periodic save waits for the end of a streak of skipped steps
        self._faults: list[Fault] = []  # on rank 0: damaged checkpoints that are still under their names
        self._exports = exports
        self._exporting: Future[None] | None = None  # on rank 0: the last task with exports
        self.saver = Saver(config, self.ranks, self._committed)
        try:
            self.ranks.agree(lambda: self._take_lock(dump_folder))
            self._from = self._open()
        except BaseException:
            self._release()
            raise

    @property
    def resumed(self) -> dict[str, Any] | None:
        """The train.json that the run resumes from; None for a new run."""
        return self._from.train if self._from else None

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that the run resumes from; None for a new run."""
        return self._from.path if self._from else None

    def load(self, net: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
        """Restore all three in place from the chosen checkpoint, or from the checkpoint before it if the
        chosen one turns out to be damaged. Leaves a new run as it is."""
        if self._from is None:
            self.ranks.agree(self._restart)
            return
        if self.config.initial_load_path:
            logger.info(f"initial_load_path is not used: the run resumes from {self._from.path}")
        make_state(optimizer)
        tensors = tensors_of(net, optimizer)
        while reason := self._load(self._from, tensors):
            self._from = self.ranks.agree(functools.partial(self._fall_back, self._from, reason))
        self.ranks.agree(functools.partial(self._start, self._from.step))
        self.ranks.agree(functools.partial(self._leave_branch, self._from.step))
        state.restore(self._from.train)
        logger.info(f"resumed from {self._from.path}")

    def due(
        self, step: int, last_step: int, asked: bool = False, in_streak: Callable[[], bool] = lambda: False
    ) -> bool:
        """Whether to save the step that was just taken. A periodic save waits while steps are skipped
        (`in_streak`) and is made after the next step that is not skipped."""
        if not self.config.enable:
            return False
        if asked or step == last_step:
            return True
        self._save_is_late |= step % self.config.interval == 0
        return self._save_is_late and not in_streak()

    def warm_up(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the first save: check the room on the disk and allocate host memory. Call this when the
        optimizer has its state."""
        if self.config.enable:
            self.saver.warm_up(tensors_of(net, optimizer))

    def save(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, extra: dict[str, Any]
    ) -> None:
        """Save now, after the save in flight has ended. Raises Diverged, here or in wait_for_save(), instead
        of saving a state that is not finite.

        `extra`: plain values for train.json. `healthy` among them tells whether this checkpoint is one to go
        back to if training diverges.
        """
        self._save_is_late = False
        tensors = tensors_of(net, optimizer)
        train = {
            **state.as_json(),
            **extra,
            "finite": True,
            "branch": self._branch(),
            "identity": self.identity,
        }
        snapshot = Snapshot(
            state.step,
            tensors,
            {TRAIN: json.dumps(train, indent=1) + "\n", "job.toml": self.job_toml},
            {"resumed_from": self._from.step if self._from else None},
        )
        not_finite = non_finite(tensors)
        self.saver.save(snapshot, lambda: self._refusal(snapshot.step, not_finite))

    def _refusal(self, step: int, not_finite: list[str]) -> Diverged | None:
        """Collective: the error for a state of which any rank has tensors that are not finite."""
        if names := sorted(set().union(*self.ranks.gather(not_finite))):
            return Diverged(
                f"training has diverged: after step {step} {listed(names)} are not finite; this state is not "
                f"saved; {self._way_back()}"
            )
        return None

    def way_back(self) -> str:
        """What to do after training has diverged: which checkpoint to go back to, and how. Waits for a save
        in flight, which may be that checkpoint."""
        self.saver.wait()
        return self._way_back()

    def _way_back(self) -> str:
        healthy = newest_healthy(self.folder)
        if healthy is None:
            return (
                "no checkpoint was saved before; start again in another --job.dump_folder, for example with "
                "a lower --optimizer.lr"
            )
        # A start with the same load_step again would resume from what was saved after going back.
        later = [path.name for step, path in commit.committed(self.folder) if step > healthy]
        first = f"move {', '.join(later)} out of {self.folder}, then "
        return (
            f"{first if later and healthy == self._branch() else ''}go back to step {healthy}, the newest "
            "checkpoint saved before, and change something, for example: "
            f"--checkpoint.load_step={healthy} --optimizer.lr=<a lower one>"
        )

    def has(self, step: int) -> bool:
        """Whether the checkpoint of `step` is committed, after waiting for a save in flight."""
        self.wait_for_save()
        return any(step == saved for saved, _ in commit.committed(self.folder))

    def wait_until_staged(self) -> None:
        """Before the weights change: make the device wait until a save in flight has its copy."""
        self.saver.wait_until_staged()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in flight has failed; wait_for_save() then, on all ranks."""
        return self.saver.failed

    def wait_for_save(self) -> None:
        """Wait for the save in flight, if there is one. Raises CheckpointError for a failed save if
        checkpoint.on_save_error says so, else logs it."""
        self.saver.wait_for_save()

    def close(self, is_over: bool = True) -> None:
        """Wait for the last save and free the run folder. If the run `is_over`, also wait for its exports; a
        run that was stopped gives them up. Raises CheckpointError if the last save or the last export
        failed."""
        try:
            self.saver.finish()
            if is_over and self._exports is not None:
                self._finish_exports(self._exports)
        finally:
            self._release()

    def close_after_error(self, error: BaseException | None = None) -> None:
        """Let a save in flight complete if it still can, and free the run folder. `error`, which has ended
        the training and is shown in full afterwards, is named in the log while the save is waited for."""
        reason = "training has ended"
        if error is not None:
            reason += f": {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if self._exports is not None:
            self._exports.give_up()
        try:
            self.saver.finish_after_error(reason)
        finally:
            self._release()

    def _committed(self, step: int) -> None:
        """On rank 0, on the saving thread: a checkpoint is complete. Old ones are deleted after the exports,
        which may still have to read them."""
        self._record.committed(step)
        exports = self._exports
        if exports is None:
            self._retain()
        else:
            self._exporting = self.saver.submit(lambda: self._export_and_retain(exports, step))

    def _export_and_retain(self, exports: Exports, step: int | None) -> None:
        exports.make(step)
        self._retain()

    def _finish_exports(self, exports: Exports) -> None:
        """Collective: make the exports that are still missing. Rank 0 exports, and the others ask it from
        time to time, since an export may take longer than the timeout of their process group."""
        if self.ranks.rank == 0:
            self._exporting = self.saver.submit(lambda: self._export_and_retain(exports, None))
        while not self.ranks.agree(self._wait_for_exports):
            pass
        self.ranks.agree(lambda: self._check_exports(exports))

    def _check_exports(self, exports: Exports) -> None:
        """Raise the error of the last task with exports, or of the export of the run's last step."""
        if self._exporting is not None:
            self._exporting.result()
        exports.check_last()

    def _wait_for_exports(self) -> bool:
        """Whether no export is in flight, after waiting for a while."""
        return self._exporting is None or not wait([self._exporting], EXPORT_POLL_S).not_done

    def _retain(self) -> None:
        config, keep = self.config, {self._from.step} if self._from else set()
        keep |= {healthy} if (healthy := newest_healthy(self.folder)) is not None else set()
        try:
            commit.retain(self.folder, config.keep_latest_k, config.keep_every_n_steps, keep)
        except OSError as e:  # the new checkpoint is there all the same
            logger.error(f"old checkpoints could not be deleted: {e}")

    def _open(self) -> Candidate | None:
        candidate = self.ranks.agree(lambda: self._opening.candidate(self._faults))
        if candidate is not None:
            resume.check_shared(candidate, self.ranks)
        if self.config.enable:
            self.ranks.agree(
                lambda: commit.clean(self.folder)
            )  # first, since files left by a kill may fill the disk
            resume.probe(self.folder, self.ranks)
        self.ranks.agree(self._write_owner)
        if candidate is None:
            self.ranks.agree(lambda: self._start(None))
        return candidate

    def _load(self, candidate: Candidate, tensors: Tensors) -> str | None:
        """Load the checkpoint and verify it at the same time. Returns what is wrong with it, or None."""
        full = self.config.verify == "full"
        logger.info(f"loading {'and verifying ' if full else ''}{candidate.path}")
        verification = resume.Verification(candidate, self.ranks) if full else None
        error = None
        try:
            load_tensors(candidate.path, tensors, self.ranks)
        except CheckpointError as e:  # it is damaged, or of another model: the hashes decide
            error = e
            verification = verification or resume.Verification(candidate, self.ranks)
        reason = verification.result() if verification else None
        if error is not None and reason is None:
            if isinstance(error, MisfitError):
                check_optimizer(candidate.path, self.job_toml)
            raise error
        if reason is None and (names := sorted(set().union(*self.ranks.gather(non_finite(tensors))))):
            reason = f"{listed(names)} are not finite"
        return reason

    def _fall_back(self, damaged: Candidate, reason: str) -> Candidate:
        """The usable checkpoint before a damaged one. Called on rank 0. Raises CheckpointError if none is
        left."""
        self._faults.append((damaged.path, reason))
        found = self._opening.candidate(self._faults)
        assert found is not None, "candidate() raises if there is none left"
        return found

    def _take_lock(self, dump_folder: Path) -> None:
        try:
            self._lock = FolderLock(dump_folder)
        except OSError as e:
            raise ConfigError(f"{dump_folder} cannot be written to: {e}", "job.dump_folder") from None

    def _write_owner(self) -> None:
        assert self._lock is not None
        self._lock.write_owner()

    def _start(self, step: int | None) -> None:
        """Called on rank 0 when a checkpoint is loaded and verified, or the run is new. Damaged checkpoints
        are renamed only now, so that a folder without a usable checkpoint stays as it is."""
        resume.quarantine_all(self._faults)
        if not self._record.restarts():  # otherwise _restart() records it when the old run is archived
            self._record.start(step)

    def _leave_branch(self, step: int) -> None:
        """Archive what was saved after load_step, if the run has gone back to it."""
        if step == self.config.load_step:
            self._archive(after=step)

    def _restart(self) -> None:
        """Archive the earlier run, if checkpoint.restart is to be carried out."""
        if self._record.restarts():
            self._archive(after=0)
            self._record.quarantine_if_damaged()
            self._record.start(None)
            logger.info("checkpoint.restart = true: a new run begins at step 1")

    def _archive(self, after: int) -> None:
        for folder in (self._identity_file.parent / EXPORTS, self.folder):
            for path in commit.archive_after(folder, after):
                logger.warning(f"archived as {path}: it was saved after step {after}")

    def _branch(self) -> int | None:
        """The step that the run has gone back to by load_step, or None."""
        return self.config.load_step if self.config.load_step != -1 else None

    def _release(self) -> None:
        self.saver.close()
        if self._exports is not None:
            self._exports.give_up()
            self._wait_for_exports()
        if self._lock is not None:
            self._lock.close()
