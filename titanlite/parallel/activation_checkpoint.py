"""Activation checkpointing: recompute activations in the backward, to save memory. Only `forward` methods are
replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.config.component import ConfigError, suggest
from titanlite.models import grouped_mm  # noqa: F401  (registers titanlite::grouped_mm)
from titanlite.models.base import Decoder
from titanlite.parallel.compile import BACKENDS_WITH_MEMORY_BUDGET, Compile
from titanlite.torch_compat import (
    count_grouped_attention,
    grouped_mm_ops,
    matmul_ops,
    sdpa_ops,
    set_activation_memory_budget,
)

MODULES = {"attention": "*_attn", "mlp": "mlp", "norms": "*norm"}  # name patterns of a block's modules


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Recompute activations in the backward instead of keeping them."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """Recompute all but each block's input (`full`), the activations of selective_ac_option (`selective`), or
    the compiler's choice (`memory_budget`)."""
    selective_ac_option: str = "op"
    """`op`: keep the results of attention, of every second matrix product and of the experts' first product.
    A number n: recompute every n-th block. `attention`, `mlp`, `norms`, or several joined by +: recompute
    these modules."""
    memory_budget: float = 0.5
    """Fraction to keep of the activations that the compiler keeps by default. 0: only the blocks' inputs."""

    def __post_init__(self) -> None:
        if not 0 <= self.memory_budget <= 1:
            raise ConfigError(f"{self.memory_budget} is not in [0, 1]", "memory_budget")
        option = self.selective_ac_option
        if option == "op" or (option.isdecimal() and int(option) > 0):
            return
        for name in option.split("+"):
            if name == "op" or name.isdecimal():
                raise ConfigError(
                    f"{name!r} cannot be joined with others; {', '.join(MODULES)} can, by +, and numbers "
                    "begin with 1",
                    "selective_ac_option",
                )
            if name not in MODULES:
                known = {"op", "a number", *MODULES}
                raise ConfigError(f"unknown option {name!r}{suggest(name, known)}", "selective_ac_option")

    @property
    def kept_share(self) -> float:
        """Roughly the largest share of a block's activations that its forward keeps for the backward."""
        if self.mode == "selective":
            option = self.selective_ac_option
            if option.isdecimal():
                return 1 - 1 / int(option)
            return 0.5 if option == "op" else 0.75 if "mlp" in option else 1.0
        return {"none": 1.0, "full": 0.0, "memory_budget": self.memory_budget}[self.mode]

    def check(self, compile: Compile, tensor_parallel: bool, has_expert_axes: bool = False) -> None:
        """Raises ConfigError for a mode that does not work with the section [compile], with tensor parallel
        or with experts on separate mesh axes."""
        if self.mode == "memory_budget" and not compile.enable:
            raise ConfigError(
                "memory_budget needs the compiler: set compile.enable, or choose another mode",
                "activation_checkpoint.mode",
            )
        if self.mode == "memory_budget" and compile.backend not in BACKENDS_WITH_MEMORY_BUDGET:
            raise ConfigError(
                f"memory_budget needs the backend {' or '.join(BACKENDS_WITH_MEMORY_BUDGET)}; "
                f"{compile.backend!r} ignores the budget",
                "compile.backend",
            )
        if has_expert_axes and self.mode == "selective" and self.selective_ac_option == "op":
            raise ConfigError(
                "'op' does not work with experts under expert parallel or tensor parallel; use a number, "
                f'{", ".join(MODULES)} or mode = "full"',
                "activation_checkpoint.selective_ac_option",
            )
        within_blocks = self.mode == "selective" and not self.selective_ac_option.isdecimal()
        if tensor_parallel and compile.enable and within_blocks:
            raise ConfigError(
                f"{self.selective_ac_option!r} does not work with tensor parallel and compile.enable "
                'together; use a number, mode = "full" or mode = "memory_budget"',
                "activation_checkpoint.selective_ac_option",
            )


def apply_activation_checkpoint(
    net: Decoder, config: ActivationCheckpoint, attention_ops: Sequence[str] = ()
) -> None:
    """Replace the forwards of blocks, or of modules in the blocks. Without tensor parallel, call it before
    compile. `attention_ops`: names of the attention backend's own operators (AttentionBackend.kept_ops).
    Raises ConfigError if the model lacks the modules that the configuration names."""
    set_activation_memory_budget(config.memory_budget if config.mode == "memory_budget" else 1.0)
    if config.mode == "memory_budget":
        count_grouped_attention()
    blocks, option = list(net.blocks().values()), config.selective_ac_option
    if config.mode == "full":
        chosen, contexts = blocks, None
    elif config.mode == "selective":
        chosen = _chosen(blocks, option)
        contexts = partial(_keep_costly_results, attention_ops) if option == "op" else None
    else:
        return
    for module in chosen:
        _checkpoint(module, contexts)


def _chosen(blocks: list[nn.Module], option: str) -> list[nn.Module]:
    """The modules whose forward is repeated in the backward."""
    if option == "op":
        return blocks
    if option.isdecimal():
        chosen, wanted = blocks[int(option) - 1 :: int(option)], f"block {option}"
    else:
        patterns = [MODULES[name] for name in option.split("+")]
        chosen = [
            module
            for block in blocks
            for name, module in block.named_children()
            if any(fnmatch(name, pattern) for pattern in patterns)
        ]
        wanted = f"module named {' or '.join(patterns)}"
    if blocks and not chosen:
        raise ConfigError(
            f"{option!r}: the model's {len(blocks)} blocks have no {wanted}",
            "activation_checkpoint.selective_ac_option",
        )
    return chosen


def _checkpoint(module: nn.Module, contexts: Callable[[], Any] | None = None) -> None:
    inner = module.forward
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    # Not a functools.partial: torch.compile silently skips partials.
    def forward(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **options)

    module.forward = forward


_MATMULS = matmul_ops()
_GROUPED = grouped_mm_ops() | {torch.ops.titanlite.grouped_mm.default}
# The maximum of a tensor, for float8's scales, is cheap to keep and costly to compute.
# A router's choice must not differ in the repeated forward.
_KEPT = sdpa_ops() | {torch.ops.aten.max.default, torch.ops.aten.topk.default}


def _keep_costly_results(attention_ops: Sequence[str]) -> Any:
    num_products: Counter[tuple[bool, bool]] = Counter()
    return create_selective_checkpoint_contexts(partial(_policy, attention_ops, num_products))


def _policy(
    attention_ops: Sequence[str],
    num_products: Counter[tuple[bool, bool]],
    ctx: Any,
    op: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    """Keep the results of attention, of every second matrix product and of float8's maxima, as torchtitan
    does; of experts, the choices and every second grouped product. `num_products` counts the matrix products
    and the grouped products of the first and of the repeated forward separately."""
    keep = op in _KEPT or any(name in str(op) for name in attention_ops)
    if op in _MATMULS or op in _GROUPED:
        kind = (ctx.is_recompute, op in _GROUPED)
        num_products[kind] += 1
        keep = num_products[kind] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
