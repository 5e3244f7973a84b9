"""torch.compile, block by block and in place: parameter names stay, one graph serves all blocks, and a graph
break is an error. Blocks whose experts have separate axes (Mesh.has_expert_axes) are compiled in
pieces, because the exchange of tokens and FSDP's hooks between the pieces cannot be compiled. Compilations
after the first step are counted and logged with their reasons.

Each sequence length has a separate graph. By default, torch would make a second graph with symbolic sizes
for all lengths but the first. Its kernels may be slower, and a run that resumes with such a length would not
have it, so that results might differ in their last bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from titanlite.config.component import ConfigError, suggest
from titanlite.config.paths import PathText
from titanlite.log import logger
from titanlite.models.base import Decoder
from titanlite.models.moe import MoE, moe_layers_of
from titanlite.torch_compat import (
    Compilation,
    allow_many_graphs,
    compilations,
    deterministic_options,
    mark_dynamic,
)

BACKENDS_WITH_MEMORY_BUDGET = ("inductor", "aot_eager")


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compilation by torch.compile."""

    enable: bool = False
    """Compile each block and the loss."""
    backend: str = "inductor"
    """`inductor` generates kernels. `aot_eager` and `eager` run the traced graphs with torch's operators, to
    find the cause of an error."""
    cuda_graphs: bool | None = None
    """Launch forward and backward of a micro-batch as one CUDA graph, with the same results: for small models
    and micro-batches on one GPU, without experts and document masks. Activations stay reserved. Unset: on for
    compiled models of at most 1e9 parameters if the GPU has memory for the graph, unless the model, the loss
    or the attention backend comes from another package (docs/performance.md)."""
    cache_dir: PathText = ""
    """Folder of compiled code, which later starts execute: it must be yours alone, outside the run folder.
    Empty: `$TORCHINDUCTOR_CACHE_DIR` if set, else `titanlite/compile` in `$XDG_CACHE_HOME` or `~/.cache`; if
    others may write to that, a folder of torch's choice, with a warning."""

    def __post_init__(self) -> None:
        if self.backend != "inductor":  # the list of backends takes a second to import
            known = torch.compiler.list_backends(exclude_tags=())
            if self.backend not in known:
                raise ConfigError(
                    f"unknown backend {self.backend!r}{suggest(self.backend, known)}", "backend"
                )

    def check(self, world_size: int, has_experts: bool, masks_documents: bool, cpu_offload: bool) -> None:
        """Raises ConfigError for CUDA graphs of work that cannot be recorded: collectives of several ranks,
        copies from the CPU, and kernels whose shapes depend on the data."""
        if not self.cuda_graphs:
            return
        for on, why in (
            (world_size > 1, f"work on one GPU, not on {world_size} ranks"),
            (cpu_offload, "do not work with training.enable_cpu_offload"),
            (has_experts, "do not work with experts"),
            (
                masks_documents,
                "do not work with document masks, whose shapes change: see data.mask_documents",
            ),
        ):
            if on:
                raise ConfigError(f"CUDA graphs {why}", "compile.cuda_graphs")

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError for CUDA graphs on another device."""
        if self.cuda_graphs and device.type != "cuda":
            raise ConfigError(f"needs a CUDA device, not {device.type}", "compile.cuda_graphs")

    @property
    def loss_backend(self) -> str | None:
        """The backend that compiles the loss; None: do not compile."""
        return self.backend if self.enable else None


def apply_compile(
    net: Decoder, config: Compile, has_expert_axes: bool = False, options: dict[str, Any] | None = None
) -> None:
    """Compile the blocks and the model's compiled_modules in place. Call it after activation checkpointing
    and before FSDP. `has_expert_axes`: Mesh.has_expert_axes. `options`: of torch.compile."""
    if config.enable:
        allow_many_graphs()
        for module in (*net.compiled_modules(), *net.blocks().values()):
            if has_expert_axes and (layers := moe_layers_of(module)):
                _compile_pieces(module, layers, config, options)
            else:
                chosen = deterministic_options(config.backend, options)
                module.compile(fullgraph=True, dynamic=False, backend=config.backend, options=chosen)


def compile_forwards(net: Decoder, config: Compile, options: dict[str, Any] | None = None) -> None:
    """Compile only the forwards of the blocks, for tensor parallel. Call it before activation checkpointing,
    which then repeats compiled forwards. `options`: of torch.compile, for all functions but routers and the
    products of experts."""
    if config.enable:
        allow_many_graphs()
        for block in net.blocks().values():
            if layers := moe_layers_of(block):
                _compile_pieces(block, layers, config, options)
            else:
                block.forward = _compiled(block.forward, config, options)


def _compiled(
    function: Callable[..., Any], config: Compile, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    options = deterministic_options(config.backend, options)
    return torch.compile(function, fullgraph=True, dynamic=False, backend=config.backend, options=options)


def _compile_pieces(
    block: Any, layers: list[MoE], config: Compile, options: dict[str, Any] | None = None
) -> None:
    """Compile what a block does before its experts, the router, shared experts and the products of the
    experts. `options`: of torch.compile, for all functions but routers and the products of experts."""
    block.attend = _compiled(block.attend, config, options)
    for layer in layers:
        for module in layer.children():
            if module is not layer.experts:
                collects = module is not layer.gate  # shared experts are sharded, the router is not
                module.forward = _compiled(module.forward, config, options if collects else None)
        layer.experts.product = _compiled_for_any_rows(layer.experts.product, config)


def _compiled_for_any_rows(product: Callable[..., torch.Tensor], config: Compile) -> Callable[..., Any]:
    """`product` as one graph for all numbers of rows above 1 of its first three arguments."""
    compiled = _compiled(product, config)

    def for_any_rows(
        h_ND: torch.Tensor, weights_NK: torch.Tensor, order_P: torch.Tensor, *args: torch.Tensor
    ) -> torch.Tensor:
        for rows in (h_ND, weights_NK, order_P):
            mark_dynamic(rows, 0)
        return compiled(h_ND, weights_NK, order_P, *args)

    return for_any_rows


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
