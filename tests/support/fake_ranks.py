"""Ranks of which only one exists, for metrics that compare ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class FakeRanks:
    """A rank that has no others, unless `floats` and `values` give the values of all ranks."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    floats: Callable[[], list[list[float]]] | None = None
    values: Sequence[Any] | None = None

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """`value`: the only summand."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        return [value] if self.values is None else list(self.values)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks."""
        return [list(values)] if self.floats is None else self.floats()
