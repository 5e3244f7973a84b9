"""torch.compile, block by block and in place: parameter names stay, one graph serves all blocks, and a graph
break is an error. Compilations after the first step are counted and logged with their reasons.

Each sequence length has a graph of its own. By default, torch would make a second graph with symbolic sizes
for all lengths but the first. Its kernels may be slower, and a run that resumes with such a length would not
have it, so that results might differ in their last bits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from titanlite.config.component import ConfigError, suggest
from titanlite.log import logger
from titanlite.models.base import Decoder
from titanlite.torch_compat import Compilation, allow_many_graphs, compilations

BACKENDS_WITH_MEMORY_BUDGET = ("inductor", "aot_eager")


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compilation of each block and of the loss by torch.compile."""

    enable: bool = False
    """Whether to compile."""
    backend: str = "inductor"
    """Backend of torch.compile. `inductor` generates kernels. `aot_eager` and `eager` run the traced graphs
    with torch's operators, to find out whether tracing or generated code causes an error."""

    def __post_init__(self) -> None:
        if self.backend != "inductor":  # the list of backends takes a second to import
            known = torch.compiler.list_backends(exclude_tags=())
            if self.backend not in known:
                raise ConfigError(
                    f"unknown backend {self.backend!r}{suggest(self.backend, known)}", "backend"
                )

    @property
    def loss_backend(self) -> str | None:
        """The backend that compiles the loss; None: do not compile."""
        return self.backend if self.enable else None


def apply_compile(net: Decoder, config: Compile) -> None:
    """Compile the blocks in place. Call it after activation checkpointing and before FSDP."""
    if config.enable:
        allow_many_graphs()
        for block in net.blocks().values():
            block.compile(fullgraph=True, dynamic=False, backend=config.backend)


def compile_forwards(net: Decoder, config: Compile) -> None:
    """Compile only the forwards of the blocks, for tensor parallel. Call it before activation checkpointing,
    which then repeats compiled forwards."""
    if config.enable:
        allow_many_graphs()
        for block in net.blocks().values():
            block.forward = torch.compile(
                block.forward, fullgraph=True, dynamic=False, backend=config.backend
            )


@dataclass
class Compilations:
    """Metrics of compilations, from the compiler's records."""

    _seen: list[Compilation] = field(default_factory=compilations)
    _first: bool = True

    def since_last(self) -> dict[str, float]:
        """Metrics of the compilations since the last call; {} if there were none. All calls but the first log
        each compilation with its reason, such as a shape that changed."""
        recent = compilations()
        new = [item for item in recent if not any(item.record is seen.record for seen in self._seen)]
        graphs = [item for item in new if item.function]
        for graph in [] if self._first else graphs:
            again = f"again: {graph.reason.splitlines()[0]}" if graph.reason else "for the first time"
            logger.warning(f"compiled {graph.function} {again}")
        self._seen, self._first = recent, False
        seconds = sum(item.seconds for item in new)
        return {"compile/graphs": len(graphs), "compile/seconds": seconds} if graphs else {}
