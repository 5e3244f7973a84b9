"""Tensor parallel with sequence parallel: each layer's weights are divided over the ranks of the `tensor`
axis, and between the layers each of these ranks has its share of the tokens (Korthikanti et al. 2022).

A family says in its table which layer is divided how (`Decoder.tensor_plan`); torch's styles do it. The loss
is of all tokens and divided over the vocabulary: it gathers the hidden states for its part of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.config.component import ConfigError
from titanlite.losses import VocabularyPart
from titanlite.models.base import Decoder, LossFunction
from titanlite.parallel.float8 import Float8, rowwise_style, shared_cast

TOKENS = 1  # the dim of [B, T, D] that is divided between the layers
HEADS = 2  # the dim of [B, T, H, E] that is divided within attention


def apply_tensor(net: Decoder, mesh: DeviceMesh, float8: Float8) -> None:
    """Divide the layers that `net.tensor_plan` names, in place; after float8, before recompute, compile and
    FSDP. Raises ConfigError for a plan that names what is not there, or leaves a parameter out."""
    if mesh.device_type != "cuda":
        float8 = Float8()  # gloo cannot send it; the layers then cast what has arrived
    styles: dict[str, Callable[[nn.Module], ParallelStyle]] = {
        "embedding": lambda _: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(TOKENS)),
        "sequence": lambda _: SequenceParallel(sequence_dim=TOKENS),
        "gather": lambda module: _GatherTokens(shared_cast(module, float8)),
        "colwise": lambda _: ColwiseParallel(),
        "rowwise": lambda module: rowwise_style(module, float8)(output_layouts=Shard(TOKENS)),
        # The weight is the same on all ranks, and its gradient the sum of theirs, whichever dim is divided.
        "heads": lambda _: SequenceParallel(sequence_dim=HEADS, use_local_output=True),
        "head": lambda _: _DivideRows(),
    }
    names = [name for name, _ in net.named_modules()]
    for pattern, style in net.tensor_plan.items():
        found = [name for name in names if fnmatch(name, pattern)]
        if not found:
            raise ConfigError(f"tensor_plan: {pattern!r} is no module of the model", "model.name")
        for name in found:
            parallelize_module(net, mesh, {name: styles[style](net.get_submodule(name))})
            if style == "embedding":
                # Its output is still on its way, and a compiled block drops the gradient of such a tensor
                # (pytorch issue 191113); a copy has arrived.
                net.get_submodule(name).register_forward_hook(lambda module, tokens, found: found.clone())
    # Each rank would have a gradient of its own for what is left out, and soon weights of its own.
    if left := [name for name, p in net.named_parameters() if not isinstance(p, DTensor)]:
        raise ConfigError(f"tensor_plan: no pattern is for {left[0].rpartition('.')[0]!r}", "model.name")


def vocabulary_part(vocab_size: int, mesh: DeviceMesh) -> VocabularyPart:
    """This rank's part of the head."""
    size = vocab_size // mesh.size()
    return VocabularyPart(
        first=mesh.get_local_rank() * size,
        maximum=lambda x: funcol.all_reduce(x, "max", mesh),
        total=lambda x: funcol.all_reduce(x, "sum", mesh),
    )


def of_all_tokens(loss: LossFunction, mesh: DeviceMesh) -> LossFunction:
    """`loss`, of this rank's part of the head, as a function of its part of the tokens."""

    def gathered(h_BTD: torch.Tensor, weight_VD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        assert isinstance(weight_VD, DTensor)
        hidden = _gather(h_BTD, mesh).to_local(grad_placements=[Partial()])  # each has its part's gradient
        return loss(hidden, weight_VD.to_local(grad_placements=[Shard(0)]), targets_BT)

    return gathered


def logits_of_all_tokens(mesh: DeviceMesh) -> LossFunction:
    """In the place of a loss: the whole logits [B, T, V], on every rank."""

    def logits(h_BTD: torch.Tensor, weight_VD: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        assert isinstance(weight_VD, DTensor)
        hidden = _gather(h_BTD, mesh).to_local()
        part = nn.functional.linear(hidden, weight_VD.to_local().to(hidden.dtype))
        return DTensor.from_local(part, mesh, [Shard(2)], run_check=False).full_tensor()

    return logits


def _gather(
    x: torch.Tensor, mesh: DeviceMesh, cast: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> DTensor:
    """All tokens of what is divided by tokens, after a `cast`."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Shard(TOKENS)], run_check=False)
    divided: Any = x if cast is None else cast(x)
    return divided.redistribute(placements=[Replicate()])


class _GatherTokens(ParallelStyle):
    """The module's first input is of all tokens, after a `cast`, once for all layers in it that are divided
    by columns."""

    def __init__(self, cast: Callable[[torch.Tensor], torch.Tensor] | None):
        self.cast = cast

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, args: (_gather(args[0], device_mesh, self.cast), *args[1:])
        )
        return module


class _DivideRows(ParallelStyle):
    """The weight is divided by rows, and the module called as it is."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

        return distribute_module(module, device_mesh, divide)
