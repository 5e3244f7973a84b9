"""torch.compile, in place and by block: names stay, one graph serves all blocks, a break is an error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titanlite.models.base import Decoder, LossFunction


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile each block and the loss with torch.compile."""

    enable: bool = False
    """On or off."""


def apply_compile(net: Decoder, loss: LossFunction, config: Compile) -> LossFunction:
    """Compile the blocks in place, after recompute and before FSDP; returns the loss, compiled too."""
    if not config.enable:
        return loss
    for block in net.blocks().values():
        block.compile(fullgraph=True)
    return torch.compile(loss, fullgraph=True)
