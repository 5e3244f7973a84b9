"""Activation checkpointing: compute activations again in the backward, to keep fewer. Only `forward` methods
are replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.config.component import ConfigError, suggest
from titanlite.models.base import Decoder
from titanlite.parallel.compile import BACKENDS_WITH_MEMORY_BUDGET, Compile
from titanlite.torch_compat import (
    attention_ops,
    count_grouped_attention,
    matmul_ops,
    set_activation_memory_budget,
)

MODULES = {"attention": "self_attn", "mlp": "mlp", "norms": "*norm"}  # of a block, as name patterns


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Activation checkpointing: recompute activations in the backward instead of keeping them."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """`full`: keep only each block's input and run the block again in the backward. `selective`: recompute
    what selective_ac_option says. `memory_budget`: let the compiler choose which activations to keep."""
    selective_ac_option: str = "op"
    """`op`: keep the results of attention and of every second matrix product in a block. A number n:
    recompute every n-th block, as in `full`. `attention`, `mlp` or `norms`, or several joined by +: recompute
    these modules of each block."""
    memory_budget: float = 0.5
    """Fraction of the activations that the compiler would keep by itself: 0 keeps only a block's inputs."""

    def __post_init__(self) -> None:
        if not 0 <= self.memory_budget <= 1:
            raise ConfigError(f"{self.memory_budget} is not in [0, 1]", "memory_budget")
        option = self.selective_ac_option
        if option == "op" or (option.isdecimal() and int(option) > 0):
            return
        for part in option.split("+"):
            if part == "op" or part.isdecimal():
                raise ConfigError(
                    f"{part!r} stands alone; {', '.join(MODULES)} may be joined by +, and numbers "
                    "begin with 1",
                    "selective_ac_option",
                )
            if part not in MODULES:
                known = {"op", "a number", *MODULES}
                raise ConfigError(f"unknown option {part!r}{suggest(part, known)}", "selective_ac_option")

    def check(self, compile: Compile, tensor_parallel: bool) -> None:
        """Raises ConfigError for a mode that does not work with these settings of [compile], or with tensor
        parallel."""
        if self.mode == "memory_budget" and not compile.enable:
            raise ConfigError(
                "memory_budget works only with the compiler: set compile.enable, or another mode",
                "activation_checkpoint.mode",
            )
        if self.mode == "memory_budget" and compile.backend not in BACKENDS_WITH_MEMORY_BUDGET:
            raise ConfigError(
                f"memory_budget needs the backend {' or '.join(BACKENDS_WITH_MEMORY_BUDGET)}; "
                f"{compile.backend!r} ignores the budget",
                "compile.backend",
            )
        of_modules = self.mode == "selective" and not self.selective_ac_option.isdecimal()
        if tensor_parallel and compile.enable and of_modules:
            raise ConfigError(
                f"{self.selective_ac_option!r} does not work with both tensor parallel and compile.enable; "
                'mode = "full", mode = "memory_budget" and a number here do',
                "activation_checkpoint.selective_ac_option",
            )


def apply_activation_checkpoint(net: Decoder, config: ActivationCheckpoint) -> None:
    """Replace forwards of the blocks or of modules in them, before compile. Raises ConfigError if the model
    lacks the modules that the configuration names."""
    set_activation_memory_budget(config.memory_budget if config.mode == "memory_budget" else 1.0)
    if config.mode == "memory_budget":
        count_grouped_attention()
    blocks, option = list(net.blocks().values()), config.selective_ac_option
    if config.mode == "full":
        chosen, contexts = blocks, None
    elif config.mode == "selective":
        chosen = _chosen(blocks, option)
        contexts = _keep_costly_results if option == "op" else None
    else:
        return
    for module in chosen:
        _checkpoint(module, contexts)


def _chosen(blocks: list[nn.Module], option: str) -> list[nn.Module]:
    """The modules that are recomputed."""
    if option == "op":
        return blocks
    if option.isdecimal():
        chosen, wanted = blocks[int(option) - 1 :: int(option)], f"block {option}"
    else:
        patterns = [MODULES[part] for part in option.split("+")]
        chosen = [
            module
            for block in blocks
            for name, module in block.named_children()
            if any(fnmatch(name, pattern) for pattern in patterns)
        ]
        wanted = f"module of a block like {' or '.join(patterns)}"
    if blocks and not chosen:
        raise ConfigError(
            f"{option!r}: the model's {len(blocks)} blocks have no {wanted}",
            "activation_checkpoint.selective_ac_option",
        )
    return chosen


def _checkpoint(module: nn.Module, contexts: Callable[[], Any] | None = None) -> None:
    inner = module.forward
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    # A def, not functools.partial: compile skips a partial, and would silently compile nothing.
    def forward(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **options)

    module.forward = forward


_PRODUCTS, _ATTENTIONS = matmul_ops(), attention_ops()
_MAXIMA = {
    torch.ops.aten.max.default
}  # of a whole tensor, for float8's scales: cheap to keep, costly to compute


def _keep_costly_results() -> Any:
    seen: Counter[bool] = Counter()
    return create_selective_checkpoint_contexts(partial(_policy, seen))


def _policy(seen: Counter[bool], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of attention, of every second matrix product and of float8's maxima, as torchtitan
    does. The repeated forward counts the products as the first one did."""
    # Kernels that are imported when they are first used are known by name.
    keep = (
        op in _ATTENTIONS
        or op in _MAXIMA
        or any(name in str(op) for name in ("varlen_attn", "flex_attention", "head_tail_attention"))
    )
    if op in _PRODUCTS:
        seen[ctx.is_recompute] += 1
        keep = seen[ctx.is_recompute] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
