"""Ranks of which only one exists, and results of steps, for metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from titanlite.data.step_sizes import StepSize
from titanlite.metrics.metric import StepResult
from titanlite.parallel.clip import GradNorms
from titanlite.step_clock import StepClock


@dataclass
class FakeRanks:
    """A rank that has no others, unless `floats` and `values` give the values of all ranks."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    floats: Callable[[], list[list[float]]] | None = None
    values: Sequence[Any] | None = None
    clock: Any = field(default_factory=lambda: StepClock(torch.device("cpu")))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """`value`: the only summand."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        return [value] if self.values is None else list(self.values)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks."""
        return [list(values)] if self.floats is None else self.floats()


ONE = torch.ones(())
STEP = StepResult(
    step=1,
    size=StepSize(0, 10),
    first_sequence=0,
    micro_batches=[],
    num_targets=ONE.long(),
    loss=ONE,
    grad_norms=GradNorms(ONE, [], ONE[None][:0]),
    applied=ONE.bool(),
    token_statistics=None,
)
DETAILED = replace(STEP, token_statistics=object())
