"""Activation checkpointing (recompute): less memory for more arithmetic. Only `forward` is replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from titanlite.models.base import Decoder


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Recompute activations in the backward instead of keeping them."""

    mode: Literal["none", "full"] = "none"
    """`full`: keep only each block's input and run the block again in the backward."""


def apply_recompute(net: Decoder, config: ActivationCheckpoint) -> None:
    """Replace the blocks' forwards, before compile."""
    if config.mode == "full":
        for block in net.blocks().values():
            _recompute(block)


def _recompute(block: nn.Module) -> None:
    inner = block.forward

    # A def, not functools.partial: compile skips a partial, and would silently compile nothing.
    def forward(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False)

    block.forward = forward
