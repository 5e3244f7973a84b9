"""The loader: returns each rank's micro-batches.

The only state is a position in the data order: the number of the sequence that the next step begins with.
torchdata's StatefulDataLoader runs the workers over a map-style dataset addressed by global sequence number.
Ranks, workers and micro-batches may therefore change on resume, and resuming costs the same at any
position."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.component import ConfigError
from titanlite.data.background import Background
from titanlite.data.batch import Batch
from titanlite.data.dataset import MicroBatch, SequenceDataset
from titanlite.data.skips import SkippedSequences
from titanlite.data.step_sizes import StepSize, StepSizes


@dataclass(frozen=True)
class MicroBatches:
    """An endless iterator over the micro-batches of one rank.

    Each step takes the next sequences that are not skipped, as many as `step_sizes` has for the first of
    them; the first step begins at the position `first_sequence`. Of the sequences of a step, micro-batch a of
    rank r begins with number (a * num_ranks + r) * micro_batch_size, so every split over ranks and
    micro-batches covers the same sequences. The number of sequences of each step must be a multiple of
    micro_batch_size * num_ranks."""

    first_sequence: int
    step_sizes: StepSizes
    micro_batch_size: int
    rank: int
    num_ranks: int
    skipped: SkippedSequences = field(default_factory=SkippedSequences)

    def step_size(self, position: int) -> StepSize:
        """Return the size of the step that begins at `position`."""
        return self.step_sizes.at(self.skipped.next(position))

    def __iter__(self) -> Iterator[MicroBatch]:
        size, skipped, first = self.micro_batch_size, self.skipped, self.first_sequence
        while True:
            step = self.step_size(first)
            for place in range(self.rank * size, step.global_batch_size, size * self.num_ranks):
                yield MicroBatch(skipped.take(skipped.advance(first, place), size), step.num_splits)
            first = skipped.advance(first, step.global_batch_size)


class SequenceLoader:
    """An endless iterator over this rank's micro-batches. Its state is the position in the data order.

    torchdata's StatefulDataLoader runs the workers, prefetches and pins memory. Its own state is never used,
    because it counts batches of one rank, is bound to the number of workers and includes prefetched batches.
    The state here is `{"sequences": n}`: all ranks together have returned sequences [0, n) of the data order,
    except the skipped ones. Which ones are skipped is not part of it.
    """

    def __init__(self, sequences: SequenceDataset, order: MicroBatches, num_workers: int, pin_memory: bool):
        self._sequences, self._order = sequences, order
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._batches: Iterator[Batch] | Background[Batch] | None = None
        self._step_began, self._num_returned = order.first_sequence, 0
        self.while_waiting: Callable[[float, str], None] | None = None
        """Called twice per second while no batch arrives: see Background."""

    def state_dict(self) -> dict[str, int]:
        """Return the number after the last sequence that all ranks have returned. Every rank computes the
        same number, because all ranks return equally many micro-batches. The number is exact even within a
        step, so a run may resume with other numbers of ranks and workers and other batch sizes."""
        return {"sequences": self._order.skipped.advance(self._step_began, self._num_returned)}

    def next_step(self, device: torch.device) -> tuple[StepSize, list[Batch]]:
        """Return the size of the step that begins at the present position, and this rank's micro-batches of
        it, on `device`."""
        order = self._order
        size = order.step_size(self._step_began)
        num_micro_batches = size.global_batch_size // (order.micro_batch_size * order.num_ranks)
        return size, [next(self).to(device) for _ in range(num_micro_batches)]

    def load_state_dict(self, state: dict[str, int], skipped: SkippedSequences | None = None) -> None:
        """Continue with sequence `state["sequences"]`, at the same cost for any number, and skip `skipped`
        from there on (None: as before). Running workers end; the next `iter` or `next` starts new ones."""
        self.close()
        skipped = self._order.skipped if skipped is None else skipped
        self._order = replace(self._order, first_sequence=state["sequences"], skipped=skipped)
        self._step_began, self._num_returned = state["sequences"], 0

    def __iter__(self) -> SequenceLoader:
        """Start the workers unless they run. A second iterator continues at the position of the first."""
        if self._batches is None:
            self._batches = self._start()
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        batch = next(self._batches)
        if isinstance(batch, ConfigError):
            raise batch
        order = self._order
        self._num_returned += order.micro_batch_size * order.num_ranks  # sequences of this step, of all ranks
        if self._num_returned >= order.step_size(self._step_began).global_batch_size:
            self._step_began, self._num_returned = self.state_dict()["sequences"], 0
        return batch

    def close(self) -> None:
        """End the workers."""
        batches, self._batches = self._batches, None
        if isinstance(batches, Background):
            batches.close()

    def _start(self) -> Iterator[Batch] | Background[Batch]:
        loader = self._stateful_data_loader()
        if not self._num_workers:
            return iter(loader)
        check_shared_memory(self._num_workers)
        device = torch.cuda.current_device() if self._pin_memory else None

        def start() -> Iterator[Batch]:
            if device is not None:
                torch.cuda.set_device(device)  # the setting is per thread, and pinning memory uses it
            return iter(loader)

        return Background(start, self.while_waiting)

    def _stateful_data_loader(self) -> StatefulDataLoader:
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecates
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            return StatefulDataLoader(
                self._sequences,
                batch_sampler=self._order,
                num_workers=self._num_workers,
                collate_fn=as_is,  # __getitems__ returns a whole Batch: nothing is left to collate
                pin_memory=self._pin_memory,
                prefetch_factor=4 if self._num_workers else None,
                worker_init_fn=set_up_worker,
                snapshot_every_n_steps=None,  # workers send no state with their batches
            )


def set_up_worker(worker: int) -> None:
    """In a worker process: ignore the signals that stop the trainer, which needs the workers until the step
    is finished, and enable garbage collection, which the trainer disables."""
    gc.enable()
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def check_shared_memory(num_workers: int) -> None:
    """Raise ConfigError unless /dev/shm has room for the workers' queues. torch's own error names no file."""
    try:
        queues: list[Any] = [multiprocessing.Queue() for _ in range(num_workers + 2)]
        for queue in queues:
            queue.close()
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        raise ConfigError(
            f"/dev/shm has no room for the locks of {num_workers} loader workers: give it 1 MiB or more (for "
            "a container: --shm-size=1g), or load in the training process: --data.num_workers=0",
            "data.num_workers",
        ) from None


def as_is(batch: Any) -> Any:
    return batch
