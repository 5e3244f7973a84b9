"""The contract of an optimizer: built from named parameters, its learning rate set from outside each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from titanlite.config.component import Component, ConfigError


@dataclass(frozen=True, kw_only=True)
class Optimizer(Component):
    """Kind: `[optimizer] name = ...`."""

    lr: float = 3e-4
    """Peak learning rate, what the schedule's factor is applied to."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"{self.lr} is not above 0 and finite", "lr")

    def build(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of this rank's named parameters. Every group keeps its peak rate under `peak_lr`."""
        raise NotImplementedError


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set each group's rate to `factor` times its peak; returns the first group's, for the log."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return optimizer.param_groups[0]["lr"]
