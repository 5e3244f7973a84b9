"""The loader of a stream: returns each rank's micro-batches, and keeps the place in the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader

from titanlite.config.component import ConfigError, Unreadable, keys_in
from titanlite.data.batch import Batch
from titanlite.data.loader import Loader, LoaderLayout
from titanlite.data.skips import SkippedSequences
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.data.stream_batches import State, StreamedBatch, StreamedBatches, TokenStream
from titanlite.errors import LoaderError


class StreamLoader(Loader[StreamedBatch]):
    """The loader of a stream. A worker sends the state of its share with each micro-batch, so that the state
    is right whatever is prefetched. `state`: of a checkpoint, by `stream_state` on the same layout; {} for a
    new run."""

    def __init__(
        self,
        stream: TokenStream,
        layout: LoaderLayout,
        rank: int,
        step_sizes: StepSizes,
        pin_memory: bool,
        state: Mapping[str, Any],
    ):
        super().__init__(layout, pin_memory)
        self._stream, self._rank, self._step_sizes = stream, rank, step_sizes
        self._saved: State = {"returned": 0, "shares": [{}] * max(layout.num_workers, 1)}
        if state:
            self._saved = state["states"][rank]  # as it was after the last complete step
        self._num_returned: int = self._saved["returned"]  # micro-batches
        self._shares: list[State] = list(self._saved["shares"])  # after the last micro-batch of each

    def stream_state(self, gather: Callable[[Any], list[Any]]) -> State:
        """Return the state of the loaders of all ranks after the last complete step, as JSON values.
        Collective."""
        by_rank = dict(gather((self._rank, self._saved)))  # ranks with the same data have the same state
        return {**asdict(self.layout), "states": [by_rank[rank] for rank in range(self.layout.num_ranks)]}

    def state_dict(self) -> dict[str, int]:
        return {"sequences": self._num_returned * self.layout.micro_batch_size * self.layout.num_ranks}

    def load_state_dict(self, state: dict[str, int], skipped: SkippedSequences | None = None) -> None:
        raise NotImplementedError("a stream cannot be read from a position")

    def next_step(self, device: torch.device) -> tuple[StepSize, list[Batch]]:
        size = self._step_sizes.at(self.state_dict()["sequences"])
        count = self.layout.num_micro_batches(size)
        batches = [self._on(device, next(self).split(size.num_splits)) for _ in range(count)]
        self._saved = {"returned": self._num_returned, "shares": list(self._shares)}
        return size, batches

    def _on(self, device: torch.device, batch: Batch) -> Batch:
        # Splitting computes new positions in pageable memory, from which a copy would wait for the device.
        return (batch.pin_memory() if self._pin_memory else batch).to(device)

    def __next__(self) -> Batch:
        batch, state = self._next_item()
        if isinstance(batch, Unreadable):  # another attempt may succeed
            raise LoaderError(str(batch))
        if isinstance(batch, ConfigError):
            with keys_in("data.sources.0"):
                raise batch
        self._shares[self._num_returned % len(self._shares)] = state
        self._num_returned += 1
        return batch

    def _data_loader(self) -> DataLoader[Any]:
        batches = StreamedBatches(self._stream, self.layout, self._rank, self._num_returned, self._shares)
        return DataLoader(batches, batch_size=None, **self._settings())
