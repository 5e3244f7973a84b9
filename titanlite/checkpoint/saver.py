"""Saver: writes checkpoints, one at a time, on a thread.

An asynchronous save copies the state to host memory and lets training continue while the thread writes the
copy. A synchronous save waits for the thread. Both run the same code and write the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any, NamedTuple

import torch

from titanlite import __version__
from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.save_plan import SavePlans, WriteReport
from titanlite.checkpoint.section import Checkpoint
from titanlite.checkpoint.staging import HostBuffers, same_device
from titanlite.checkpoint.state import Tensors, listed, total_bytes
from titanlite.checkpoint.state_digest import combine, tensor_digests
from titanlite.checkpoint.writer import ShardWriter
from titanlite.log import logger
from titanlite.ranks import Ranks
from titanlite.storage import storage_of

MAX_FAILURES = 3  # failed saves in a row after which the run ends
POLL_S = 10.0  # between two looks at a save that is waited for after an error
STALL_S = 300.0  # long: NFS shows growth of a file after a minute, and a file does not grow during its fsync


class Snapshot(NamedTuple):
    """The contents of one checkpoint. `texts`: content of the small files by name. `about`: plain values for
    the manifest."""

    step: int
    tensors: Tensors
    texts: dict[str, str]
    about: dict[str, Any]


class Saver:
    """Saves checkpoints of one run into `ranks.folder`. Methods are collective unless they say otherwise.

    Both are called on rank 0, on the saving thread: `before_save()` before anything is written, and
    `on_commit(step)` when the checkpoint of `step` is complete."""

    def __init__(
        self,
        config: Checkpoint,
        ranks: Ranks,
        before_save: Callable[[], None],
        on_commit: Callable[[int], None],
        hashes_state: bool = False,
    ):
        """`hashes_state`: write digests of weights and state into the manifest."""
        self._hashes_state = hashes_state
        self._config, self.ranks = config, ranks
        self._before_save, self._on_commit = before_save, on_commit
        self._folder = ranks.folder
        self._host = HostBuffers()
        self._plans = SavePlans(ranks)
        self._thread = ThreadPoolExecutor(1, "checkpoint", same_device())
        self.task: Future[None] | None = None  # the save or allocation whose outcome is not checked yet
        self._error: BaseException | None = None  # the error of the last save
        self._num_failures = 0
        self._copy_task: Future[None] | None = None  # the newest copy to memory
        self._writer: ShardWriter | None = None  # of the save in flight

    def warm_up(self, tensors: Tensors) -> None:
        """Warn if the disk has no room for a save. Start to allocate the host buffers of asynchronous saves
        while training continues, so that the first save does not have to."""
        size = total_bytes(tensors, self.ranks)
        if self.ranks.rank == 0:
            try:
                commit.check_space(self._folder, size)
            except CheckpointError as e:
                logger.warning(f"{e} until there is more room")
            except OSError as e:
                logger.warning(f"the free space of {self._folder} cannot be read: {e}")
        copies = self._config.async_mode == "async" or self._config.memory_interval != 0
        if copies and torch.cuda.is_available():
            self.task = self._thread.submit(self._allocate, tensors)

    def save(self, snapshot: Snapshot, refuse: Callable[[], Exception | None]) -> None:
        """Save `snapshot`, after the save in flight has ended.

        `refuse` is collective and called on the saving thread. If it returns an error, nothing is saved, and
        the error is raised here or in check_save()."""
        self.check_save()
        problem = None
        if self._config.async_mode == "async":
            try:
                snapshot = snapshot._replace(tensors=self._host.copy(snapshot.tensors))
            except CheckpointError as e:  # _save() tells the other ranks
                problem = str(e)
        self.task = self._thread.submit(self._save, snapshot, refuse, problem)
        if self._config.async_mode == "disabled":
            self.check_save()

    def copy(
        self, snapshot: Snapshot, names_not_finite: Callable[[Tensors], list[str]],
        write: Callable[[Snapshot, SavePlans], None],
    ) -> None:  # fmt: skip
        """Start to copy `snapshot` to the memory of the nodes. `write`: writes the copy, on the saving
        thread, unless `names_not_finite`, which is collective, finds tensors that are not finite. Call this
        only while no rank is busy."""
        self.check_save()
        problem, tensors = None, Tensors()
        try:
            tensors = self._host.copy(snapshot.tensors)
        except CheckpointError as e:
            problem = str(e)
        snapshot = snapshot._replace(tensors=tensors)
        self.task = self._thread.submit(self._copy, snapshot, names_not_finite, write, problem)
        self._copy_task = self.task

    @property
    def busy(self) -> bool:
        """Whether this rank still works for a save or a copy."""
        return self.task is not None and not self.task.done()

    def wait_until_staged(self) -> None:
        """Make the device wait until a save in flight has copied the state. Called before the weights change.
        Not collective."""
        self._host.wait_on_device()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in flight has failed. All ranks have to call check_save()
        then."""
        return self.task is not None and self.task.done() and self.task.exception() is not None

    def wait(self) -> None:
        """Wait for the save in flight without checking its outcome. Not collective."""
        if self.task is not None:
            wait([self.task])

    def check_save(self) -> None:
        """Wait for the save in flight, if there is one. A failed save is logged and counted. Raises its
        CheckpointError after MAX_FAILURES failures in a row, and any other error at once."""
        task, self.task = self.task, None
        if task is None:
            return
        if task is self._copy_task:
            task.result()
            return
        self._error = task.exception()
        if self._error is None:
            self._num_failures = 0
            return
        self._num_failures += 1
        if not isinstance(self._error, CheckpointError):
            raise self._error
        if self._num_failures == MAX_FAILURES:
            raise CheckpointError(
                f"{self._error}; the run ends after {self._num_failures} failed saves in a row"
                f"{self._newest_checkpoint()}"
            ) from self._error
        logger.error(f"{self._error} (failure {self._num_failures} of {MAX_FAILURES} in a row)")

    def finish(self) -> None:
        """Wait for the last save. Raises its error if it failed. Not collective."""
        task, self.task = self.task, None
        error = task.exception() if task is not None else None
        if task is None or task is self._copy_task:
            error = error or self._error
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"{error}; the last save failed{self._newest_checkpoint()}") from error
        if error is not None:
            raise error

    def finish_after_error(self, reason: str) -> None:
        """Wait for a save in flight while it can still complete. `reason`: the reason why the run ends, for
        the log. Not collective.

        A single process waits until the save ends. With several ranks, another rank may hang or its node may
        be lost, which raises no error before the timeout of the process group; so a rank waits until no file
        has grown for STALL_S. A rank that has ended fails the save at once."""
        if self.task is None or (self.task is self._copy_task and self.ranks.size > 1):
            return  # the copy before is complete
        size, stalled_s = (-1, -1), 0.0
        try:
            while not wait([self.task], POLL_S).done:
                before, size = size, (commit.partial_size(self._folder), self._num_bytes())
                stalled_s = stalled_s + POLL_S if size == before else 0.0
                if self.ranks.size > 1 and stalled_s >= STALL_S:
                    raise TimeoutError(f"no file has grown for {STALL_S:.0f} s; does another rank hang?")
                logger.warning(f"{reason}; waiting for the save in flight ({gib(max(size))} so far)")
            self.task.result()
        except Exception as e:
            logger.error(f"the checkpoint that was being written is lost: {type(e).__name__}: {e}")

    def close(self) -> None:
        """Accept no further task. Not collective."""
        self._thread.shutdown(wait=False)

    def _allocate(self, tensors: Tensors) -> None:
        began = time.perf_counter()
        try:
            size = self._host.allocate(tensors)
            logger.info(f"pinned {gib(size)} of host memory for saves in {time.perf_counter() - began:.1f} s")
        except CheckpointError as e:  # not fatal here: the save that needs the memory fails, on all ranks
            logger.warning(str(e))

    def _save(self, snapshot: Snapshot, refuse: Callable[[], Exception | None], problem: str | None) -> None:
        """Write the shards and commit the checkpoint. Runs on the saving thread of every rank. `problem`: an
        error of this rank that fails the save."""
        began, step = time.perf_counter(), snapshot.step
        self._host.wait()
        if error := refuse():
            raise error
        if problem := self.ranks.first(problem):
            raise CheckpointError(f"step {step} could not be saved: {problem}")
        size = total_bytes(snapshot.tensors, self.ranks)
        partial = self.ranks.from_rank_zero(lambda: self._begin(step, size))
        writer = self._writer = ShardWriter(partial, hashes_state=self._hashes_state)
        try:
            written = self._plans.write(snapshot.tensors, writer)
            self.ranks.from_rank_zero(lambda: self._commit(snapshot, writer, written, began))
        except CheckpointError as e:
            self.ranks.from_rank_zero(lambda: _discard(partial))
            raise CheckpointError(f"step {step} could not be saved: {e}") from e
        if self.ranks.rank == 0:
            self._on_commit(step)

    def _copy(
        self, snapshot: Snapshot, names_not_finite: Callable[[Tensors], list[str]],
        write: Callable[[Snapshot, SavePlans], None], problem: str | None,
    ) -> None:  # fmt: skip
        self._host.wait()
        if problem := self.ranks.first(problem):
            reason = problem
        elif names := names_not_finite(snapshot.tensors):
            reason = f"{listed(names)} are not finite"
        else:
            write(snapshot, self._plans)
            return
        if self.ranks.rank == 0:
            logger.warning(f"step {snapshot.step} is not copied to memory: {reason}")

    def _begin(self, step: int, size: int) -> PurePath:
        with _disk_errors(f"step {step} could not be saved: "):
            self._before_save()
            storage = storage_of(self._folder)
            if storage.has_folders and not storage.is_folder(self._folder):
                logger.error(
                    f"{self._folder} is gone: removed, moved, or on a disk that is not mounted any more; "
                    f"it is made again for step {step}, without its earlier checkpoints"
                )
                storage.make_folder(self._folder)
            commit.check_space(self._folder, size)
            return commit.begin(self._folder, step)

    def _commit(
        self, snapshot: Snapshot, writer: ShardWriter, written: list[WriteReport] | None, began: float
    ) -> None:
        assert written is not None
        about = {**snapshot.about, **about_save(self.ranks.size)}
        hashed = [shard for by_rank in written for shard in by_rank.hashed]
        whole = [shard for shard in hashed if shard is not None]
        if whole and len(whole) == len(hashed):
            about["digest"] = combine(tensor_digests(whole))
        with _disk_errors():  # _save() names the step
            files = self._plans.finish(writer, written)
            size = sum(digest.size for digest in files.values())
            path = commit.commit(writer.path, snapshot.step, snapshot.texts, files, about)
        logger.info(f"saved {path} ({gib(size)}, {time.perf_counter() - began:.1f} s)")

    def _num_bytes(self) -> int:
        """Bytes that this rank has written in the newest save."""
        return self._writer.fs.num_bytes if self._writer is not None else 0

    def _newest_checkpoint(self) -> str:
        checkpoints = []
        with suppress(OSError):  # of a storage that does not answer, which is why the saves have failed
            checkpoints = commit.list_committed(self._folder)
        return f" (the newest checkpoint is {checkpoints[-1][1].name})" if checkpoints else ""


def _discard(partial: PurePath) -> None:
    with suppress(OSError):  # of a storage that does not answer; the next start tries again
        storage_of(partial).delete(partial)


def about_save(num_ranks: int) -> dict[str, Any]:
    """When and by which versions a checkpoint is written, for its manifest."""
    return {
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "titanlite": __version__,
        "torch": torch.__version__,
        "ranks": num_ranks,
    }


@contextmanager
def _disk_errors(prefix: str = "") -> Iterator[None]:
    """Turn an OSError of the body, which runs on rank 0, into a CheckpointError, which fails the save and not
    the run."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"{prefix}rank 0: {type(e).__name__}: {e}") from e
