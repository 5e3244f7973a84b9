"""Checkpoints of one run: when to save, which checkpoint to resume from, which ones to keep.

Rank 0 decides and all ranks follow. state.py has the contents of a checkpoint, saver.py its writing,
commit.py the commit protocol, start.py and resume.py the choice of the checkpoint to resume from."""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.checkpoint import commit, last_commit, resume
from titanlite.checkpoint.bits import bits_after, changes_since
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.last_commit import LastCommit
from titanlite.checkpoint.lock import FolderLock
from titanlite.checkpoint.memory import CopyFiles, Lineage, NodeMemory
from titanlite.checkpoint.node_copies import NodeCopies
from titanlite.checkpoint.reader import MisfitError, load_tensors
from titanlite.checkpoint.resume import Candidate, Fault
from titanlite.checkpoint.run_identity import OPTIMIZER, check_optimizer
from titanlite.checkpoint.save_plan import SavePlans
from titanlite.checkpoint.saver import Saver, Snapshot
from titanlite.checkpoint.section import Checkpoint
from titanlite.checkpoint.start import New, Restart, Resume, Start, check_run_identity, decide
from titanlite.checkpoint.state import (
    AVERAGE,
    TRAIN,
    Tensors,
    TrainState,
    listed,
    non_finite,
    start_average,
)
from titanlite.config.component import ConfigError
from titanlite.errors import Diverged
from titanlite.log import logger
from titanlite.optim.base import make_state
from titanlite.ranks import Ranks

# With memory_interval = -1: seconds until the next copy to memory per second that a copy took.
PAUSE_PER_COPY = 3
RETRY_S = 1.0  # seconds until the next try if a state was not copied


def steps_for_rewind(healthy: Sequence[int], last_step: int) -> set[int]:
    """The checkpoints to keep for a rewind, from the `healthy` steps in ascending order: the newest of step
    `last_step` or earlier, and the one after it, which takes its place when that one is old enough."""
    old = [step for step in healthy if step <= last_step]
    return {*old[-1:], *healthy[len(old) : len(old) + 1]}


def _new_history() -> str:
    return uuid.uuid4().hex


class RunRecord(NamedTuple):
    """The facts of a run that each of its checkpoints has. `identity`: the run identity, nested plain values
    that a resumed run must share. `job_toml`: the content of job.toml. `bits`: the conditions under which the
    run has the same bits on any number of ranks; None: it has not."""

    identity: dict[str, Any]
    job_toml: str
    bits: dict[str, Any] | None = None


class KeptForFaults(NamedTuple):
    """Which checkpoints are kept because the run may go back to them. `rewind_distance`: one healthy
    checkpoint that is at least so many steps older than the newest, for a spike; None for a run that never
    rewinds. `fault_check_freq`: the newest healthy one that is not newer than the last multiple of it, for a
    silent fault; 0: none."""

    rewind_distance: int | None = None
    fault_check_freq: int = 0


class Checkpointer:
    """Checkpoints of one run, which starts as `start` says. The constructor locks the run folder for writing;
    it raises ConfigError if the folder cannot be used. The constructor and all methods that save or load are
    collective.

    `lock`: of the run folder; used on rank 0. `keep`: which checkpoints the run may go back to. `memory`: for
    copies of the state between two checkpoints; None: no copies."""

    def __init__(
        self,
        config: Checkpoint,
        record: RunRecord,
        start: Start,
        ranks: Ranks,
        lock: FolderLock,
        keep: KeptForFaults | None = None,
        memory: NodeMemory | None = None,
    ):
        self.config, self.folder = config, lock.folder / config.folder
        self.record, self._keep = record, keep or KeptForFaults()
        self._run_folder, self._start, self.ranks, self._lock = lock.folder, start, ranks, lock
        self.candidate = start.candidate if isinstance(start, Resume) else None
        """The checkpoint that the run resumed from; None for a new run. A rewind sets it."""
        self._newly_committed = deque[int]()
        self._saved_step = 0  # the newest step that was loaded or passed to save()
        self._copied_step = 0  # the newest step that was loaded, saved or copied to memory
        self._next_copy_at = 0.0  # for memory_interval = -1: by time.perf_counter()
        self._memory, self._history = memory, start.history or _new_history()
        self._health: dict[int, bool] = {}  # whether the checkpoint of a step is healthy, as far as known
        # on rank 0: damaged checkpoints that are not renamed yet
        self._faults = list(start.faults) if isinstance(start, Resume) else list[Fault]()
        self._newest_commit: int | None = None  # on rank 0: LastCommit.step
        self.saver = Saver(
            config, ranks, lock.renew, self._after_commit, hashes_state=record.bits is not None
        )
        try:
            self._open()
        except BaseException:
            self._release()
            raise

    def _open(self) -> None:
        """Lock and prepare the folder. Collective."""
        self.ranks.from_rank_zero(self._take_lock)
        if self.candidate is not None:
            if not self.candidate.in_memory:
                resume.check_shared(self.candidate, self.ranks)
            self._health[self.candidate.step] = self.candidate.train["healthy"]
        if self.config.enable:
            # Clean first, because files left by a killed process may fill the disk.
            self.ranks.from_rank_zero(lambda: commit.clean(self.folder))
            resume.check_storage(self.folder, self.ranks)
        self.ranks.from_rank_zero(self._lock.write_owner)
        if isinstance(self._start, New):
            self.ranks.from_rank_zero(lambda: self._record_start(None))

    def _take_lock(self) -> None:
        """Take the lock, if decide() could not because there was no folder. Raises ConfigError if a run has
        saved there since."""
        if self._lock.take() and commit.list_committed(self.folder):
            raise ConfigError(f"{self._run_folder}: another start of this run came first; start it again")

    def load(self, state: TrainState) -> None:
        """Restore `state` in place from the chosen checkpoint. If that turns out to be damaged, use the
        usable checkpoint before it. If the checkpoint has no average, the average is set to the weights.

        A new run loads nothing; with checkpoint.restart, the earlier run in the folder is archived here."""
        if isinstance(self._start, Restart):
            self.ranks.from_rank_zero(self._restart)
        candidate = self.candidate
        if candidate is None:
            self._delete_copies()
            return
        if self.config.initial_load_path and not state.base:
            logger.info(f"initial_load_path is not used: the run resumes from {candidate.path}")
        make_state(state.optimizer)
        tensors = state.tensors()
        while reason := self._load(candidate, tensors):
            candidate = self.ranks.from_rank_zero(functools.partial(self._fall_back, candidate, reason))
        self.candidate = candidate
        if candidate.step == self.config.load_step:
            self.ranks.from_rank_zero(lambda: self._go_back_to(candidate.step))
        else:
            self.ranks.from_rank_zero(lambda: self._record_start(self._step_on_disk(candidate)))
        self._delete_copies(but=candidate if candidate.in_memory else None)
        state.restore(candidate.train)
        self._saved_step = self._copied_step = candidate.step
        logger.info(f"resumed from {candidate.path}")
        self._log_other_bits(candidate)

    def rewind(self, last_step: int, state: TrainState) -> bool:
        """Restore `state` in place from the newest healthy checkpoint of step `last_step` or earlier, and
        archive all later checkpoints. Returns whether there is such a checkpoint; if not, nothing changes.

        New skipped sequences are saved with the next checkpoint only: a run that is killed before meets the
        same steps again and rewinds again."""
        self.check_save()
        candidate = self.ranks.from_rank_zero(lambda: self._newest_healthy(last_step))
        if candidate is None:
            return False
        tensors = state.tensors()
        while reason := self._load(candidate, tensors):
            candidate = self.ranks.from_rank_zero(
                functools.partial(self._healthy_before, candidate, reason, last_step)
            )
        step = candidate.step
        self.ranks.from_rank_zero(lambda: self._go_back_to(step))
        self._delete_copies()
        self.candidate, self._saved_step, self._copied_step = candidate, step, step
        state.restore(candidate.train)
        self._log_other_bits(candidate)
        return True

    def _newest_healthy(self, last_step: int) -> Candidate | None:
        """The newest healthy checkpoint of step `last_step` or earlier that is not damaged. Called on rank
        0."""
        for step in reversed(self._healthy_steps()):
            if step <= last_step and (candidate := resume.newest(self.folder, step, self._faults)):
                return candidate
        return None

    def _healthy_before(self, damaged: Candidate, reason: str, last_step: int) -> Candidate:
        """The newest healthy checkpoint before a damaged one. Called on rank 0. Raises CheckpointError if
        none is left: the state in memory has been overwritten."""
        self._faults.append((damaged.path, reason))
        candidate = self._newest_healthy(last_step)
        if candidate is None:
            raise CheckpointError(f"the run cannot rewind: {damaged.path}: {reason}")
        return candidate

    def due(
        self, step: int, last_step: int, asked: bool = False, in_streak: Callable[[], bool] = lambda: False
    ) -> bool:
        """Whether to save the step that was just taken. `asked`: whether a signal asked for a save. A
        periodic save waits while steps are skipped (`in_streak`), until a step is not skipped."""
        if not self.config.enable:
            return False
        if asked or step == last_step:
            return True
        interval = self.config.interval
        return step // interval > self._saved_step // interval and not in_streak()

    @property
    def busy(self) -> bool:
        """Whether this rank still works for a save or a copy to memory or, with memory_interval = -1, the
        newest copy was made too recently."""
        is_too_early = self.config.memory_interval == -1 and time.perf_counter() < self._next_copy_at
        return self.saver.busy or is_too_early

    def copy_due(self, step: int, busy: bool) -> bool:
        """Whether to copy the step that was just taken to memory. `busy`: whether any rank is busy; then the
        copy is made after a later step. Training never waits for a copy."""
        interval = abs(self.config.memory_interval)  # -1: after the first step in which no rank is busy
        if not interval or busy or self._memory is None or not self._memory.is_on:
            return False
        return step // interval > self._copied_step // interval

    def warm_up(self, state: TrainState) -> None:
        """Prepare the first save: check the free space of the disk and allocate host memory. Call this when
        the optimizer has its state."""
        if self.config.enable:
            self.saver.warm_up(state.tensors())
        if self._memory is not None:
            self._memory.check_room(state.tensors())

    def copy(self, state: TrainState) -> None:
        """Copy the state to the memory of the nodes, in the background, unless training is not healthy."""
        self._copied_step = state.step
        began = time.perf_counter()
        self._next_copy_at = began + RETRY_S
        snapshot, is_healthy = self._snapshot(state)
        if not is_healthy:
            return
        memory, history, step = self._memory, self._history, self._newest_commit
        assert memory is not None

        def write(snapshot: Snapshot, plans: SavePlans) -> None:
            memory.write(snapshot, Lineage(history, step), plans)
            ended = time.perf_counter()
            self._next_copy_at = ended + PAUSE_PER_COPY * (ended - began)

        self.saver.copy(snapshot, lambda tensors: self.ranks.union(non_finite(tensors)), write)

    def save(self, state: TrainState) -> None:
        """Save now, after the save in flight has ended. If the state is not finite, nothing is saved, and
        Diverged is raised here, in check_save() or in close()."""
        self._saved_step = self._copied_step = state.step
        snapshot, self._health[state.step] = self._snapshot(state)
        not_finite = non_finite(snapshot.tensors)
        self.saver.save(snapshot, lambda: self._refusal(snapshot.step, not_finite))

    def _snapshot(self, state: TrainState) -> tuple[Snapshot, bool]:
        """The contents of a checkpoint of the state, and whether the state is healthy."""
        tensors = state.tensors()
        branch = self.config.load_step if self.config.load_step != -1 else None
        train = state.as_json() | {"finite": True, "branch": branch, "identity": self.record.identity}
        texts = {TRAIN: json.dumps(train, indent=1) + "\n", "job.toml": self.record.job_toml}
        return Snapshot(state.step, tensors, texts, self._about()), train["healthy"]

    def _about(self) -> dict[str, Any]:
        """The values for the manifest. A fallback or a rewind may have changed the candidate since the
        start."""
        about: dict[str, Any] = {"resumed_from": self.candidate.step if self.candidate else None}
        if self.record.bits is not None:
            about["bits"] = bits_after(self.candidate, self.record.bits)
        return about

    def _log_other_bits(self, resumed: Candidate) -> None:
        """Log if the run continues under other conditions of bits than those of its checkpoint."""
        changes = changes_since(resumed, self.record.bits) if self.record.bits is not None else []
        if changes:
            logger.info(
                f"step {resumed.step} continues under other conditions ({'; '.join(changes)}): from here on "
                "the bits differ from those of a run that was never resumed"
            )

    def _refusal(self, step: int, not_finite: list[str]) -> Diverged | None:
        """The error for a state with tensors that are not finite, or None. `not_finite`: the names of such
        tensors on this rank. Collective."""
        if names := self.ranks.union(not_finite):
            return Diverged(
                f"training has diverged: after step {step} {listed(names)} are not finite; this state is not "
                "saved"
            )
        return None

    def go_back(self, last_step: int | None, remedy: str) -> str:
        """After training has gone wrong, choose the healthy checkpoint from which the next start resumes, the
        newest of step `last_step` or earlier (None: of any step), and archive all later checkpoints. Returns
        advice to the user, which names that checkpoint and ends with `remedy`. Waits for a save in flight,
        which may write it. Collective."""
        self.saver.wait()
        self._delete_copies()
        return self.ranks.from_rank_zero(lambda: self._go_back(last_step, remedy))

    def _go_back(self, last_step: int | None, remedy: str) -> str:
        try:
            steps = [s for s in self._healthy_steps() if last_step is None or s <= last_step]
            healthy = max(steps, default=None)
            self._go_back_to(healthy)
        except (OSError, ConfigError) as e:  # must not hide that training has gone wrong
            return (
                f"the later checkpoints could not be archived: {e}; move them out of {self.folder}, or the "
                "next start may continue from them"
            )
        if healthy is None:
            way = "no healthy checkpoint was saved before, and the next start begins at step 1"
        else:
            way = f"the next start goes back to step {healthy}, the newest healthy checkpoint saved before"
        return f"{way}; {remedy}"

    def has(self, step: int) -> bool:
        """Whether the checkpoint of `step` is committed. Waits for a save in flight first."""
        self.check_save()
        return any(step == saved for saved, _ in commit.list_committed(self.folder))

    def newly_committed(self) -> list[int]:
        """The steps whose checkpoints were committed since the last call; only rank 0 knows them."""
        return [self._newly_committed.popleft() for _ in range(len(self._newly_committed))]

    def wait_until_staged(self) -> None:
        """Make the device wait until a save in flight has copied the state. Call this before the weights
        change."""
        self.saver.wait_until_staged()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in flight has failed. Then all ranks have to call
        check_save(), which handles the failure."""
        return self.saver.failed

    def check_save(self) -> None:
        """Wait for the save in flight, if there is one, and check its outcome: a failed save is logged; the
        third in a row raises CheckpointError."""
        self.saver.check_save()

    def close(self) -> None:
        """Wait for the last save and unlock the run folder. Raises CheckpointError if the last save failed;
        then the run folder stays locked until close_after_error()."""
        self.saver.finish()
        if self._memory is not None:
            self._memory.delete()
        self._release()

    def close_after_error(self, error: BaseException | None = None) -> None:
        """Let a save in flight complete if it still can, and unlock the run folder. `error`: the exception
        that ended the training, for the log."""
        reason = "training has ended"
        if error is not None:
            reason += f": {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        try:
            self.saver.finish_after_error(reason)
        finally:
            self._release()

    def _after_commit(self, step: int) -> None:
        """Handle a new checkpoint. Runs on rank 0, on the saving thread."""
        try:
            self._write_record(step)
        except OSError as e:  # the checkpoint exists, and the next commit or start writes the file
            logger.warning(f"{last_commit.NAME} could not be written: {e}")
        self._newly_committed.append(step)
        self._retain(step)

    def _retain(self, newest_step: int) -> None:
        if not self.config.keep_latest_k:  # keeps all
            return
        try:
            healthy = self._healthy_steps()
            keep = set(healthy[-2:])  # the next step may show that the weights of the newest have diverged
            if self.candidate is not None:
                keep.add(self.candidate.step)
            if self._keep.rewind_distance is not None:
                keep |= steps_for_rewind(healthy, newest_step - self._keep.rewind_distance)
            if freq := self._keep.fault_check_freq:
                keep.update([step for step in healthy if step <= newest_step // freq * freq][-1:])
            commit.retain(self.folder, self.config.keep_latest_k, self.config.keep_every_n_steps, keep)
        except OSError as e:  # not an error of the save: the new checkpoint exists
            logger.error(f"old checkpoints could not be deleted: {e}")

    def _load(self, candidate: Candidate, tensors: Tensors) -> str | None:
        """Load the checkpoint and verify it at the same time. Returns the reason why it cannot be used, or
        None. Collective."""
        logger.info(f"loading and verifying {candidate.path}")
        path, manifest = candidate.path, candidate.manifest
        copies: NodeCopies | CopyFiles | None = None
        if candidate.in_memory:
            assert self._memory is not None
            copies = CopyFiles(self._memory, candidate)
            path = copies.path
        elif not isinstance(path, Path):
            copies = NodeCopies(path, manifest, self.ranks)
        verification = copies or resume.Verification(path, manifest, self.ranks)
        error, sections = None, set[str]()
        other_optimizer = OPTIMIZER in self.config.allow_changed
        with nullcontext() if copies is None else closing(copies):
            try:
                sections = load_tensors(
                    path, tensors, self.ranks, other_optimizer, [AVERAGE], manifest, files=copies
                )
            except CheckpointError as e:  # the hashes tell whether it is damaged or does not fit this job
                error = e
            reason = verification.result() or (str(error) if isinstance(error, commit.Damaged) else None)
        if reason is not None:
            return reason
        if error is not None:
            if isinstance(error, MisfitError):
                check_optimizer(candidate.path, candidate.job_toml, self.record.job_toml, error.differences)
            raise error
        if AVERAGE in tensors and AVERAGE not in sections:
            start_average(tensors)
            logger.info(
                f"{candidate.path} has no average of the weights: a new one starts from the loaded weights"
            )
        elif AVERAGE in sections and AVERAGE not in tensors:
            logger.info(f"the average of the weights in {candidate.path} is not used: ema.enable = false")
        names = self.ranks.union(non_finite(tensors))
        return f"{listed(names)} are not finite" if names else None

    def _fall_back(self, damaged: Candidate, reason: str) -> Candidate:
        """The usable checkpoint before a damaged one. Called on rank 0. Raises CheckpointError if none is
        left."""
        if damaged.in_memory:
            logger.warning(f"{damaged.path} is not used: {reason}")
        else:
            self._faults.append((damaged.path, reason))
        start = decide(self.config, self._run_folder, self._faults)
        if not isinstance(start, Resume):  # decide() raises if the checkpoints on disk are damaged
            raise RuntimeError(f"{damaged.path} is not used: {reason}; start the run again, at step 1")
        check_run_identity(start, self.record.identity, self.config.allow_changed, self._run_folder)
        self._faults = list(start.faults)
        return start.candidate

    def _healthy_steps(self) -> list[int]:
        """The steps of the healthy checkpoints, in ascending order. Called on rank 0."""
        saved = commit.list_committed(self.folder)
        self._health |= {step: resume.is_healthy(path) for step, path in saved if step not in self._health}
        return [step for step, _ in saved if self._health[step]]

    def _go_back_to(self, step: int | None) -> None:
        """Record that the run continues from the checkpoint of `step`, and archive all later ones. Copies in
        memory from before are not used any more. Called on rank 0."""
        self._history = _new_history()
        self._record_start(step)
        self._archive(after=step or 0)

    def _step_on_disk(self, candidate: Candidate) -> int | None:
        """The step to record for a run that starts from `candidate`. Called on rank 0."""
        if not candidate.in_memory:
            return candidate.step
        saved = commit.list_committed(self.folder)
        return saved[-1][0] if saved else None

    def _delete_copies(self, but: Candidate | None = None) -> None:
        """Delete the copies in the memory of this node, except one that the run resumes from."""
        if self._memory is not None:
            self._memory.keep_only(but.step if but is not None else None)

    def _record_start(self, step: int | None) -> None:
        """Rename damaged checkpoints and record the start. Called on rank 0 when a checkpoint was loaded and
        verified, or the run is new; until then a folder without a usable checkpoint stays as it is."""
        resume.quarantine_all(self._faults)
        self._faults.clear()
        try:
            self._write_record(step)
        except OSError as e:
            file = self._run_folder / last_commit.NAME
            raise ConfigError(f"{file} cannot be written: {e}", "job.dump_folder") from None

    def _write_record(self, step: int | None) -> None:
        config = self.config
        record = LastCommit(step, config.folder, config.restart, config.load_step, self._history)
        last_commit.write(self._run_folder, record)
        self._newest_commit = step

    def _restart(self) -> None:
        """Archive the earlier run."""
        self._history = _new_history()
        self._archive(after=0)
        self._record_start(None)
        logger.info("checkpoint.restart = true: a new run begins at step 1")

    def _archive(self, after: int) -> None:
        """Archive the checkpoints after the step `after`."""
        for path in commit.archive_after(self.folder, after):
            logger.warning(f"archived as {path}: it was saved after step {after}")

    def _release(self) -> None:
        self.saver.close()
        self._lock.close()
