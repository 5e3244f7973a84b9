"""When to save, what to resume from, what to keep. The protocol is in commit.py, the contents in state.py.

Rank 0 chooses and all ranks follow; torch DCP reshards. All saves are written by one thread over a process
group of its own: an asynchronous save first copies the state to host memory and lets training go on, a
synchronous one waits for the thread. So both write the same bytes.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from titanlite import __version__
from titanlite.checkpoint import commit, resume
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.commit_record import CommitRecord
from titanlite.checkpoint.digest import FileDigest, gib
from titanlite.checkpoint.lock import FolderLock
from titanlite.checkpoint.opening import Opening
from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.reader import MisfitError, cause, load_tensors
from titanlite.checkpoint.resume import Candidate, Fault, newest_healthy
from titanlite.checkpoint.run_identity import check_optimizer
from titanlite.checkpoint.section import EXPORTS, Checkpoint
from titanlite.checkpoint.staging import HostBuffers, same_device
from titanlite.checkpoint.state import (
    TRAIN,
    Tensors,
    TrainState,
    listed,
    make_optimizer_state,
    non_finite,
    size_of,
    tensors_of,
)
from titanlite.checkpoint.writer import ShardWriter
from titanlite.config.component import ConfigError
from titanlite.errors import Diverged
from titanlite.interop.exporter import Exporter
from titanlite.interop.initial import load_initial
from titanlite.interop.weights import Exchange
from titanlite.log import logger

MAX_FAILURES = 3  # saves in a row
LOOK_S = 10.0  # between two looks at a save that is waited for after an error
STALL_S = 300.0  # NFS shows a file's growth to another node after a minute; an fsync shows none at all


class Checkpointer:
    """Checkpoints of one run. Opening it locks the run folder, chooses and verifies what to resume from, and
    refuses another recipe's folder (ConfigError). Collective, as are all its methods that save or load.

    `recipe`: nested plain values that a resumed run must share. `job_toml`: stored in every checkpoint.
    `exchange`: of the run's model; what initial_load_path and export_hf need.
    """

    def __init__(
        self,
        config: Checkpoint,
        dump_folder: Path,
        recipe: dict[str, Any],
        job_toml: str,
        exchange: Exchange | None = None,
    ):
        self.config, self.folder = config, dump_folder / config.folder
        self.recipe, self.job_toml = recipe, job_toml
        self._recipe_file = dump_folder / "recipe.json"
        self._record = CommitRecord(dump_folder, config)
        self._opening = Opening(config, dump_folder, recipe)
        self._ranks = Ranks(self.folder)
        self._lock: FolderLock | None = None
        self._pending: Future[None] | None = None
        self._failures = 0
        self._waiting = False  # whether a periodic save waits for the end of a streak of skipped steps
        self._error: BaseException | None = None  # of the last save
        self._faults: list[Fault] = []  # on rank 0: damaged checkpoints that are still under their names
        self._exchange = exchange
        self._host = HostBuffers()
        self._exporter: Exporter | None = None
        if config.export_hf and exchange is not None:
            self._exporter = Exporter(config, self._ranks, dump_folder / EXPORTS, exchange)
        self._thread = ThreadPoolExecutor(1, "checkpoint", same_device())
        try:
            if exchange is not None:
                self._ranks.agree(lambda: self._opening.check_exchange(exchange))
            self._ranks.agree(lambda: self._take_lock(dump_folder))
            self._from = self._open()
        except BaseException:
            self._release()
            raise

    @property
    def resumed(self) -> dict[str, Any] | None:
        """The train.json that the run goes on from; None for a new run."""
        return self._from.train if self._from else None

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that the run goes on from; None for a new run."""
        return self._from.path if self._from else None

    def load(self, net: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
        """Restore all three in place from the chosen checkpoint, or from the one before if that turns out to
        be damaged; a run without one starts fresh, or from initial_load_path."""
        initial = self.config.initial_load_path
        if self._from is None:
            if initial and self._exchange is not None:
                load_initial(Path(initial), self._exchange.family, net, self._ranks)
            self._ranks.agree(self._restart)
            return
        if initial:
            logger.info(f"initial_load_path is not used: the run goes on from {self._from.path}")
        make_optimizer_state(optimizer)
        tensors = tensors_of(net, optimizer)
        while reason := self._load(self._from, tensors):
            self._from = self._ranks.agree(functools.partial(self._fall_back, self._from, reason))
        self._ranks.agree(functools.partial(self._start, self._from.step))
        self._ranks.agree(functools.partial(self._leave_branch, self._from.step))
        if self._exporter is not None:
            self._exporter.catch_up()
        state.restore(self._from.train)
        logger.info(f"resumed from {self._from.path}")

    def due(
        self, step: int, last_step: int, asked: bool = False, in_streak: Callable[[], bool] = lambda: False
    ) -> bool:
        """Whether the step that was just taken is to be saved. A periodic save waits while steps are skipped
        (`in_streak`) and is made after the next step that is not."""
        if not self.config.enable:
            return False
        if asked or step == last_step:
            return True
        self._waiting |= step % self.config.interval == 0
        return self._waiting and not in_streak()

    def warm_up(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Once the optimizer has its state: see whether there is room for a save, and allocate the host
        buffers beside the training, so that the first save need not."""
        if not self.config.enable:
            return
        tensors = tensors_of(net, optimizer)
        size = size_of(tensors, self._ranks)
        if self._ranks.rank == 0:
            try:
                commit.check_space(self.folder, size)
            except CheckpointError as e:
                logger.warning(f"{e}, until there is more room")
            except OSError as e:
                logger.warning(f"{self.folder} does not answer: {e}")
        if self.config.async_mode == "async" and torch.cuda.is_available():
            self._pending = self._thread.submit(self._allocate, tensors)

    def save(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, extra: dict[str, Any]
    ) -> None:
        """Save now. Waits for a save that is still in flight. A state that is not finite is not saved: raises
        Diverged, here or in settle().

        `extra`: plain values for train.json. `healthy` among them says whether this checkpoint is one to go
        back to if training diverges.
        """
        self.settle()
        self._waiting = False
        tensors, problem = tensors_of(net, optimizer), None
        not_finite = non_finite(tensors)
        small = {**state.as_json(), **extra, "finite": True, "branch": self._branch(), "recipe": self.recipe}
        if self.config.async_mode == "async":
            try:
                tensors = self._host.copy(tensors)
            except CheckpointError as e:  # this rank's, but all have to hear of it
                problem = str(e)
        text = json.dumps(small, indent=1) + "\n"
        self._pending = self._thread.submit(self._write, state.step, tensors, text, problem, not_finite)
        if self.config.async_mode == "disabled":
            self.settle()

    def way_back(self) -> str:
        """What to do after training has diverged: which checkpoint to go back to, and how. Waits for a save
        in flight, which may be that checkpoint."""
        if self._pending is not None:
            wait([self._pending])
        return self._way_back()

    def _way_back(self) -> str:
        healthy = newest_healthy(self.folder)
        if healthy is None:
            return (
                "no checkpoint was saved before: start again in another --job.dump_folder, for example with "
                "a lower --optimizer.lr"
            )
        # What was saved after going back to a step is gone on from when load_step names that step again.
        later = [path.name for step, path in commit.committed(self.folder) if step > healthy]
        first = f"move {', '.join(later)} out of {self.folder}, then "
        return (
            f"{first if later and healthy == self._branch() else ''}go back to step {healthy}, the newest "
            "checkpoint saved before, and change something, for example: "
            f"--checkpoint.load_step={healthy} --optimizer.lr=<a lower one>"
        )

    def has(self, step: int) -> bool:
        """Whether the step is saved, after waiting for a save in flight."""
        self.settle()
        return any(step == saved for saved, _ in commit.committed(self.folder))

    def wait_until_staged(self) -> None:
        """Before the weights change: what the device does next waits until a save has its copy."""
        self._host.wait_on_device()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in flight has failed; settle() then, on all ranks."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def settle(self) -> None:
        """Wait for the save in flight, if there is one. A failed one is reported and counted; raises its
        CheckpointError if on_save_error says so."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._error = pending.exception()
        if self._error is None:
            self._failures = 0
            return
        self._failures += 1
        stop = self.config.on_save_error == "stop" or self._failures == MAX_FAILURES
        if not isinstance(self._error, CheckpointError):
            raise self._error
        if stop:
            raise CheckpointError(
                f"{self._error}; that was failure {self._failures} in a row, the run ends{self._last_good()}"
            ) from self._error
        logger.error(f"{self._error} (failure {self._failures} of {MAX_FAILURES} in a row)")

    def close(self, is_over: bool = True) -> None:
        """Wait for the last save, and for the export of the last step if the run `is_over`: one that was
        stopped gives its exports up. Raises CheckpointError if either failed. Frees the folder."""
        pending, self._pending = self._pending, None
        try:
            error = pending.exception() if pending is not None else self._error
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{error}; that was the last one{self._last_good()}") from error
            if error is not None:
                raise error
            if is_over and self._exporter is not None:
                self._exporter.finish(self._retain)
        finally:
            self._release()

    def close_after_error(self, error: BaseException | None = None) -> None:
        """Let a save in flight become whole, however long that takes, if it still can; frees the folder. The
        `error` that has ended the training, which is shown in full afterwards, is named while it waits."""
        why = "training has ended"
        if error is not None:
            why += f": {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        try:
            if self._pending is not None:
                self._wait_while_it_grows(self._pending, why)
        except Exception as e:
            logger.error(f"the checkpoint that was being written is lost: {type(e).__name__}: {e}")
        finally:
            self._release()

    def _wait_while_it_grows(self, save: Future[None], why: str) -> None:
        """Wait for a save. One process: to its end. Of several, another may hang or have lost its node, which
        no error tells before the timeout of their group: until nothing has been written for STALL_S. A
        peer that has ended is an error of the save at once."""
        size, looks = -1, 0
        while not wait([save], LOOK_S).done:
            before, size = size, commit.partial_size(self.folder)
            looks = looks + 1 if size == before else 0
            if self._ranks.size > 1 and looks * LOOK_S >= STALL_S:
                raise TimeoutError(f"nothing has been written for {STALL_S:.0f} s; does another rank hang?")
            logger.warning(f"{why}; waiting for the save in flight ({gib(size)} so far)")
        save.result()

    def _allocate(self, tensors: Tensors) -> None:
        began = time.perf_counter()
        try:
            size = self._host.allocate(tensors)
            logger.info(f"pinned {gib(size)} of host memory for saves in {time.perf_counter() - began:.1f} s")
        except CheckpointError as e:  # the save that needs it will fail, on all ranks
            logger.warning(str(e))

    def _write(
        self, step: int, tensors: Tensors, small: str, problem: str | None, not_finite: list[str]
    ) -> None:
        began = time.perf_counter()
        self._host.wait()
        if names := sorted(set().union(*self._ranks.gather(not_finite))):
            raise Diverged(
                f"training has diverged: after step {step} {listed(names)} are not finite; this state is not "
                f"saved; {self._way_back()}"
            )
        if problems := [text for text in self._ranks.gather(problem) if text]:
            raise CheckpointError(f"step {step} could not be saved: {problems[0]}")
        size = size_of(tensors, self._ranks)
        partial = self._ranks.agree(lambda: self._begin(step, size))
        writer = ShardWriter(partial)
        try:
            try:
                save(
                    tensors,
                    storage_writer=writer,
                    process_group=self._ranks.group,
                    no_dist=not self._ranks.distributed,
                )
            except CheckpointException as e:  # a BaseException; DCP raises it on all ranks
                raise CheckpointError(f"step {step} could not be saved: {cause(e)}") from e
            files = self._ranks.gather(writer.files)
            path = self._ranks.agree(lambda: self._commit(partial, step, small, files, began))
        except CheckpointError:
            self._ranks.agree(lambda: commit.discard(partial))
            raise
        if self._ranks.rank == 0:
            if self._exporter is not None:
                self._exporter.committed(step, path)
            self._retain()

    def _begin(self, step: int, size: int) -> Path:
        with _disk_errors(step):
            commit.check_space(self.folder, size)
            return commit.begin(self.folder, step)

    def _commit(
        self, partial: Path, step: int, small: str, files: list[dict[str, FileDigest]], began: float
    ) -> Path:
        written = {name: digest for of in files for name, digest in of.items()}
        size = sum(digest.size for digest in written.values())
        about = {
            "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "titanlite": __version__,
            "torch": torch.__version__,
            "ranks": self._ranks.size,
            "resumed_from": self._from.step if self._from else None,
        }
        texts = {TRAIN: small, "job.toml": self.job_toml}
        with _disk_errors(step):
            path = commit.commit(partial, step, texts, written, about)
        self._record.committed(step)
        logger.info(f"saved {path} ({gib(size)}, {time.perf_counter() - began:.1f} s)")
        return path

    def _last_good(self) -> str:
        there = commit.committed(self.folder)
        return f" (there is {there[-1][1].name} to go on from)" if there else ""

    def _retain(self) -> None:
        c, keep = self.config, {self._from.step} if self._from else set()
        keep |= set(self._exporter.steps) if self._exporter else set()
        keep |= {healthy} if (healthy := newest_healthy(self.folder)) is not None else set()
        try:
            commit.retain(self.folder, c.keep_latest_k, c.keep_every_n_steps, keep)
        except OSError as e:  # the checkpoint is there
            logger.error(f"old checkpoints could not be deleted: {e}")

    # ---- opening

    def _open(self) -> Candidate | None:
        candidate = self._ranks.agree(lambda: self._opening.candidate(self._faults))
        if candidate is not None:
            resume.check_shared(candidate, self._ranks)
        if self.config.enable:
            self._ranks.agree(lambda: commit.clean(self.folder))  # first: what a kill left may fill the disk
            resume.probe(self.folder, self._ranks)
        self._ranks.agree(self._sign)
        if candidate is None:
            self._ranks.agree(lambda: self._start(None))
        return candidate

    def _load(self, candidate: Candidate, tensors: Tensors) -> str | None:
        """Load, and verify beside it; what is wrong with the checkpoint, if anything."""
        full = self.config.verify == "full"
        logger.info(f"loading {'and verifying ' if full else ''}{candidate.path}")
        verification = resume.Verification(candidate, self._ranks) if full else None
        error = None
        try:
            load_tensors(candidate.path, tensors, self._ranks)
        except CheckpointError as e:  # of damage, or of another model: the hashes tell
            error = e
            verification = verification or resume.Verification(candidate, self._ranks)
        reason = verification.result() if verification else None
        if error is not None and reason is None:
            if isinstance(error, MisfitError):
                check_optimizer(candidate.path, self.job_toml)
            raise error
        if reason is None and (names := sorted(set().union(*self._ranks.gather(non_finite(tensors))))):
            reason = f"{listed(names)} are not finite"
        return reason

    def _fall_back(self, damaged: Candidate, reason: str) -> Candidate:
        """On rank 0: the checkpoint before the damaged one. Raises CheckpointError if none is left."""
        self._faults.append((damaged.path, reason))
        found = self._opening.candidate(self._faults)
        assert found is not None, "candidate() raises if there is none left"
        return found

    def _take_lock(self, dump_folder: Path) -> None:
        try:
            self._lock = FolderLock(dump_folder)
        except OSError as e:
            raise ConfigError(f"{dump_folder} cannot be written to: {e}", "job.dump_folder") from None

    def _sign(self) -> None:
        assert self._lock is not None
        self._lock.sign()

    def _start(self, step: int | None) -> None:
        """On rank 0, once a checkpoint is loaded and verified, or none was ever saved: only now are damaged
        ones renamed, so that a run with no usable one keeps all of them as they are."""
        resume.set_all_aside(self._faults)
        if not self._record.restarts():  # else _restart() does, when the remains are archived
            self._record.start(step)

    def _leave_branch(self, step: int) -> None:
        """Having gone back to load_step: what was saved after it is no longer this run's."""
        if step == self.config.load_step:
            self._archive(after=step)

    def _restart(self) -> None:
        """Having begun a new run: the remains of the one before are no longer this run's."""
        if self._record.restarts():
            self._archive(after=0)
            self._record.set_aside_if_damaged()
            self._record.start(None)
            logger.info("checkpoint.restart = true: a new run begins at step 1")

    def _archive(self, after: int) -> None:
        for folder in (self._recipe_file.parent / EXPORTS, self.folder):
            for path in commit.abandon(folder, after):
                logger.warning(f"saved after step {after}, and archived: {path}")

    def _branch(self) -> int | None:
        """The load_step that this start, or the starts before with the same one, went back to."""
        return self.config.load_step if self.config.load_step != -1 else None

    def _release(self) -> None:
        self._thread.shutdown(wait=False)
        if self._exporter is not None:
            self._exporter.close()
        if self._lock is not None:
            self._lock.close()


@contextmanager
def _disk_errors(step: int) -> Iterator[None]:
    """A disk that does not take a checkpoint fails the save, not the run."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"step {step} could not be saved: {type(e).__name__}: {e}") from e
