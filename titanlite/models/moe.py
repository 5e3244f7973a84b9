"""Mixtures of experts: the router, the experts and the layer that stands in a block where a dense family has
its MLP. No token is dropped: each token goes to the experts of its choice, however many choose the same.

Shape suffixes: B batch, T tokens, N = B * T tokens, K experts per token, P = N * K pairs of a token and one
of its experts, E experts, D model dim, F hidden dim of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.config.component import ConfigError
from titanlite.models.base import Index, ModelFamily, Role, is_adapter
from titanlite.models.decoder import (
    INIT_STD,
    MLP_PLAN,
    AttentionLayer,
    Block,
    MakeMLP,
    RotaryConfig,
    RotaryDecoder,
    SelfAttention,
)
from titanlite.models.grouped_mm import GroupedMM, grouped_mm, grouped_mm_weight
from titanlite.models.load_balance import RouterLoad, RouterResults, is_load

MULTIPLE = 8  # grouped products in bf16 need rows of a multiple of 16 bytes


@dataclass(frozen=True, kw_only=True)
class MoEConfig(RotaryConfig):
    """The architecture of one flavor with experts. `n_experts`: experts per layer. `n_experts_per_token`: the
    experts that each token chooses. `moe_hidden_dim`: hidden units of one expert. `norm_topk_prob`: whether
    the weights of a token's experts are divided by their sum. `hidden_dim`: hidden units of dense layers.
    `router_init_std`: standard deviation of the initial routers."""

    n_experts: int
    n_experts_per_token: int
    moe_hidden_dim: int
    norm_topk_prob: bool
    router_init_std: float = INIT_STD

    @property
    def expert_rows(self) -> dict[str, int]:
        """The sizes of the second dims of the experts' parameters, by the fields that give them."""
        return {"dim": self.dim, "2 moe_hidden_dim": 2 * self.moe_hidden_dim}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_experts_per_token > self.n_experts:
            raise ConfigError(
                f"n_experts_per_token = {self.n_experts_per_token} is above n_experts = {self.n_experts}"
            )
        for name in ("dim", "moe_hidden_dim"):
            if getattr(self, name) % MULTIPLE:
                raise ConfigError(
                    f"{name} = {getattr(self, name)} is not a multiple of {MULTIPLE}, which the products of "
                    "experts need"
                )


class Routing(NamedTuple):
    """The choices of a router. `weights_NK`: fp32, differentiable. `experts_NK`: int64, the numbers of each
    token's experts. `counts_E`: int64, the number of tokens that chose each expert."""

    weights_NK: torch.Tensor
    experts_NK: torch.Tensor
    counts_E: torch.Tensor


def router_logits(
    h_ND: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """The router's logits [N, E] in fp32. A product in bf16 would give one token in sixteen equal scores at
    the last place. Weight and bias are rounded to the dtype of `h_ND` first, because FSDP gathers them in
    that dtype. In bf16 without FSDP, Inductor leaves this rounding out: compiled, results then differ from
    FSDP's."""
    bias_E = None if bias_E is None else bias_E.to(h_ND.dtype).float()
    return F.linear(h_ND.float(), weight_ED.to(h_ND.dtype).float(), bias_E)


class Router(nn.Module):
    """Chooses the K experts of each token by the softmax of its logits. A family with another rule overrides
    `logits`, `scores`, `choose` or `weigh`."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.num_chosen, self.norm_topk_prob = config.n_experts_per_token, config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.product: Callable[..., torch.Tensor] = router_logits
        self.load = RouterLoad(config.n_experts)

    def forward(self, h_ND: torch.Tensor, num_sequences: int = 1) -> Routing:
        logits_NE = self.logits(h_ND)
        scores_NE = self.scores(logits_NE)
        experts_NK = self.load.chosen(self.choose(scores_NE.detach()))
        counts_E = torch.zeros_like(scores_NE, dtype=torch.bool).scatter(1, experts_NK, True).sum(0)
        results = RouterResults(logits_NE, self.probabilities(scores_NE), experts_NK, counts_E)
        weights_NK = self.load(self.weigh(scores_NE.gather(1, experts_NK)), results, num_sequences)
        return Routing(weights_NK, experts_NK, counts_E)

    def logits(self, h_ND: torch.Tensor) -> torch.Tensor:
        """The logits of all experts, fp32 [N, E]."""
        return self.product(h_ND, self.weight)

    def scores(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """The scores of all experts, fp32 [N, E]."""
        return logits_NE.softmax(-1)

    def probabilities(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """The scores, divided by their sum over the experts where that is not 1, for the balance losses."""
        return scores_NE

    def choose(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """The numbers of each token's experts, int64 [N, K], by descending score. No gradient flows through
        the choice."""
        return scores_NE.topk(self.num_chosen, dim=-1).indices

    def weigh(self, scores_NK: torch.Tensor) -> torch.Tensor:
        """The weights of the chosen experts' outputs, from their scores."""
        return scores_NK / scores_NK.sum(-1, keepdim=True) if self.norm_topk_prob else scores_NK


class _ExpertProduct(torch.autograd.Function):
    """The function of `expert_product`. It keeps its inputs and the results of the first product. The
    backward gathers the rows and computes the hidden units again, and needs no outputs of the experts,
    because the weights are applied before the down projection. Both directions gather: unlike index_add,
    that is deterministic."""

    @staticmethod
    def forward(
        ctx: Any,
        h_ND: torch.Tensor,
        weights_NK: torch.Tensor,
        order_P: torch.Tensor,
        counts_E: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        gate_up_E2FD, down_EDF, mm = rest
        num_chosen, ends_E = weights_NK.shape[1], counts_E.cumsum(0).int()
        x_PD = h_ND.index_select(0, order_P // num_chosen)
        gate_up_P2F = mm(x_PD, gate_up_E2FD, ends_E)
        weight_P = weights_NK.flatten().index_select(0, order_P)
        gate_PF, up_PF = gate_up_P2F.chunk(2, dim=-1)
        hidden_PF = (F.silu(gate_PF) * up_PF * weight_P[:, None]).to(h_ND.dtype)
        y_PD = mm(hidden_PF, down_EDF, ends_E)
        ctx.save_for_backward(h_ND, weights_NK, order_P, ends_E, gate_up_E2FD, down_EDF, gate_up_P2F)
        ctx.mm = mm
        return sum_by_token(y_PD, places(order_P, weights_NK.numel()), num_chosen)

    @staticmethod
    def backward(ctx: Any, g_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h_ND, weights_NK, order_P, ends_E, gate_up_E2FD, down_EDF, gate_up_P2F = ctx.saved_tensors
        needs_h, needs_weights, _, _, needs_gate_up, needs_down, _ = ctx.needs_input_grad
        num_chosen, place_P = weights_NK.shape[1], places(order_P, weights_NK.numel())
        order_P = recomputed_after(order_P, g_ND)
        weight_P1 = weights_NK.flatten().index_select(0, order_P)[:, None]
        gate_PF, up_PF = gate_up_P2F.chunk(2, dim=-1)
        silu_PF = F.silu(gate_PF)
        swiglu_PF = silu_PF * up_PF

        g_y_PD = g_ND.index_select(0, order_P // num_chosen)
        g_hidden_PF = ctx.mm(g_y_PD, down_EDF.transpose(1, 2), ends_E)
        g_down = g_weights = g_gate_up = g_h = None
        if needs_down:
            hidden_PF = (swiglu_PF * weight_P1).to(h_ND.dtype)
            g_down = grouped_mm_weight(g_y_PD, hidden_PF, ends_E)
        if needs_weights:
            g_weight_P = (g_hidden_PF.float() * swiglu_PF).sum(-1)
            g_weights = rows_at(g_weight_P, place_P).view_as(weights_NK)
        g_swiglu_PF = (g_hidden_PF * weight_P1).to(h_ND.dtype)
        g_gate_PF = torch.ops.aten.silu_backward(g_swiglu_PF * up_PF, gate_PF)
        g_P2F = torch.cat((g_gate_PF, g_swiglu_PF * silu_PF), dim=-1)
        if needs_gate_up:
            g_gate_up = grouped_mm_weight(g_P2F, h_ND.index_select(0, order_P // num_chosen), ends_E)
        if needs_h:
            g_x_PD = ctx.mm(g_P2F, gate_up_E2FD.transpose(1, 2), ends_E)
            g_h = sum_by_token(g_x_PD, place_P, num_chosen)
        return g_h, g_weights, None, None, g_gate_up, g_down, None


def expert_product(
    h_ND: torch.Tensor,
    weights_NK: torch.Tensor,
    order_P: torch.Tensor,
    counts_E: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    *,
    mm: GroupedMM = grouped_mm,
) -> torch.Tensor:
    """The sums [N, D] of the outputs of each token's experts, times `weights_NK`. The output of an expert is
    down(silu(gate(x)) * up(x)). `order_P`: the numbers of the pairs, n * K + k, sorted by expert; pairs that
    are left out add nothing. `counts_E`: the pairs of each expert. Rows 0 to F - 1 of an expert's
    `gate_up_E2FD` are the gate, the others the up projection. `mm`: the function of the grouped products with
    the weights. Gradients of the weights come from grouped_mm_weight, in the dtype of `h_ND`."""
    gate_up_E2FD, down_EDF = gate_up_E2FD.to(h_ND.dtype), down_EDF.to(h_ND.dtype)
    return _ExpertProduct.apply(h_ND, weights_NK.float(), order_P, counts_E, gate_up_E2FD, down_EDF, mm)


@torch.library.custom_op("titanlite::recomputed_after", mutates_args=())
def recomputed_after(index: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of `index` that the compiler takes to depend on `gradient`: tensors that are computed with it in
    the backward are not merged with the same tensors of the forward, which would then be kept in memory."""
    return index.clone()


@recomputed_after.register_fake
def _(index: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(index)


def places(order_R: torch.Tensor, num_pairs: int) -> torch.Tensor:
    """The place of each pair in `order_R`, int64 [num_pairs]: its inverse. R for pairs that are not in it."""
    num_rows = order_R.shape[0]
    places_P = order_R.new_full((num_pairs,), num_rows)
    return places_P.scatter(0, order_R, torch.arange(num_rows, device=order_R.device))


def rows_at(rows_R: torch.Tensor, place_P: torch.Tensor) -> torch.Tensor:
    """The rows of pairs, which are at `place_P`; zeros for pairs without a row."""
    if rows_R.shape[0] < place_P.shape[0]:
        rows_R = torch.cat((rows_R, rows_R.new_zeros(1, *rows_R.shape[1:])))
    return rows_R.index_select(0, place_P)


def sum_by_token(y_RD: torch.Tensor, place_P: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """The sums [N, D], in fp32, of the rows of each token's pairs, which are at `place_P`."""
    y_NKD = rows_at(y_RD, place_P).unflatten(0, (-1, num_chosen))
    return y_NKD.sum(1, dtype=torch.float32).to(y_RD.dtype)


class Experts(nn.Module):
    """The SwiGLU experts of one layer, with stacked weights under the names of transformers 5. `mm`: the
    function of the grouped products with them, which parallel/float8.py replaces."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        E, D, hidden = config.n_experts, config.dim, config.moe_hidden_dim
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * hidden, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, hidden))
        self.mm: GroupedMM = grouped_mm
        self.product: Callable[..., torch.Tensor] = self.swiglu_product

    def swiglu_product(self, *inputs: torch.Tensor) -> torch.Tensor:
        """expert_product with `mm` for the grouped products."""
        return expert_product(*inputs, mm=self.mm)

    def forward(
        self,
        h_ND: torch.Tensor,
        weights_NK: torch.Tensor,
        order_P: torch.Tensor,
        counts_E: torch.Tensor,
    ) -> torch.Tensor:
        return self.product(h_ND, weights_NK, order_P, counts_E, self.gate_up_proj, self.down_proj)


def local_dispatch(
    h_ND: torch.Tensor, routing: Routing, experts: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """The weighted sum of the outputs of each token's experts, [N, D]. `experts`: a function of the arguments
    of Experts.forward."""
    order_P = routing.experts_NK.flatten().argsort(stable=True)
    return experts(h_ND, routing.weights_NK, order_P, routing.counts_E)


class MoE(nn.Module):
    """A layer of experts. `dispatch`: a function with the arguments of local_dispatch, which parallel/ may
    replace."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.gate, self.experts = Router(config), Experts(config)
        self.dispatch: Callable[[torch.Tensor, Routing, Any], torch.Tensor] = local_dispatch

    def forward(self, h_BTD: torch.Tensor) -> torch.Tensor:
        h_ND = h_BTD.flatten(0, 1)
        return self.dispatch(h_ND, self.gate(h_ND, len(h_BTD)), self.experts).view_as(h_BTD)


def moe_layers_of(net: nn.Module) -> list[MoE]:
    """The layers of experts in a model or a block."""
    return [module for module in net.modules() if isinstance(module, MoE)]


def moe_mlp(config: MoEConfig, block: int) -> nn.Module:
    """The layer of experts of the block with the number `block`."""
    return MoE(config)


class MoEDecoder(RotaryDecoder):
    """RotaryDecoder with experts. `mlp`: makes the layer of experts, or the dense MLP, of the block with a
    number."""

    config: MoEConfig
    mlp_down = ""

    def __init__(
        self,
        config: MoEConfig,
        attention: type[AttentionLayer] = SelfAttention,
        attention_plan: dict[str, str] | None = None,
        mlp: MakeMLP = moe_mlp,
        block: type[Block] = Block,
    ):
        super().__init__(config, attention, attention_plan, mlp, block)
        self.folded_scales["experts.down_proj"] = config.residual_scale
        self.tp_plan = {name: style for name, style in self.tp_plan.items() if name not in MLP_PLAN}
        self.tp_plan |= {"model.layers.*.mlp": "local", "model.layers.*.mlp.gate": "router"}

    def moe_layers(self) -> dict[str, MoE]:
        return {name: module for name, module in self.named_modules() if isinstance(module, MoE)}

    def parameter_role(self, name: str) -> Role:
        if not is_adapter(name):
            module = self.get_submodule(name.rpartition(".")[0])
            if isinstance(module, Router):
                return "router"
            if isinstance(module, Experts):
                return "expert"
        return super().parameter_role(name)

    def hf_tensors(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, Index]]:
        """The files have the three matrices of each expert, and no loads."""
        if is_load(name):
            return []
        module, _, matrix = name.rpartition(".")
        if not isinstance(self.get_submodule(module), Experts):
            return super().hf_tensors(name, shape)
        num_experts, num_rows, _ = shape
        rows = {"down_proj": slice(0, num_rows)}
        if matrix == "gate_up_proj":
            rows = {"gate_proj": slice(0, num_rows // 2), "up_proj": slice(num_rows // 2, num_rows)}
        return [(f"{module}.{n}.{part}.weight", (n, rows[part])) for n in range(num_experts) for part in rows]

    def init_normal(self, name: str) -> tuple[float, float]:
        if self.parameter_role(name) == "router":
            return 0.0, self.config.router_init_std
        return super().init_normal(name)

    def initial_buffer(self, name: str) -> torch.Tensor:
        buffer = self.get_buffer(name)
        return torch.zeros(buffer.shape, dtype=buffer.dtype)

    def num_stacked(self, name: str) -> int:
        return 2 if name.endswith("experts.gate_up_proj") else super().num_stacked(name)

    def num_matmul_parameters(self) -> int:
        """The number of parameters that every token is multiplied with, including the experts that the token
        chooses."""
        experts = [p for layer in self.moe_layers().values() for p in layer.experts.parameters()]
        num_idle = self.config.n_experts - self.config.n_experts_per_token
        return super().num_matmul_parameters() - num_idle * sum(p[0].numel() for p in experts)


@dataclass(frozen=True, kw_only=True)
class MoEFamily(ModelFamily):
    """Base of families with experts."""

    tp_fields: ClassVar[dict[str, str]] = {  # no block has an MLP of hidden_dim
        name: reason for name, reason in ModelFamily.tp_fields.items() if name != "hidden_dim"
    }

    def shape(self) -> str:
        fields = ("n_experts", "n_experts_per_token", "moe_hidden_dim")
        own = [f"{name}={getattr(self.config, name)}" for name in fields if name not in self.overrides]
        return " ".join((super().shape(), *own))


def experts_to_hf(config: MoEConfig) -> dict[str, Any]:
    """The keys of a config.json that describe the experts, apart from their hidden units."""
    return {
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.n_experts_per_token,
        "norm_topk_prob": config.norm_topk_prob,
    }


def experts_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that experts_to_hf writes, from a config.json. Raises ConfigError for missing keys."""
    # transformers 5 reads num_experts and writes num_local_experts.
    number = config.get("num_experts")
    values = {**config, "num_experts": config.get("num_local_experts") if number is None else number}
    keys = {
        "num_experts": "n_experts",
        "num_experts_per_tok": "n_experts_per_token",
        "norm_topk_prob": "norm_topk_prob",  # transformers assumes false, but Qwen3's models have true
    }
    if missing := [key for key in keys if values.get(key) is None]:
        raise ConfigError(f"config.json has no {missing[0]}")
    if type(values["norm_topk_prob"]) is not bool:
        raise ConfigError(f"config.json: norm_topk_prob = {values['norm_topk_prob']!r} is not true or false")
    return {name: values[key] for key, name in keys.items()}
