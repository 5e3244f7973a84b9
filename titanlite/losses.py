"""Losses: from hidden states and the head's weight to one number, the sum over the tokens that count, in
fp32.

Sums, never means: what a step divides by is the number of counted tokens over all ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from titanlite.config.component import Component


@dataclass(frozen=True, kw_only=True)
class Loss(Component):
    """Kind: `[loss] name = ...`."""

    def build(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """A function of hidden [B, T, D], head weight [V, D] and targets int64 [B, T]: the fp32 sum over
        counted targets."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss, name="cross_entropy"):
    """Cross-entropy over the full logits, in fp32. Targets of -100 do not count."""

    def build(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        return cross_entropy


def cross_entropy(
    hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, targets_BT: torch.Tensor
) -> torch.Tensor:
    """Sum of -log p(target), fp32 scalar; zero (not NaN) where no target counts."""
    logits_BTV = F.linear(hidden_BTD, weight_VD).float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
