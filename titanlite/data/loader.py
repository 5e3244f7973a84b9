"""The loaders: return each rank's micro-batches, which worker processes make.

The only state of SequenceLoader is a position in the data order: the number of the sequence that the next
step begins with. torch's DataLoader runs the workers over a map-style dataset addressed by global sequence
number. Ranks, workers and micro-batches may therefore change on resume, and resuming costs the same at any
position. StreamLoader (stream_loader.py) reads a stream."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from titanlite.config.component import ConfigError
from titanlite.data.background import Background
from titanlite.data.batch import Batch, MicroBatch
from titanlite.data.skips import SkippedSequences
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.errors import LoaderError

Item = TypeVar("Item")


@dataclass(frozen=True)
class LoaderLayout:
    """How the loaders share the work: the numbers of data-parallel ranks and of loader workers per rank, and
    the sequences of a micro-batch."""

    num_ranks: int
    num_workers: int
    micro_batch_size: int

    def num_micro_batches(self, step: StepSize) -> int:
        """Return the number of micro-batches of each rank in a step."""
        return step.global_batch_size // (self.micro_batch_size * self.num_ranks)


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


class Prefetcher(Protocol):
    """Brings the sequences of the next steps to this node."""

    def advance(self, position: int) -> None:
        """Say that the sequences before `position` were taken."""

    def check(self) -> None:
        """Raise LoaderError if no more sequences come."""

    def close(self) -> None:
        """End it."""


class Loader(ABC, Generic[Item]):
    """An endless iterator over this rank's micro-batches. torch's DataLoader runs the workers, prefetches and
    pins memory; without workers it loads in this thread."""

    def __init__(self, layout: LoaderLayout, pin_memory: bool):
        self.layout, self._pin_memory = layout, pin_memory
        self._items: Iterator[Item] | Background[Item] | None = None
        self.while_waiting: Callable[[float, str], None] | None = None
        """Called twice per second while no batch arrives: see Background."""

    @abstractmethod
    def state_dict(self) -> dict[str, int]:
        """Return the position: the number after the last sequence that all ranks have returned."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, int], skipped: SkippedSequences | None = None) -> None:
        """Continue with sequence `state["sequences"]`, and skip `skipped` from there on (None: as before)."""

    @abstractmethod
    def next_step(self, device: torch.device) -> tuple[StepSize, list[Batch]]:
        """Return the size of the next step, and this rank's micro-batches of it, on `device`."""

    @abstractmethod
    def __next__(self) -> Batch: ...

    def stream_state(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return the state of the loaders of all ranks besides the position, as JSON values; {} if there is
        none. `gather`: returns a value of every rank. Collective if there is a state."""
        return {}

    @abstractmethod
    def _data_loader(self) -> DataLoader[Any]:
        """Return the DataLoader that continues at the present position."""

    def _next_item(self) -> Item:
        """Return the next item of the DataLoader, whose workers start if they do not run."""
        if self._items is None:
            self._items = self._start()
        return next(self._items)

    def close(self) -> None:
        """End the workers."""
        items, self._items = self._items, None
        if isinstance(items, Background):
            items.close()

    def _start(self) -> Iterator[Item] | Background[Item]:
        loader = self._data_loader()
        if not self.layout.num_workers:
            return iter(loader)
        check_shared_memory(self.layout.num_workers)
        device = torch.cuda.current_device() if self._pin_memory else None

        def start() -> Iterator[Item]:
            if device is not None:
                torch.cuda.set_device(device)  # the setting is per thread, and pinning memory uses it
            return iter(loader)

        return Background(start, self._while_waiting())

    def _while_waiting(self) -> Callable[[float, str], None] | None:
        """Return what is called while no batch arrives. It must not refer to the loader, which could not be
        dropped then."""
        return self.while_waiting

    def _settings(self) -> dict[str, Any]:
        """Return the arguments that all DataLoaders have."""
        num_workers = self.layout.num_workers
        return {
            "num_workers": num_workers,
            "collate_fn": _as_is,  # the dataset returns whole Batches: nothing is left to collate
            "pin_memory": self._pin_memory,
            "prefetch_factor": 4 if num_workers else None,
            "worker_init_fn": _set_up_worker,
        }


class SequenceLoader(Loader[Batch | ConfigError | LoaderError]):
    """The loader of numbered sequences. Its state is `{"sequences": n}`: all ranks together have returned
    sequences [0, n) of the data order, except the skipped ones. Which ones are skipped is not part of it."""

    def __init__(self, sequences: Dataset[Any], order: MicroBatches, num_workers: int, pin_memory: bool):
        super().__init__(LoaderLayout(order.num_ranks, num_workers, order.micro_batch_size), pin_memory)
        self._sequences, self._order = sequences, order
        self._step_began, self._num_returned = order.first_sequence, 0
        self._start_prefetcher: Callable[[MicroBatches], Prefetcher] | None = None
        self._prefetcher: Prefetcher | None = None

    def prefetch(self, start: Callable[[MicroBatches], Prefetcher]) -> None:
        """Start a prefetcher of the sequences from the present position on, by `start`, now and whenever the
        position is set."""
        self._start_prefetcher, self._prefetcher = start, start(self._order)

    def close(self) -> None:
        super().close()
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _while_waiting(self) -> Callable[[float, str], None] | None:
        prefetcher, also = self._prefetcher, self.while_waiting
        if prefetcher is None:
            return also

        def check(waited_s: float, worker: str) -> None:
            prefetcher.check()
            if also is not None:
                also(waited_s, worker)

        return check

    def state_dict(self) -> dict[str, int]:
        """Return the position. Every rank computes the same number, because all ranks return equally many
        micro-batches. The number is exact even within a step, so a run may resume with other numbers of ranks
        and workers and other batch sizes."""
        return {"sequences": self._order.skipped.advance(self._step_began, self._num_returned)}

    def load_state_dict(self, state: dict[str, int], skipped: SkippedSequences | None = None) -> None:
        """Continue at a position, at the same cost for any number. Running workers end."""
        self.close()
        skipped = self._order.skipped if skipped is None else skipped
        self._order = replace(self._order, first_sequence=state["sequences"], skipped=skipped)
        self._step_began, self._num_returned = state["sequences"], 0
        if self._start_prefetcher is not None:
            self._prefetcher = self._start_prefetcher(self._order)

    def next_step(self, device: torch.device) -> tuple[StepSize, list[Batch]]:
        size = self._order.step_size(self._step_began)
        return size, [next(self).to(device) for _ in range(self.layout.num_micro_batches(size))]

    def __iter__(self) -> SequenceLoader:
        """Start the workers unless they run. A second iterator continues at the position of the first."""
        self._items = self._items or self._start()
        return self

    def __next__(self) -> Batch:
        batch = self._next_item()
        if isinstance(batch, (ConfigError, LoaderError)):
            raise batch
        order = self._order
        self._num_returned += order.micro_batch_size * order.num_ranks  # sequences of this step, of all ranks
        if self._num_returned >= order.step_size(self._step_began).global_batch_size:
            self._step_began, self._num_returned = self.state_dict()["sequences"], 0
        if self._prefetcher is not None:
            self._prefetcher.advance(self.state_dict()["sequences"])
        return batch

    def _data_loader(self) -> DataLoader[Any]:
        order: Any = self._order  # an endless one, which torch's types do not foresee
        return DataLoader(self._sequences, batch_sampler=order, **self._settings())


def _set_up_worker(worker: int) -> None:
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


def _as_is(item: Any) -> Any:
    return item
