"""torch.compile, in place and by block: names stay, one graph serves all blocks, a break is an error."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.models.base import Decoder


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile each block and the loss with torch.compile."""

    enable: bool = False
    """On or off."""


def apply_compile(net: Decoder, config: Compile) -> None:
    """Compile the blocks in place, after recompute and before FSDP."""
    if config.enable:
        for block in net.blocks().values():
            block.compile(fullgraph=True)
