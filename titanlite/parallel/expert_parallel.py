"""Expert parallel: the experts of each mixture are partitioned over the ranks along the `expert` axis, and
tokens travel to the ranks of their experts and back (Lepikhin et al. 2020). FSDP shards each expert over the
remaining ranks, along `expert_fsdp`. No expert is cut, and no token is dropped.

Nothing has to be scaled: the loss is divided by the tokens of all ranks before the backward, and every
gradient is a sum, over the tokens that reached an expert and over `expert_fsdp` and `dp_replicate`.

With tensor parallel each rank routes its own tokens, which sequence parallel has sharded already. Experts
then have the `expert` axis at every degree, also at 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanlite.config.component import ConfigError
from titanlite.mesh import Mesh, local_shard
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.moe import Experts, Routing, moe_layers_of, places, sum_by_token
from titanlite.parallelism import EXPERT_KEY, Degrees, Parallelism
from titanlite.torch_compat import gather_shards, reduce_shards

KEY = f"parallelism.{EXPERT_KEY}"
EXPERTS = 0  # the dim of the parameters [E, ...] of experts that expert parallel shards


def check_expert_parallel(parallelism: Parallelism, degrees: Degrees, model: ModelFamily) -> None:
    """Raises ConfigError if the experts of `model` cannot be partitioned over the ranks."""
    degree, num_experts = parallelism.expert_parallel_degree, model.num_experts
    if not num_experts:
        if degree > 1:
            raise ConfigError(f"{model.title} has no experts: set it to 1", KEY)
        return
    num_ranks = degrees.dp_shard * degrees.cp * degrees.tp
    if num_ranks % degree:
        raise ConfigError(
            f"{degree} does not divide the {num_ranks} ranks of dp_shard {degrees.dp_shard} x "
            f"cp {degrees.cp} x tp {degrees.tp}; possible: {_divisors(num_ranks, num_experts)}",
            KEY,
        )
    if num_experts % degree:
        raise ConfigError(
            f"{degree} does not divide n_experts = {num_experts} of {model.title}; possible: "
            f"{_divisors(num_ranks, num_experts)}",
            KEY,
        )
    rest, rows = num_ranks // degree, model.config.expert_rows

    def fits(degree: int) -> bool:
        """Whether FSDP can shard the experts of a rank, or else their rows."""
        rest = num_ranks // degree
        return not (num_experts // degree) % rest or not any(size % rest for size in rows.values())

    if (degree > 1 or degrees.tp > 1) and not fits(degree):
        name, size = next((name, size) for name, size in rows.items() if size % rest)
        possible = [n for n in _common_divisors(num_ranks, num_experts) if fits(n)]
        advice = f"possible: {', '.join(map(str, possible))}" if possible else "change the number of ranks"
        raise ConfigError(
            f"FSDP cannot shard {num_experts // degree} experts per rank over {rest} ranks: neither their "
            f"number nor {name} = {size} is divisible by {rest}; {advice}",
            KEY,
        )


def _divisors(*numbers: int) -> str:
    """The common divisors of the numbers, for messages."""
    return ", ".join(map(str, _common_divisors(*numbers)))


def _common_divisors(*numbers: int) -> list[int]:
    return [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]


def apply_expert_parallel(net: Decoder, mesh: Mesh, parallelism: Parallelism) -> None:
    """Partition the experts of `net` over the ranks, in place, if the mesh has separate axes for experts.
    Call it before all other transforms."""
    if not mesh.has_expert_axes:
        return
    for layer in moe_layers_of(net):
        _partition(layer.experts, mesh)
        if mesh.expert_degree > 1:
            dispatch = Gather if parallelism.gathers_tokens(layer.gate.num_chosen) else AllToAll
            layer.dispatch = dispatch(mesh.expert.get_group())


def fsdp_dim(experts: Experts, mesh: Mesh) -> Callable[[nn.Parameter], Shard]:
    """The dim that FSDP shards of all parameters of `experts`: whole experts if the ranks have equally many,
    otherwise their rows."""
    num_local = len(experts.gate_up_proj) // mesh.expert_degree
    dim = EXPERTS if num_local % mesh.expert_fsdp.shape[-1] == 0 else 1
    return lambda parameter: Shard(dim)


def _partition(experts: Experts, mesh: Mesh) -> None:
    """Replace the parameters by DTensors of which this rank has its experts, and compute with its shards."""
    for name, weight in list(experts.named_parameters(recurse=False)):
        sharded = nn.Parameter(
            distribute_tensor(weight, mesh.expert, [Shard(EXPERTS)]), requires_grad=weight.requires_grad
        )
        experts.register_parameter(name, sharded)
    product = experts.product

    def local_product(*inputs: torch.Tensor) -> torch.Tensor:
        return product(*(local_shard(x) if isinstance(x, DTensor) else x for x in inputs))

    experts.product = local_product


class AllToAll:
    """Dispatches tokens by an all-to-all of one copy of a token per expert that it goes to, and another one
    for the results. `group`: the ranks along `expert`.

    Shape suffixes: P = this rank's pairs of token and expert, R = pairs that arrive here, S = ranks of the
    group, L = experts per rank. All ranks of the group take part, also a rank without tokens for others or
    from others."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def __call__(
        self, h_ND: torch.Tensor, routing: Routing, experts: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        num_chosen = routing.experts_NK.shape[1]
        order_P = routing.experts_NK.flatten().argsort(stable=True)
        place_P = places(order_P, len(order_P))
        x_PD = _Permute.apply(h_ND, order_P, place_P, num_chosen)
        weights_P1 = _Permute.apply(routing.weights_NK.view(-1, 1), order_P, place_P, 1)
        y_PD = self._remote(experts, x_PD, weights_P1, routing.counts_E)
        return _SumByToken.apply(y_PD, order_P, place_P, num_chosen)

    def _remote(
        self,
        experts: Callable[..., torch.Tensor],
        x_PD: torch.Tensor,
        weights_P1: torch.Tensor,
        counts_E: torch.Tensor,
    ) -> torch.Tensor:
        """Send each token of `x_PD`, which is sorted by expert, to the rank of its expert, apply the expert,
        and return the outputs times `weights_P1`."""
        sent_SL = counts_E.unflatten(0, (self._group.size(), -1)).contiguous()
        received_SL = torch.empty_like(sent_SL)
        dist.all_to_all_single(received_SL, sent_SL, group=self._group)
        # The only host synchronisation of a mixture: the host must know how many rows to exchange.
        sent, received = torch.stack((sent_SL.sum(1), received_SL.sum(1))).tolist()
        order_R = _order_by_expert(received_SL, sum(received))
        x_RD = _Exchange.apply(x_PD, sent, received, self._group)
        weights_R1 = _Exchange.apply(weights_P1, sent, received, self._group)
        y_RD = experts(x_RD, weights_R1, order_R, received_SL.sum(0))
        return _Exchange.apply(y_RD, received, sent, self._group)


class Gather:
    """Gathers the tokens of all ranks of the group. Each rank sums the outputs of its own experts for all
    tokens, and a reduce-scatter adds up the sums of all ranks. `group`: the ranks along `expert`. In
    training they have equal numbers of tokens. Without gradients they may not, as when they
    score different questions, and tokens take the way of AllToAll.

    Shape suffixes: M = tokens of all ranks, R = pairs of token and expert for this rank's experts, L =
    experts per rank. A rank whose experts get no token takes part."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self._of_any_sizes = group, AllToAll(group)

    def __call__(
        self, h_ND: torch.Tensor, routing: Routing, experts: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self._of_any_sizes(h_ND, routing, experts)
        num_experts = len(routing.counts_E) // self._group.size()
        expert_MK = _gather(routing.experts_NK, self._group) - self._group.rank() * num_experts
        expert_MK = expert_MK.where((expert_MK >= 0) & (expert_MK < num_experts), num_experts)
        is_chosen = torch.zeros(len(expert_MK), num_experts + 1, dtype=torch.bool, device=h_ND.device)
        counts_L = is_chosen.scatter(1, expert_MK, True)[:, :-1].sum(0)
        order_MK = expert_MK.flatten().argsort(stable=True)  # pairs for other ranks come last
        h_MD = _GatherTokens.apply(h_ND, self._group)
        weights_MK = _GatherTokens.apply(routing.weights_NK, self._group)
        num_rows = int(counts_L.sum())  # the only host synchronisation of a mixture
        y_MD = experts(h_MD, weights_MK, order_MK[:num_rows], counts_L)
        return _SumAndScatter.apply(y_MD, self._group)


class _Permute(torch.autograd.Function):
    """Rows of tokens, [N, D], to rows of pairs sorted by expert, [P, D]. `order_P`: the pairs in sorted
    order. `place_P`: its inverse."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor, num_chosen: int
    ) -> torch.Tensor:
        ctx.save_for_backward(place_P)
        ctx.num_chosen = num_chosen
        return h_ND.index_select(0, order_P // num_chosen)

    @staticmethod
    def backward(ctx: Any, g_PD: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (place_P,) = ctx.saved_tensors
        return sum_by_token(g_PD, place_P, ctx.num_chosen), None, None, None


class _SumByToken(torch.autograd.Function):
    """sum_by_token, with a gather as its backward. Takes the same arguments as _Permute."""

    @staticmethod
    def forward(
        ctx: Any, y_PD: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor, num_chosen: int
    ) -> torch.Tensor:
        ctx.save_for_backward(order_P)
        ctx.num_chosen = num_chosen
        return sum_by_token(y_PD, place_P, num_chosen)

    @staticmethod
    def backward(ctx: Any, g_ND: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (order_P,) = ctx.saved_tensors
        return g_ND.index_select(0, order_P // ctx.num_chosen), None, None, None


def _order_by_expert(counts_SL: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The order, int64 [R], that sorts rows by expert, then by rank, if they are sorted by rank, then by
    expert. `counts_SL`: the rows of each. `num_rows`: their sum."""
    num_ranks, num_experts = counts_SL.shape
    expert_SL = torch.arange(num_experts, device=counts_SL.device).expand(num_ranks, -1)
    expert_R = expert_SL.flatten().repeat_interleave(counts_SL.flatten(), output_size=num_rows)
    return expert_R.argsort(stable=True)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows. `sent`, `received`: the numbers of rows to and from each rank. The backward sends
    the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x_RD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _GatherTokens(torch.autograd.Function):
    """The tokens [M, D] of all ranks of a group, in the order of the ranks. The backward adds up the
    gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, h_ND: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(h_ND, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_and_scatter(gradients[0], ctx.group), None


class _SumAndScatter(torch.autograd.Function):
    """The sums over the ranks of a group of this rank's tokens [N, D] in `y_MD`."""

    @staticmethod
    def forward(ctx: Any, y_MD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum_and_scatter(y_MD, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(gradients[0], ctx.group), None


def _gather(x_ND: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rows = x_ND.new_empty(group.size() * x_ND.shape[0], *x_ND.shape[1:])
    gather_shards(rows, x_ND.contiguous(), group)
    return rows


def _sum_and_scatter(x_MD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rows = x_MD.new_empty(x_MD.shape[0] // group.size(), *x_MD.shape[1:])
    reduce_shards(rows, x_MD.contiguous(), group)
    return rows


def _exchange(
    x_RD: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    rows = x_RD.new_empty(sum(received), *x_RD.shape[1:])
    dist.all_to_all_single(rows, x_RD.contiguous(), received, sent, group=group)
    return rows
