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
from titanlite.data.dataset import SequenceDataset
from titanlite.data.skips import SkippedSequences


@dataclass(frozen=True)
class MicroBatches:
    """An endless iterator over the micro-batches of one rank, as lists of global sequence numbers.

    Each step takes the next `global_batch_size` sequences that are not skipped; the first step begins at
    `first_sequence`. Of the sequences of a step, micro-batch a of rank r begins with number
    (a * num_ranks + r) * micro_batch_size, so every split over ranks and micro-batches covers the same
    sequences."""

    first_sequence: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    num_ranks: int
    skipped: SkippedSequences = field(default_factory=SkippedSequences)

    def __iter__(self) -> Iterator[list[int]]:
        size, skipped, first = self.micro_batch_size, self.skipped, self.first_sequence
        while True:
            for place in range(self.rank * size, self.global_batch_size, size * self.num_ranks):
                yield skipped.take(skipped.advance(first, place), size)
            first = skipped.advance(first, self.global_batch_size)


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
        self._num_returned = 0
        self.while_waiting: Callable[[float, str], None] | None = None
        """Called twice per second while no batch arrives: see Background."""

    def state_dict(self) -> dict[str, int]:
        """Return the number after the last sequence that all ranks have returned. Every rank computes the
        same number, because all ranks return equally many micro-batches. The number is exact even within a
        step, so a run may resume with other numbers of ranks and workers and other batch sizes."""
        order = self._order
        num_returned = self._num_returned * order.micro_batch_size * order.num_ranks
        return {"sequences": order.skipped.advance(order.first_sequence, num_returned)}

    def load_state_dict(self, state: dict[str, int], skipped: SkippedSequences | None = None) -> None:
        """Continue with sequence `state["sequences"]`, at the same cost for any number, and skip `skipped`
        from there on (None: as before). Running workers end; the next `iter` or `next` starts new ones."""
        self.close()
        skipped = self._order.skipped if skipped is None else skipped
        self._order = replace(self._order, first_sequence=state["sequences"], skipped=skipped)
        self._num_returned = 0

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
        self._num_returned += 1
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
        _check_shared_memory(self._num_workers)
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
                collate_fn=_as_is,  # __getitems__ returns a whole Batch: nothing is left to collate
                pin_memory=self._pin_memory,
                prefetch_factor=4 if self._num_workers else None,
                worker_init_fn=_set_up_worker,
                snapshot_every_n_steps=None,  # workers send no state with their batches
            )


def _set_up_worker(worker: int) -> None:
    """In a worker process: ignore the signals that stop the trainer, which needs the workers until the step
    is finished, and enable garbage collection, which the trainer disables."""
    gc.enable()
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def _check_shared_memory(num_workers: int) -> None:
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


def _as_is(batch: Any) -> Any:
    return batch
