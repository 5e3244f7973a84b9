"""Ranks: this rank among all ranks of the run, as the metrics need it of the Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """All methods are collective, and give every rank the same result."""

    @property
    def device(self) -> torch.device: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of `value` over all ranks; may be in place."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks."""

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """The same number of floats from each rank, in the order of the ranks. Waits for the device."""
