"""gpt-oss (OpenAI 2025, arXiv 2508.10925): the decoder of decoder.py with attention sinks, a sliding window
in every other layer, biases in all linear layers of the blocks, and experts with a clamped SwiGLU.

Parameter names and shapes follow Hugging Face's GptOssForCausalLM in transformers 5. Shape suffixes: those of
moe.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from titanlite.config.component import ConfigError
from titanlite.models import decoder
from titanlite.models.base import Decoder, Index, ModelFamily, Role
from titanlite.models.decoder import INIT_STD, LayerKind, RotaryConfig
from titanlite.models.grouped_mm import grouped_mm, grouped_mm_weight
from titanlite.models.hf_config import from_hf, layers_from_hf, layers_to_hf, to_hf
from titanlite.models.layers import all_heads
from titanlite.models.load_balance import is_load
from titanlite.models.moe import (
    MULTIPLE,
    Experts,
    MoE,
    MoEConfig,
    MoEDecoder,
    MoEFamily,
    Router,
    experts_from_hf,
    local_dispatch,
    places,
    recomputed_after,
    rows_at,
    sum_by_token,
)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoEConfig):
    """The architecture of one flavor. `hidden_dim`: 0, there are no dense blocks. `swiglu_limit`: the largest
    value of the gate, and the largest absolute value of the up projection. `swiglu_alpha`: factor in the
    sigmoid of the gate."""

    may_be_zero: ClassVar[tuple[str, ...]] = (*MoEConfig.may_be_zero, "hidden_dim")

    vocab_size: int = 201088
    dim: int = 2880
    n_heads: int = 64
    n_kv_heads: int = 8
    head_dim: int = 64
    hidden_dim: int = 0
    moe_hidden_dim: int = 2880
    n_experts_per_token: int = 4
    norm_topk_prob: bool = True  # the softmax over the chosen logits
    norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_type: str = "yarn"
    rope_factor: float = 32.0
    rope_original_max_position: int = 4096
    rope_truncate: bool = False
    max_position: int = 131072
    sliding_window: int = 128
    layer_pattern: str = "SL"
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_dim:
            raise ConfigError(f"hidden_dim = {self.hidden_dim}: gpt-oss has experts only; set moe_hidden_dim")
        if not self.norm_topk_prob:
            raise ConfigError("norm_topk_prob = false: gpt-oss has a softmax over the chosen experts' logits")

    @property
    def expert_rows(self) -> dict[str, int]:
        return {"dim": self.dim, "moe_hidden_dim": self.moe_hidden_dim}

    @property
    def layer_kinds(self) -> list[LayerKind]:
        kinds = super().layer_kinds
        return [kind._replace(attention=kind.attention._replace(has_sinks=True)) for kind in kinds]


# 20B and 120B have as many parameters as OpenAI's model card says. Their fields were not compared with the
# published config.json.
FLAVORS = {
    "debug": GptOssConfig(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=8192, max_position=2048,
        n_experts=8, n_experts_per_token=2, moe_hidden_dim=192, rope_factor=4.0,
        rope_original_max_position=512,
    ),
    "20B": GptOssConfig(n_layers=24, n_experts=32),
    "120B": GptOssConfig(n_layers=36, n_experts=128),
}  # fmt: skip
# transformers' layers and rotary scaling for a config.json without layer_types and rope_parameters
PATTERN = "SL"
DEFAULT_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
QUANTIZATION = "mxfp4"  # of the published files, which interop/mxfp4.py reads


@dataclass(frozen=True, kw_only=True)
class GptOss(MoEFamily, name="gpt_oss"):
    """gpt-oss. 20B has 20.9e9 parameters, of which a token uses 3.6e9; 120B has 116.8e9, a token uses
    5.1e9."""

    flavors = FLAVORS
    hf_model_type = "gpt_oss"

    def build(self) -> Decoder:
        return GptOssDecoder(self.config)

    def hf_config(self) -> dict[str, Any]:
        config = self.config
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            **to_hf(config),
            **layers_to_hf(config),
            "intermediate_size": config.moe_hidden_dim,
            "num_local_experts": config.n_experts,
            "num_experts_per_tok": config.n_experts_per_token,
            "swiglu_limit": config.swiglu_limit,
            "swiglu_alpha": config.swiglu_alpha,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        if config.get("attention_bias") not in (None, True):
            bias = json.dumps(config["attention_bias"])
            raise ConfigError(f"config.json: attention_bias = {bias}; only true is supported")
        config = {key: value for key, value in config.items() if value is not None}
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == QUANTIZATION:
            del config["quantization_config"]
        if not {"rope_scaling", "rope_parameters"} & config.keys():
            config["rope_scaling"] = DEFAULT_ROPE
        defaults: dict[str, Any] = {
            "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "rope_theta": 150000.0,
        }  # fmt: skip
        fields = from_hf(config, ("attention_bias",), **defaults)
        moe_hidden_dim, num_layers = fields.pop("hidden_dim"), fields["n_layers"]
        return cls.of_shape(
            {
                **fields,
                **layers_from_hf(
                    config.get("layer_types"), num_layers, config.get("sliding_window", 128), PATTERN
                ),
                **experts_from_hf(config | {"norm_topk_prob": True}),
                "moe_hidden_dim": moe_hidden_dim,
                "swiglu_limit": config.get("swiglu_limit", 7.0),
                "swiglu_alpha": config.get("swiglu_alpha", 1.702),
            }
        )


class SelfAttention(decoder.SelfAttention):
    """Attention with biases in all projections and a sink for each head. `own_heads`: a function that selects
    the sinks of this rank's heads, which parallel/ may replace."""

    qkv_bias = o_bias = True

    def __init__(self, config: RotaryConfig):
        super().__init__(config)
        self.sinks = nn.Parameter(torch.empty(config.n_heads))
        self.own_heads: Callable[[Any], torch.Tensor] = all_heads

    def sinks_of_heads(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        # Rounded as FSDP gathers them.
        return (self.own_heads(self.sinks).to(dtype),)


class BiasedRouter(Router):
    """A router whose logits have a bias."""

    def __init__(self, config: MoEConfig):
        super().__init__(config)
        self.bias = nn.Parameter(torch.empty(config.n_experts))

    def logits(self, h_ND: torch.Tensor) -> torch.Tensor:
        return self.product(h_ND, self.weight, self.bias)


def clamped(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """The clamped SwiGLU (up + 1) gate sigmoid(alpha gate), with gate at most `limit` and up from -`limit` to
    `limit`."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def clamped_backward(
    g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up for the gradient `g` of `clamped`."""
    clamped_gate, clamped_up = gate.clamp(max=limit), up.clamp(-limit, limit)
    share = torch.sigmoid(alpha * clamped_gate)
    slope = share * (1 + alpha * clamped_gate * (1 - share))
    g_gate = (g * (clamped_up + 1) * slope).masked_fill(gate > limit, 0.0)
    return g_gate, (g * clamped_gate * share).masked_fill(up.abs() > limit, 0.0)


class _ClampedProduct(torch.autograd.Function):
    """The function of `clamped_product`. It keeps, gathers and computes again the same tensors as
    moe._ExpertProduct."""

    @staticmethod
    def forward(
        ctx: Any,
        h_ND: torch.Tensor,
        weights_NK: torch.Tensor,
        order_P: torch.Tensor,
        counts_E: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        gate_up_ED2F, gate_up_bias_E2F, down_EFD, down_bias_ED, limit, alpha, mm = rest
        num_chosen, ends_E = weights_NK.shape[1], counts_E.cumsum(0).int()
        expert_P = _expert_of_rows(ends_E, order_P)
        x_PD = h_ND.index_select(0, order_P // num_chosen)
        gate_up_P2F = mm(x_PD, gate_up_ED2F.transpose(1, 2), ends_E)
        gate_up_P2F = gate_up_P2F + gate_up_bias_E2F.index_select(0, expert_P)
        weight_P1 = weights_NK.flatten().index_select(0, order_P)[:, None]
        hidden_PF = clamped(gate_up_P2F[:, ::2], gate_up_P2F[:, 1::2], limit, alpha)
        y_PD = mm((hidden_PF * weight_P1).to(h_ND.dtype), down_EFD.transpose(1, 2), ends_E)
        y_PD = (y_PD + down_bias_ED.index_select(0, expert_P) * weight_P1).to(h_ND.dtype)
        ctx.save_for_backward(
            h_ND, weights_NK, order_P, ends_E, gate_up_ED2F, down_EFD, down_bias_ED, gate_up_P2F
        )
        ctx.limit, ctx.alpha, ctx.mm = limit, alpha, mm
        return sum_by_token(y_PD, places(order_P, weights_NK.numel()), num_chosen)

    @staticmethod
    def backward(ctx: Any, g_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h_ND, weights_NK, order_P, ends_E, gate_up_ED2F, down_EFD, down_bias_ED, gate_up_P2F = (
            ctx.saved_tensors
        )
        needs_h, needs_weights, _, _, needs_gate_up, needs_gate_up_bias, needs_down, needs_down_bias = (
            ctx.needs_input_grad[:8]
        )
        num_chosen, place_P = weights_NK.shape[1], places(order_P, weights_NK.numel())
        order_P = recomputed_after(order_P, g_ND)
        weight_P1 = weights_NK.flatten().index_select(0, order_P)[:, None]
        gate_PF, up_PF = gate_up_P2F[:, ::2], gate_up_P2F[:, 1::2]
        swiglu_PF = clamped(gate_PF, up_PF, ctx.limit, ctx.alpha)

        g_y_PD = g_ND.index_select(0, order_P // num_chosen)
        g_hidden_PF = ctx.mm(g_y_PD, down_EFD, ends_E)
        g_down = g_down_bias = g_weights = g_gate_up = g_gate_up_bias = g_h = None
        if needs_down:
            g_down = grouped_mm_weight((swiglu_PF * weight_P1).to(h_ND.dtype), g_y_PD, ends_E)
        if needs_down_bias:
            g_down_bias = _sum_by_expert((g_y_PD * weight_P1).to(h_ND.dtype), ends_E)
        if needs_weights:
            bias_PD = down_bias_ED.index_select(0, _expert_of_rows(ends_E, order_P))
            g_weight_P = (g_hidden_PF.float() * swiglu_PF).sum(-1) + (g_y_PD.float() * bias_PD).sum(-1)
            g_weights = rows_at(g_weight_P, place_P).view_as(weights_NK)
        g_swiglu_PF = (g_hidden_PF * weight_P1).to(h_ND.dtype)
        g_gate_PF, g_up_PF = clamped_backward(g_swiglu_PF, gate_PF, up_PF, ctx.limit, ctx.alpha)
        g_P2F = torch.stack((g_gate_PF, g_up_PF), dim=-1).flatten(1)
        if needs_gate_up:
            g_gate_up = grouped_mm_weight(h_ND.index_select(0, order_P // num_chosen), g_P2F, ends_E)
        if needs_gate_up_bias:
            g_gate_up_bias = _sum_by_expert(g_P2F, ends_E)
        if needs_h:
            g_x_PD = ctx.mm(g_P2F, gate_up_ED2F, ends_E)
            g_h = sum_by_token(g_x_PD, place_P, num_chosen)
        return g_h, g_weights, None, None, g_gate_up, g_gate_up_bias, g_down, g_down_bias, None, None, None


def _expert_of_rows(ends_E: torch.Tensor, order_P: torch.Tensor) -> torch.Tensor:
    """The number of each row's expert, int64 [P]. `ends_E`: as in grouped_mm."""
    rows_P = torch.arange(order_P.shape[0], dtype=ends_E.dtype, device=ends_E.device)
    return torch.searchsorted(ends_E, rows_P, right=True)


def _sum_by_expert(rows_PC: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The sums [E, C] of the rows of each expert, as a product with ones: on CUDA, index_add would add them
    in another order each time."""
    ones_P = rows_PC.new_ones(rows_PC.shape[0], MULTIPLE)
    return grouped_mm_weight(ones_P, rows_PC, ends_E)[:, 0]


class ClampedExperts(Experts):
    """The experts of one layer, with biases and a clamped SwiGLU. Even columns of `gate_up_proj` are the
    gate, odd columns the up projection."""

    def __init__(self, config: GptOssConfig):
        nn.Module.__init__(self)
        E, D, hidden = config.n_experts, config.dim, config.moe_hidden_dim
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha
        self.gate_up_proj = nn.Parameter(torch.empty(E, D, 2 * hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(E, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(E, hidden, D))
        self.down_proj_bias = nn.Parameter(torch.empty(E, D))
        self.mm = grouped_mm
        self.product = self.clamped_product

    def clamped_product(
        self,
        h_ND: torch.Tensor,
        weights_NK: torch.Tensor,
        order_P: torch.Tensor,
        counts_E: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """The sums [N, D] of the outputs of each token's experts, times `weights_NK`; arguments as in
        moe.expert_product. `parameters`: of this rank's experts."""
        cast = [p.to(h_ND.dtype) for p in parameters]
        return _ClampedProduct.apply(
            h_ND, weights_NK.float(), order_P, counts_E, *cast, self.limit, self.alpha, self.mm
        )

    def forward(
        self,
        h_ND: torch.Tensor,
        weights_NK: torch.Tensor,
        order_P: torch.Tensor,
        counts_E: torch.Tensor,
    ) -> torch.Tensor:
        parameters = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        return self.product(h_ND, weights_NK, order_P, counts_E, *parameters)


class GptOssMoE(MoE):
    """A layer of experts whose router has Hugging Face's name."""

    def __init__(self, config: GptOssConfig):
        nn.Module.__init__(self)
        self.router, self.experts = BiasedRouter(config), ClampedExperts(config)
        self.dispatch = local_dispatch

    @property
    def gate(self) -> Router:  # type: ignore[override]
        """The router, under the name that it has in other families."""
        return self.router


def gpt_oss_mlp(config: GptOssConfig, block: int) -> nn.Module:
    """The layer of experts of the block with the number `block`."""
    return GptOssMoE(config)


TP_PLAN = {"model.layers.*.self_attn": "gather_sinks", "model.layers.*.mlp.router": "router"}


class GptOssDecoder(MoEDecoder):
    """MoEDecoder with sinks and biases."""

    config: GptOssConfig

    def __init__(self, config: GptOssConfig):
        super().__init__(config, SelfAttention, mlp=gpt_oss_mlp)
        self.folded_scales["experts.down_proj_bias"] = config.residual_scale
        del self.tp_plan["model.layers.*.mlp.gate"]
        self.tp_plan |= TP_PLAN

    def parameter_role(self, name: str) -> Role:
        return "norm" if name.endswith((".bias", "_bias")) else super().parameter_role(name)

    def hf_tensors(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, Index]]:
        return [] if is_load(name) else [(name, ())]

    def init_normal(self, name: str) -> tuple[float, float]:
        if name.endswith(("_bias", ".bias")):
            return 0.0, 0.0
        return (0.0, INIT_STD) if name.endswith(".sinks") else super().init_normal(name)

    def num_stacked(self, name: str) -> int:
        return 1  # gate and up alternate
