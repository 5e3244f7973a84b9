"""torch.compile, in place and by block: names stay, one graph serves all blocks, a graph break is an error.
Compilations after the first step are counted and logged with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from titanlite.config.component import ConfigError, suggest
from titanlite.log import logger
from titanlite.models.base import Decoder
from titanlite.torch_compat import compilation_metrics

BACKENDS_WITH_MEMORY_BUDGET = ("inductor", "aot_eager")


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile each block and the loss with torch.compile."""

    enable: bool = False
    """On or off."""
    backend: str = "inductor"
    """Backend of torch.compile. `inductor` generates kernels. `aot_eager` and `eager` run the traced graphs
    with torch's own operators: use them to find out whether generated code or tracing causes an error."""

    def __post_init__(self) -> None:
        if self.backend != "inductor":  # torch takes a second to import its list of backends
            known = torch.compiler.list_backends(exclude_tags=())
            if self.backend not in known:
                raise ConfigError(
                    f"unknown backend {self.backend!r}{suggest(self.backend, known)}", "backend"
                )

    @property
    def loss_backend(self) -> str | None:
        """The backend that compiles the loss; None if nothing is compiled."""
        return self.backend if self.enable else None


def apply_compile(net: Decoder, config: Compile) -> None:
    """Compile the blocks in place, after activation checkpointing and before FSDP."""
    if config.enable:
        for block in net.blocks().values():
            block.compile(fullgraph=True, backend=config.backend)


def compile_forwards(net: Decoder, config: Compile) -> None:
    """Compile the forwards of the blocks, before activation checkpointing, which then runs compiled forwards
    again: with tensor parallel, torch 2.13 cannot compile the repeated forward itself."""
    if config.enable:
        for block in net.blocks().values():
            block.forward = torch.compile(block.forward, fullgraph=True, backend=config.backend)


@dataclass
class Compilations:
    """Metrics of compilations, from the compiler's own records (the last 64)."""

    _seen: list[Any] = field(default_factory=compilation_metrics)
    _first: bool = True

    def since_last(self) -> dict[str, float]:
        """Metrics of the compilations since the last call, {} if there were none. From the second call on,
        each compilation is logged with its reason, such as a shape that changed."""
        records = compilation_metrics()
        new = [m for m in records if not any(m is seen for seen in self._seen)]
        graphs = [m for m in new if m.is_forward and m.co_name]  # backwards have records of their own
        for m in [] if self._first else graphs:
            again = (
                f"again: {m.recompile_reason.splitlines()[0]}" if m.recompile_reason else "for the first time"
            )
            logger.warning(f"compiled {m.co_name} {again}")
        self._seen, self._first = records, False
        seconds = sum(m.entire_frame_compile_time_s or 0.0 for m in graphs)
        seconds += sum(m.backward_cumulative_compile_time_us or 0 for m in new) / 1e6
        return {"compile/graphs": len(graphs), "compile/seconds": seconds} if graphs else {}
