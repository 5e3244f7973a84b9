"""The loader of a stream: returns each rank's micro-batches, and keeps the place in the stream."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.component import ConfigError, Unreadable, keys_in
from titanlite.data.background import Background
from titanlite.data.batch import Batch
from titanlite.data.loader import as_is, check_shared_memory, set_up_worker
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.data.stream_batches import State, StreamedBatches
from titanlite.errors import LoaderError


class StreamLoader:
    """An endless iterator over this rank's micro-batches of a stream, with the interface of SequenceLoader.

    torchdata's StatefulDataLoader runs the workers, and keeps the state of each after the last micro-batch
    that was returned, whatever is prefetched. `state`: that of a checkpoint, by `gathered_state` on the same
    layout; {} for a new run."""

    def __init__(self, batches: StreamedBatches, step_sizes: StepSizes, pin_memory: bool, state: State):
        self._dataset, self._step_sizes, self._pin_memory = batches, step_sizes, pin_memory
        own: State = state["states"][batches.rank] if state else {"returned": 0, "loader": {}}
        self._returned: int = own["returned"]  # micro-batches
        self._state: State = own["loader"]  # of the StatefulDataLoader after the last one
        self._saved = own  # as it was after the last complete step
        self._batches: Iterator[tuple[Batch, State]] | Background[tuple[Batch, State]] | None = None
        self.while_waiting: Callable[[float, str], None] | None = None
        """Called twice per second while no batch arrives: see Background."""

    def gathered_state(self, gather: Callable[[Any], list[Any]]) -> State:
        """Return the state of the loaders of all ranks after the last complete step, as JSON values.
        `gather`: returns a value of every rank. Collective."""
        layout, rank = self._dataset.layout, self._dataset.rank
        by_rank = dict(gather((rank, self._saved)))  # ranks with the same data have the same state
        return {**asdict(layout), "states": [by_rank[rank] for rank in range(layout.num_ranks)]}

    def state_dict(self) -> dict[str, int]:
        """Return the number of sequences that all ranks have returned."""
        layout = self._dataset.layout
        return {"sequences": self._returned * layout.micro_batch_size * layout.num_ranks}

    def next_step(self, device: torch.device) -> tuple[StepSize, list[Batch]]:
        """Return the size of the next step, and this rank's micro-batches of it, on `device`."""
        layout, size = self._dataset.layout, self._step_sizes.at(self.state_dict()["sequences"])
        count = size.global_batch_size // (layout.micro_batch_size * layout.num_ranks)
        batches = [self._on(device, next(self).split(size.num_splits)) for _ in range(count)]
        self._saved = {"returned": self._returned, "loader": self._state}
        return size, batches

    def _on(self, device: torch.device, batch: Batch) -> Batch:
        # Splitting computes new positions in pageable memory, from which a copy would wait for the device.
        return (batch.pin_memory() if self._pin_memory else batch).to(device)

    def __iter__(self) -> StreamLoader:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        batch, self._state = next(self._batches)
        if isinstance(batch, Unreadable):  # another attempt may succeed
            raise LoaderError(str(batch))
        if isinstance(batch, ConfigError):
            with keys_in("data.sources.0"):
                raise batch
        self._returned += 1
        return batch

    def close(self) -> None:
        """End the workers."""
        batches, self._batches = self._batches, None
        if isinstance(batches, Background):
            batches.close()

    def _start(self) -> Iterator[tuple[Batch, State]] | Background[tuple[Batch, State]]:
        num_workers = self._dataset.layout.num_workers
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecates
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = StatefulDataLoader(
                self._dataset,
                batch_size=None,
                num_workers=num_workers,
                collate_fn=as_is,  # the dataset yields whole Batches: nothing is left to collate
                pin_memory=self._pin_memory,
                prefetch_factor=4 if num_workers else None,
                worker_init_fn=set_up_worker,
                snapshot_every_n_steps=1,
            )
        if self._state:
            loader.load_state_dict(self._state)
        device = torch.cuda.current_device() if self._pin_memory else None

        def start() -> Iterator[tuple[Batch, State]]:
            if device is not None:
                torch.cuda.set_device(device)  # the setting is per thread, and pinning memory uses it
            batches = iter(loader)  # starts the workers
            return ((batch, loader.state_dict()) for batch in batches)

        if not num_workers:
            return start()
        check_shared_memory(num_workers)
        return Background(start, self.while_waiting)
