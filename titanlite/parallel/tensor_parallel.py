"""Tensor parallel with sequence parallel: each layer's weights are sharded over the ranks along the `tp`
axis, and between the layers each of these ranks has some of the tokens (Korthikanti et al. 2022).

`Decoder.tp_plan` names the style of each layer; torch's parallel styles shard it. The head is sharded over
the vocabulary, and head_fn gathers the hidden states of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.config.component import ConfigError
from titanlite.losses import VocabularyShard
from titanlite.mesh import local_shard
from titanlite.models.base import Decoder, HeadFn, logits
from titanlite.models.gated_delta_net import GatedDeltaNet
from titanlite.models.layers import ElementwiseLayer, Linear, RMSNorm
from titanlite.models.lora import LoRALinear, low_rank_product
from titanlite.models.moe import Router
from titanlite.parallel.float8 import Float8, rowwise_style, shared_cast
from titanlite.torch_compat import all_reduce

TOKENS = 1  # the dim of [B, T, D] that is sharded between the layers
HEADS = 2  # the dim of [B, T, H, E] that is sharded within attention


def apply_tensor_parallel(net: Decoder, mesh: DeviceMesh, float8: Float8) -> None:
    """Shard the layers that `net.tp_plan` names, in place. Call it after float8 and before all other
    transforms. Raises ConfigError for a pattern that matches no module, and for a parameter that no pattern
    matches."""
    if not can_send_float8(mesh):
        float8 = Float8()  # layers cast their inputs after the collective
    styles: dict[str, Callable[[nn.Module], ParallelStyle]] = {
        "embedding": lambda _: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(TOKENS)),
        "sequence": lambda _: SequenceParallel(sequence_dim=TOKENS),
        "residual": lambda _: SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "gather": lambda module: _GatherTokens(shared_cast(module, float8)),
        "gather_sinks": lambda module: _GatherTokensWithSinks(shared_cast(module, float8)),
        "gated_delta_net": lambda _: _GatherTokensOfDeltaNet(None),
        "colwise": lambda _: _WithAdapter(ColwiseParallel(), COLWISE_ADAPTER),
        "rowwise": lambda module: _WithAdapter(
            rowwise_style(module, float8)(output_layouts=Shard(TOKENS)), ROWWISE_ADAPTER
        ),
        # SequenceParallel replicates the weight and sums its gradient over ranks, for any sharded dim.
        "heads": lambda _: SequenceParallel(sequence_dim=HEADS, use_local_output=True),
        "all_heads": lambda _: _ShardNorm(),
        "tokens": lambda _: _WithAdapter(SequenceParallel(sequence_dim=TOKENS), TOKENS_ADAPTER),
        "own_tokens": lambda _: SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "gather_colwise": lambda _: _WithAdapter(
            ColwiseParallel(input_layouts=Shard(TOKENS)), COLWISE_ADAPTER
        ),
        "gather_output": lambda _: _GatherOutput(),
        "head": lambda _: _ShardRows(),
        "local": lambda _: _LocalTokens(),
        "router": lambda _: _ReplicateRouter(),
        "elementwise": lambda _: _ReplicateElementwise(),
    }
    names = [name for name, _ in net.named_modules()]
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    for pattern, style in net.tp_plan.items():
        matching = [name for name in names if fnmatch(name, pattern)]
        if not matching:
            raise ConfigError(f"tp_plan: {pattern!r} matches no module of the model", "model.name")
        for name in matching:
            parallelize_module(net, mesh, {name: styles[style](net.get_submodule(name))})
            if style == "embedding":
                # The output is an AsyncCollectiveTensor, whose gradient a compiled block drops (pytorch issue
                # 191113). Its copy is a plain tensor.
                net.get_submodule(name).register_forward_hook(lambda module, tokens, hidden: hidden.clone())
    # Gradients of a parameter that is not a DTensor would differ between ranks.
    if missing := [name for name, p in net.named_parameters() if not isinstance(p, DTensor)]:
        raise ConfigError(f"tp_plan: no pattern matches {missing[0].rpartition('.')[0]!r}", "model.name")
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)


def can_send_float8(mesh: DeviceMesh) -> bool:
    """Whether collectives over `mesh` take float8 tensors: gloo's do not."""
    return mesh.device_type == "cuda"


def vocabulary_shard(net: Decoder, mesh: DeviceMesh) -> VocabularyShard:
    """This rank's shard of the model's vocabulary."""
    return VocabularyShard(
        first_id=mesh.get_local_rank() * (net.vocab_size // mesh.size()),
        softcap=net.logit_softcap,
        all_reduce_max=lambda x: all_reduce(x, "max", mesh),
        all_reduce_sum=lambda x: (
            _AllReduceSum.apply(x, mesh) if x.requires_grad else all_reduce(x, "sum", mesh)
        ),
    )


class _AllReduceSum(torch.autograd.Function):
    """A sum over ranks. All ranks compute the same loss from the sum, and the loss counts once. So the
    gradient of each rank's summand is the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return all_reduce(x, "sum", mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def gather_for_loss(
    h_BTD: torch.Tensor, weight_VD: torch.Tensor, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states of all tokens and this rank's rows of the head's weight, as a loss takes them, from
    the hidden states of this rank's tokens and the sharded weight."""
    assert isinstance(weight_VD, DTensor)
    # The gradient of the hidden states is a sum over ranks: each rank has the summand of its rows.
    hidden = _gather(h_BTD, mesh).to_local(grad_placements=[Partial()])
    return hidden, weight_VD.to_local(grad_placements=[Shard(0)])


def gather_logits(mesh: DeviceMesh, softcap: float = 0.0) -> HeadFn:
    """The head_fn that returns the logits of the whole vocabulary, [B, T, V], on every rank."""

    def whole_logits(h_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        assert isinstance(weight_VD, DTensor)
        local = logits(_gather(h_BTD, mesh).to_local(), weight_VD.to_local(), softcap)
        return DTensor.from_local(local, mesh, [Shard(2)], run_check=False).full_tensor()

    return whole_logits


def _gather(
    x: torch.Tensor, mesh: DeviceMesh, cast: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> DTensor:
    """Gather `x`, which is sharded over tokens. `cast` is applied before the collective."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Shard(TOKENS)], run_check=False)
    sharded: Any = x if cast is None else cast(x)
    return sharded.redistribute(placements=[Replicate()])


class _GatherTokens(ParallelStyle):
    """Gathers the module's first input once for all of the module's column-wise layers. `cast` is applied
    before the collective."""

    def __init__(self, cast: Callable[[torch.Tensor], torch.Tensor] | None):
        self.cast = cast

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, args: (_gather(args[0], device_mesh, self.cast), *args[1:])
        )
        return module


class _GatherTokensWithSinks(_GatherTokens):
    """_GatherTokens for attention with sinks, of which each rank has those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard_by_heads(module, device_mesh)
        return super()._apply(module, device_mesh)


def _shard_by_heads(layer: Any, mesh: DeviceMesh) -> None:
    """Shard the layer's own parameters, which have a value for each head, and let its function `own_heads`
    select this rank's."""
    _distribute(layer, mesh, Shard(0))
    layer.own_heads = lambda parameter: parameter.to_local(grad_placements=[Shard(0)])


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make DTensors of the module's own parameters."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))


class _GatherTokensOfDeltaNet(_GatherTokens):
    """_GatherTokens for a gated delta net, of which each rank has some heads. The rows of in_proj_qkv and of
    the convolution are those of all queries, then of all keys and of all values, so that a rank's rows are
    not one shard: these weights are replicated, and each rank computes with its rows only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, GatedDeltaNet)
        if type(module.in_proj_qkv) is not Linear:
            is_adapted = isinstance(module.in_proj_qkv, LoRALinear)
            reason = (
                "an adapter; change lora.targets" if is_adapted else "float8; exclude it: float8.filter_fqns"
            )
            raise ConfigError(
                f"under tensor parallel, in_proj_qkv of gated delta nets does not work with {reason}",
                "parallelism.tensor_parallel_degree",
            )
        _shard_by_heads(module, device_mesh)
        degree, rank = device_mesh.size(), device_mesh.get_local_rank()

        def own_rows(weight: torch.Tensor) -> torch.Tensor:
            assert isinstance(weight, DTensor)
            blocks = _local_with_summed_gradient(weight).split(module.stacked)
            return torch.cat([block.chunk(degree)[rank] for block in blocks])

        layer = module.in_proj_qkv

        def project(x: DTensor) -> torch.Tensor:
            local = x.to_local(grad_placements=[Partial()])
            return F.linear(local, own_rows(layer.weight).to(local.dtype))

        for replicated in (layer, module.conv1d):
            _distribute(replicated, device_mesh, Replicate())
        layer.forward, module.conv1d.own_rows = project, own_rows  # type: ignore[method-assign, assignment]
        return super()._apply(module, device_mesh)


class _GatherOutput(ParallelStyle):
    """Gathers the module's output as a plain tensor with all tokens. Each rank uses it for its own heads, so
    that its gradient is a sum over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(
            lambda module, args, output: _gather(output, device_mesh).to_local(grad_placements=[Partial()])
        )
        return module


class _ShardNorm(ParallelStyle):
    """Shards the weight of an RMSNorm, whose input is sharded over the same features. The ranks add up their
    sums of squares."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        num_features = len(module.weight)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))

        def normalize(x: torch.Tensor, weight: DTensor, eps: float) -> torch.Tensor:
            squares = _sum_over_ranks(x.square().sum(-1, keepdim=True), device_mesh)
            return x * torch.rsqrt(squares / num_features + eps) * weight.to_local()

        module.normalize = normalize
        return module


def _sum_over_ranks(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of `x` over the ranks, each of which uses it for its own features: the gradients are summed,
    too."""
    total = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return total.to_local(grad_placements=[Partial()])


class _LocalTokens(ParallelStyle):
    """Gives a module this rank's tokens as a plain tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(local_shard(arg) for arg in args))
        return module


class _ReplicateElementwise(ParallelStyle):
    """Replicates the parameters of an ElementwiseLayer. Each rank applies them to its own tokens, so that
    their gradients are sums over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, ElementwiseLayer)
        _distribute(module, device_mesh, Replicate())
        degree, rank = device_mesh.size(), device_mesh.get_local_rank()
        module.own = _local_with_summed_gradient
        module.own_tokens = lambda x_BT: x_BT.chunk(degree, 1)[rank]
        return module


class _ReplicateRouter(ParallelStyle):
    """Replicates a router's parameters. Each rank routes its own tokens, so that their gradients are sums
    over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Router)
        product = module.product
        _distribute(module, device_mesh, Replicate())

        def local_product(h_ND: torch.Tensor, *parameters: DTensor) -> torch.Tensor:
            return product(h_ND, *map(_local_with_summed_gradient, parameters))

        module.product = local_product
        return module


def _local_with_summed_gradient(weight: DTensor) -> torch.Tensor:
    """A replicated parameter as a plain tensor, whose gradient is summed over ranks."""
    return weight.to_local(grad_placements=[Partial()])


class _AdapterPlacements(NamedTuple):
    """The placements of an adapter's tensors, along the one dim of the mesh. A rank computes the product from
    its shards of A and B, without a collective. `*_gradient`: placement of the gradient that this gives: of a
    replicated tensor each rank has a summand."""

    a: Placement
    b: Placement
    x_gradient: Placement
    a_gradient: Placement
    b_gradient: Placement
    output: Placement


COLWISE_ADAPTER = _AdapterPlacements(
    a=Replicate(), b=Shard(0),
    x_gradient=Partial(), a_gradient=Partial(), b_gradient=Shard(0), output=Shard(2),
)  # fmt: skip
TOKENS_ADAPTER = _AdapterPlacements(
    a=Replicate(), b=Replicate(),
    x_gradient=Shard(TOKENS), a_gradient=Partial(), b_gradient=Partial(), output=Shard(TOKENS),
)  # fmt: skip
ROWWISE_ADAPTER = _AdapterPlacements(
    a=Shard(1), b=Replicate(),
    x_gradient=Shard(2), a_gradient=Shard(1), b_gradient=Partial(), output=Partial(),
)  # fmt: skip


class _WithAdapter(ParallelStyle):
    """Shards a layer by `style`, and the adapter of the layer, if it has one, in the same way."""

    def __init__(self, style: ParallelStyle, placements: _AdapterPlacements):
        self.style, self.placements = style, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LoRALinear):
            return self.style._apply(module, device_mesh)
        a, b = module.lora_A, module.lora_B
        del module.lora_A, module.lora_B  # torch's styles would take their weights for the layer's own
        self.style._apply(module, device_mesh)
        module.lora_A, module.lora_B = a, b
        for layer, placement in ((a, self.placements.a), (b, self.placements.b)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, device_mesh, [placement]))
        module.product = _sharded_product(device_mesh, self.placements)
        return module


def _sharded_product(mesh: DeviceMesh, placements: _AdapterPlacements) -> Callable[..., torch.Tensor]:
    """low_rank_product for DTensors with these placements."""
    _, _, x_gradient, a_gradient, b_gradient, output = ([placement] for placement in placements)

    def product(x: DTensor, a_RI: DTensor, b_OR: DTensor, scale: float) -> torch.Tensor:
        local = low_rank_product(
            x.to_local(grad_placements=x_gradient),
            a_RI.to_local(grad_placements=a_gradient),
            b_OR.to_local(grad_placements=b_gradient),
            scale,
        )
        return DTensor.from_local(local, mesh, output, run_check=False)

    return product


class _ShardRows(ParallelStyle):
    """Shards the weight by rows, without changing the module's inputs and outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            _distribute(module, mesh, Shard(0))

        return distribute_module(module, device_mesh, shard)
