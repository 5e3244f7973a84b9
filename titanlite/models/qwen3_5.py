"""Qwen3.5's text models (Qwen Team 2026): a gated delta net in three layers of four, and in the fourth
attention whose output is gated. Rotary positions turn a quarter of each head's dims; norms multiply by
1 + weight.

Parameter names and values follow Hugging Face's Qwen3_5ForCausalLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from titanlite.attention.base import Attention, AttentionKind
from titanlite.config.component import ConfigError
from titanlite.models import decoder
from titanlite.models.base import Decoder, Index, ModelFamily, Role
from titanlite.models.decoder import LayerKind, RotaryConfig, RotaryDecoder, dense_mlp
from titanlite.models.gated_delta_net import DT_BIAS_INIT, GatedDeltaNet, initial_a_log
from titanlite.models.hf_config import from_hf, layers_to_hf, pattern_from_hf, to_hf
from titanlite.models.layers import Linear, OffsetNorm, apply_rope
from titanlite.models.multi_token import MultiTokenBlock, MultiTokenPrediction

PATTERN = 4  # without layer_types, every fourth layer has attention
ROTARY_SHARE = 0.25  # also of a missing key
DELTA_FIELDS = {  # Hugging Face's name: field of Qwen3_5Config
    "linear_num_key_heads": "delta_n_k_heads",
    "linear_num_value_heads": "delta_n_v_heads",
    "linear_key_head_dim": "delta_k_head_dim",
    "linear_value_head_dim": "delta_v_head_dim",
    "linear_conv_kernel_dim": "delta_conv_width",
}
DELTA_TP_FIELDS = {"delta_n_k_heads": ": each rank needs its own key heads"}


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(RotaryConfig):
    """The architecture of one flavor. Letters of layer_pattern: `L` attention over all earlier tokens, `D` a
    gated delta net. `rotary_share`: the share of each head's dims that rotary positions turn. `delta_*`: of
    gated delta nets, their heads of queries and keys and of values, the dims of these heads, and the tokens
    that the convolution mixes. `n_mtp_layers`: modules for multi-token prediction (multi_token.py), 0 or 1.
    `mtp_loss_factor`: the weight of their loss."""

    may_be_zero: ClassVar[tuple[str, ...]] = (*RotaryConfig.may_be_zero, "n_mtp_layers")
    letters: ClassVar[dict[str, str]] = {"L": "all earlier tokens", "D": "a gated delta net"}

    vocab_size: int = 248320
    head_dim: int = 256
    norm_eps: float = 1e-6
    rope_theta: float = 1e7
    max_position: int = 262144
    layer_pattern: str = "DDDL"
    rotary_share: float = ROTARY_SHARE
    delta_n_k_heads: int = 16
    delta_n_v_heads: int = 32
    delta_k_head_dim: int = 128
    delta_v_head_dim: int = 128
    delta_conv_width: int = 4
    n_mtp_layers: int = 0
    mtp_loss_factor: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_mtp_layers > 1:
            raise ConfigError(f"n_mtp_layers = {self.n_mtp_layers} is above 1")
        if self.delta_n_v_heads % self.delta_n_k_heads:
            raise ConfigError(
                f"delta_n_v_heads = {self.delta_n_v_heads} is not a multiple of delta_n_k_heads = "
                f"{self.delta_n_k_heads}"
            )
        if self.rotary_share > 1 or self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise ConfigError(
                f"rotary_share = {self.rotary_share}: {self.rotary_share * self.head_dim:g} of head_dim = "
                f"{self.head_dim} dims cannot be turned in pairs"
            )

    @property
    def rope_head_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    def kind_of(self, letter: str) -> LayerKind:
        kind = super().kind_of("L")
        return kind._replace(attention=AttentionKind(is_linear=True)) if letter == "D" else kind


# The fields of text_config in config.json of Qwen/Qwen3.5-0.8B, 2B, 4B, 9B and 27B on huggingface.co, as
# other programs repeat them. Not compared with the published files.
FLAVORS = {
    "debug": Qwen3_5Config(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=384, vocab_size=8192,
        max_position=2048, tie_word_embeddings=True, delta_n_k_heads=2, delta_n_v_heads=4,
        delta_k_head_dim=32, delta_v_head_dim=32,
    ),
    "0.8B": Qwen3_5Config(
        dim=1024, n_layers=24, n_heads=8, n_kv_heads=2, hidden_dim=3584, tie_word_embeddings=True,
        delta_n_v_heads=16,
    ),
    "2B": Qwen3_5Config(
        dim=2048, n_layers=24, n_heads=8, n_kv_heads=2, hidden_dim=6144, tie_word_embeddings=True,
        delta_n_v_heads=16,
    ),
    "4B": Qwen3_5Config(
        dim=2560, n_layers=32, n_heads=16, n_kv_heads=4, hidden_dim=9216, tie_word_embeddings=True,
    ),
    "9B": Qwen3_5Config(dim=4096, n_layers=32, n_heads=16, n_kv_heads=4, hidden_dim=12288),
    "27B": Qwen3_5Config(
        dim=5120, n_layers=64, n_heads=24, n_kv_heads=4, hidden_dim=17408, delta_n_v_heads=48,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen3_5(ModelFamily, name="qwen3_5"):
    """Qwen3.5, dense and text only. 0.8B, 2B and 4B have tied embeddings."""

    flavors = FLAVORS
    hf_model_type = "qwen3_5_text"
    hf_multimodal_type = "qwen3_5"
    tp_fields: ClassVar[dict[str, str]] = ModelFamily.tp_fields | DELTA_TP_FIELDS

    def build(self) -> Decoder:
        config = self.config
        return Qwen3_5WithMTP(config) if config.n_mtp_layers else Qwen3_5Decoder(config)

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **fields_to_hf(self.config),
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        return cls.of_shape(fields_from_hf(config))


def fields_to_hf(config: Qwen3_5Config) -> dict[str, Any]:
    """The keys of a config.json that describe `config`."""
    fields = to_hf(config)
    fields["rope_parameters"]["partial_rotary_factor"] = config.rotary_share
    return {
        "attention_bias": False,
        **fields,
        "partial_rotary_factor": config.rotary_share,
        **layers_to_hf(config),
        **{key: getattr(config, name) for key, name in DELTA_FIELDS.items()},
        "mtp_num_hidden_layers": config.n_mtp_layers,
        "mtp_use_dedicated_embeddings": False,
    }


def fields_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Qwen3_5Config that a config.json describes."""
    config = {key: value for key, value in config.items() if value is not None}
    for key, value in (("attn_output_gate", True), ("mtp_use_dedicated_embeddings", False)):
        if config.get(key, value) is not value:
            raise ConfigError(f"config.json: {key}: only {json.dumps(value)} is supported")
    rope = config.get("rope_parameters", {})
    if not isinstance(rope, dict):
        raise ConfigError("config.json: rope_parameters is not an object")
    # The others are of images: the positions of a text are equal in all sections.
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    shares = [x["partial_rotary_factor"] for x in (rope, config) if "partial_rotary_factor" in x]
    if len(set(shares)) > 1:
        raise ConfigError(
            f"config.json: partial_rotary_factor is {shares[1]}, in rope_parameters {shares[0]}"
        )
    rope.pop("partial_rotary_factor", None)
    fields = from_hf(
        config | {"rope_parameters": rope}, ("partial_rotary_factor",), num_key_value_heads=4, head_dim=256,
        rms_norm_eps=1e-6, tie_word_embeddings=False, max_position_embeddings=32768,
    )  # fmt: skip
    interval, layers = config.get("full_attention_interval", PATTERN), fields["n_layers"]
    if type(interval) is not int or interval < 1:
        raise ConfigError(
            f"config.json: full_attention_interval = {json.dumps(interval)} is not a number of layers"
        )
    pattern = "D" * (min(interval, layers + 1) - 1) + "L"
    return {
        **fields,
        "layer_pattern": pattern_from_hf(config.get("layer_types"), layers, pattern, Qwen3_5Config.letters),
        "rotary_share": shares[0] if shares else ROTARY_SHARE,
        **{field: config.get(key, getattr(Qwen3_5Config, field)) for key, field in DELTA_FIELDS.items()},
        "n_mtp_layers": config.get("mtp_num_hidden_layers", 0),
    }


class SelfAttention(decoder.SelfAttention):
    """Attention with norms of the queries and keys, whose weights all heads share, rotary positions in the
    first dims of each head, and an output that is multiplied by the sigmoid of a gate. For each head,
    `q_proj` has the rows of the query and then those of the gate."""

    scales_queries = "q_norm"

    def __init__(self, config: Qwen3_5Config):
        super().__init__(config)
        self.q_proj = Linear(config.dim, 2 * config.n_heads * config.head_dim)
        self.q_norm = OffsetNorm(config.head_dim, config.norm_eps)
        self.k_norm = OffsetNorm(config.head_dim, config.norm_eps)

    @classmethod
    def of_layer(cls, config: Any, number: int) -> nn.Module:
        if config.layer_letters[number] == "L":
            return cls(config)
        num_heads = config.delta_n_k_heads, config.delta_n_v_heads
        head_dims = config.delta_k_head_dim, config.delta_v_head_dim
        return GatedDeltaNet(config.dim, num_heads, head_dims, config.norm_eps, config.delta_conv_width)

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        q_BTHE, gate_BTHE = self.q_proj(x_BTD).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k_BTKE, v_BTKE = (p(x_BTD).unflatten(-1, (-1, self.head_dim)) for p in (self.k_proj, self.v_proj))
        k_BTKE = self.rotated(self.k_norm(k_BTKE), cos, sin)
        q_BTHE = self.rotated(self.q_norm(q_BTHE), cos, sin)
        if self.scale != 1.0:
            q_BTHE = (q_BTHE.float() * self.scale).to(q_BTHE.dtype)
        out_BTHE = attention.attend(q_BTHE, k_BTKE, v_BTKE) * torch.sigmoid(gate_BTHE)
        return self.o_proj(out_BTHE.flatten(-2))

    @staticmethod
    def rotated(x_BTHE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries or keys whose first dims are turned by their positions."""
        turned, kept = x_BTHE.tensor_split((cos.shape[-1],), dim=-1)
        return torch.cat((apply_rope(turned, cos, sin), kept), dim=-1)


class Block(decoder.Block):
    """A block whose layer in the place of attention may be a gated delta net, `linear_attn`."""

    norm_type = OffsetNorm

    def __init__(self, config: RotaryConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__(config, attention, mlp)
        if isinstance(attention, GatedDeltaNet):
            del self.self_attn
            self.linear_attn = attention

    def attend(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        attended = layer(self.input_layernorm(x_BTD), cos, sin, attention)
        x_BTD = torch.add(x_BTD, attended, alpha=self.scale)
        return x_BTD, self.post_attention_layernorm(x_BTD)


ATTENTION_PLAN = {"model.layers.*.self_attn.[qk]_norm": "heads"}
DELTA_PLAN = {
    "model.layers.*.linear_attn": "gated_delta_net",
    "model.layers.*.linear_attn.in_proj_[zba]": "colwise",
    "model.layers.*.linear_attn.norm": "heads",
    "model.layers.*.linear_attn.out_proj": "rowwise",
}


class Hybrid(RotaryDecoder):
    """Base class of the dense model and, in front of MoEDecoder, of the model with experts. Scales that
    Hugging Face's form lacks are folded into weights."""

    config: Any

    def set_up(self) -> None:
        """Call it at the end of __init__."""
        letters = {*self.config.layer_letters, *["L"] * self.config.n_mtp_layers}
        absent = [
            name for letter, name in (("L", "self_attn"), ("D", "linear_attn")) if letter not in letters
        ]
        self.tp_plan = {
            pattern: style
            for pattern, style in (self.tp_plan | DELTA_PLAN).items()
            if not any(name in pattern for name in absent)
        }
        self.folded_scales["out_proj.weight"] = self.config.residual_scale

    def delta_nets(self) -> list[GatedDeltaNet]:
        """The layers of linear attention."""
        return [module for module in self.modules() if isinstance(module, GatedDeltaNet)]

    def init_normal(self, name: str) -> tuple[float, float]:
        if name.endswith("linear_attn.norm.weight"):
            return 1.0, 0.0
        if name.endswith("norm.weight"):
            return 0.0, 0.0
        if name.endswith("A_log"):
            return 0.0, 1.0
        if name.endswith("dt_bias"):
            return DT_BIAS_INIT, 0.0
        if name.endswith("conv1d.weight"):  # the variance of torch's uniform distribution
            return 0.0, 1 / math.sqrt(3 * self.config.delta_conv_width)
        return super().init_normal(name)

    def init_function(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return initial_a_log if name.endswith("A_log") else None

    def parameter_role(self, name: str) -> Role:
        # A number for each channel and distance is no matrix.
        return "norm" if name.endswith("conv1d.weight") else super().parameter_role(name)

    def num_heads(self, name: str) -> int:
        if name.endswith("in_proj_z.weight"):
            return self.config.delta_n_v_heads
        return super().num_heads(name)

    def export_offset(self, name: str) -> float:
        # scale * (1 + weight) is 1 + the exported weight.
        norms = ("q_norm.weight", "model.norm.weight", "shared_head.norm.weight")
        return self.export_factor(name) - 1.0 if name.endswith(norms) else 0.0

    def flops_per_token(self, seq_len: int) -> int:
        return super().flops_per_token(seq_len) + sum(x.state_flops_per_token() for x in self.delta_nets())


class Qwen3_5Decoder(Hybrid):
    """The dense model."""

    def __init__(self, config: Qwen3_5Config):
        super().__init__(config, SelfAttention, ATTENTION_PLAN, block=Block)
        self.set_up()


class MTPBlock(MultiTokenBlock, Block):
    """A module for multi-token prediction, with attention over all earlier tokens."""


MTP_NAMES = {  # in a module: in Hugging Face's files
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}


class WithMTP(MultiTokenPrediction):
    """Adds the module to a Hybrid, under the names of the published files. transformers leaves it out."""

    def add_module_with(self, mlp: nn.Module) -> None:
        """Add the module. Call it at the end of __init__. `mlp`: of its block."""
        config: Any = self.config
        self.add_modules([MTPBlock(config, SelfAttention(config), mlp)], config.mtp_loss_factor)

    def hf_tensors(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, Index]]:
        prefix = f"model.layers.{self.config.n_layers}."
        if not name.startswith(prefix) or not super().hf_tensors(name, shape):
            return super().hf_tensors(name, shape)
        return [(_published(name.removeprefix(prefix)), ())]  # experts stay stacked

    def hf_copies(self, name: str) -> list[str]:
        return []


def _published(name: str) -> str:
    """The name in the published files of the tensor `name` of the module."""
    module, _, parameter = name.rpartition(".")
    return f"{MTP_NAMES[module]}.{parameter}" if module in MTP_NAMES else f"mtp.layers.0.{name}"


class Qwen3_5WithMTP(WithMTP, Qwen3_5Decoder):
    """The dense model with a module for multi-token prediction."""

    def __init__(self, config: Qwen3_5Config):
        super().__init__(config)
        self.add_module_with(dense_mlp(config, config.n_layers))
