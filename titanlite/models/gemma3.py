"""Gemma 3's text models (Gemma Team 2025, arXiv 2503.19786): the decoder of decoder.py with a norm before and
after attention and MLP, a GELU in the MLP, RMSNorm on each head's queries and keys, windows in five layers of
six, and two rotary bases. The output of the embedding is multiplied by sqrt(dim); norms multiply by 1 +
weight.

Parameter names and values follow Hugging Face's Gemma3ForCausalLM.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.attention.base import Attention
from titanlite.config.component import ConfigError
from titanlite.models import decoder
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.hf_config import (
    DEFAULT_WINDOW,
    check_fixed,
    from_hf,
    layers_from_hf,
    layers_to_hf,
    to_hf,
)
from titanlite.models.layers import OffsetNorm, SwiGLU


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(RotaryConfig):
    """The architecture of one flavor. `query_pre_attn_scalar`: attention scores are divided by its square
    root, in place of the square root of head_dim."""

    vocab_size: int = 262208
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 256
    norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position: int = 131072
    sliding_window: int = 1024
    layer_pattern: str = "SSSSSL"
    window_rope_theta: float = 1e4
    window_rope_scaled: bool = False
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = 256

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.dim)


# The fields of config.json in google/gemma-3-1b-pt, and of its text_config in gemma-3-4b-pt, gemma-3-12b-pt
# and gemma-3-27b-pt, on huggingface.co, whose missing keys have the values of transformers. Not compared with
# the published files, only with copies of 1B's and 27B's fields. Tests compare the numbers of parameters.
FLAVORS = {
    "debug": Gemma3Config(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=384, vocab_size=8192,
        max_position=2048, sliding_window=512, layer_pattern="SSL", query_pre_attn_scalar=64,
    ),
    "1B": Gemma3Config(
        dim=1152, n_layers=26, n_heads=4, n_kv_heads=1, hidden_dim=6912, vocab_size=262144,
        max_position=32768, sliding_window=512,
    ),
    "4B": Gemma3Config(dim=2560, n_layers=34, hidden_dim=10240, rope_type="linear", rope_factor=8.0),
    "12B": Gemma3Config(
        dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, hidden_dim=15360, rope_type="linear",
        rope_factor=8.0,
    ),
    "27B": Gemma3Config(
        dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, head_dim=128, hidden_dim=21504, rope_type="linear",
        rope_factor=8.0, query_pre_attn_scalar=168,
    ),
}  # fmt: skip

PATTERN = 6  # without layer_types, every sixth layer has full attention
HF_FIXED = {  # the only supported values, and the values of missing keys
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


@dataclass(frozen=True, kw_only=True)
class Gemma3(ModelFamily, name="gemma3"):
    """Gemma 3, text only. All flavors have tied embeddings, and windows in five layers of six."""

    flavors = FLAVORS
    hf_model_type = "gemma3_text"
    hf_multimodal_type = "gemma3"

    def build(self) -> Decoder:
        return Gemma3Decoder(self.config)

    def hf_config(self) -> dict[str, Any]:
        config = self.config
        fields = to_hf(config, rope_by_layer_type=True)
        del fields["hidden_act"]
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attention_bias": False,
            **fields,
            "rope_local_base_freq": config.window_rope_theta or config.rope_theta,  # for transformers 4
            **HF_FIXED,
            "query_pre_attn_scalar": config.query_pre_attn_scalar,
            **layers_to_hf(config),
            # transformers needs a window also if no layer has one.
            "sliding_window": config.sliding_window or DEFAULT_WINDOW,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        check_fixed(config, HF_FIXED)
        fields = from_hf(
            config, ("hidden_act",), rope_by_layer_type=True, vocab_size=262208, num_attention_heads=8,
            num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, rms_norm_eps=1e-6,
            tie_word_embeddings=True, rope_theta=1e6, rope_local_base_freq=1e4,
        )  # fmt: skip
        layers, window = fields["n_layers"], config.get("sliding_window", DEFAULT_WINDOW)
        default = _pattern(layers, config.get("sliding_window_pattern"))
        scalar = config.get("query_pre_attn_scalar")
        fields["query_pre_attn_scalar"] = 256 if scalar is None else scalar
        return cls.of_shape(fields | layers_from_hf(config.get("layer_types"), layers, window, default))


def _pattern(num_layers: int, pattern: Any) -> str:
    """layer_pattern of a config.json without layer_types: every `pattern`-th layer has full attention."""
    pattern = PATTERN if pattern is None else pattern
    if type(pattern) is not int or pattern < 1:
        raise ConfigError(
            f"config.json: sliding_window_pattern = {json.dumps(pattern)} is not a number of layers"
        )
    return "S" * (min(pattern, num_layers + 1) - 1) + "L"


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)) without biases, with the tanh approximation of GELU (Shazeer 2020)."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x_BTD), approximate="tanh") * self.up_proj(x_BTD))


def geglu(config: RotaryConfig, block: int) -> nn.Module:
    """The MLP of the block with the number `block`."""
    return GeGLU(config.dim, config.hidden_dim)


TP_PLAN = {"model.layers.*.self_attn.[qk]_norm": "heads"}


class SelfAttention(decoder.SelfAttention):
    """Attention with a norm of the queries and a norm of the keys. All heads share the norms' weights."""

    scales_queries = "q_norm"

    def __init__(self, config: Gemma3Config):
        super().__init__(config)
        self.scale = config.attention_scale * math.sqrt(config.head_dim / config.query_pre_attn_scalar)
        self.q_norm = OffsetNorm(config.head_dim, config.norm_eps)
        self.k_norm = OffsetNorm(config.head_dim, config.norm_eps)

    def normed(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q_BTHE), self.k_norm(k_BTKE)


class Block(decoder.Block):
    """x + scale * norm(attention(norm(x))), then x + scale * norm(mlp(norm(x))), with residual_scale."""

    norm_type = OffsetNorm
    tp_plan: ClassVar[dict[str, str]] = {
        "model.layers.*.post_attention_layernorm": "residual",
        "model.layers.*.pre_feedforward_layernorm": "sequence",
        "model.layers.*.post_feedforward_layernorm": "residual",
    }

    def __init__(self, config: RotaryConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__(config, attention, mlp)
        self.pre_feedforward_layernorm = OffsetNorm(config.dim, config.norm_eps)
        self.post_feedforward_layernorm = OffsetNorm(config.dim, config.norm_eps)

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        x_BTD, h_BTD = self.attend(x_BTD, cos, sin, attention)
        return torch.add(x_BTD, self.post_feedforward_layernorm(self.mlp(h_BTD)), alpha=self.scale)

    def attend(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended = self.self_attn(self.input_layernorm(x_BTD), cos, sin, attention)
        x_BTD = torch.add(x_BTD, self.post_attention_layernorm(attended), alpha=self.scale)
        return x_BTD, self.pre_feedforward_layernorm(x_BTD)


class Gemma3Decoder(RotaryDecoder):
    """RotaryDecoder with Gemma 3's blocks. Scales that Hugging Face's form lacks are folded into norms."""

    def __init__(self, config: Gemma3Config):
        super().__init__(config, SelfAttention, TP_PLAN, geglu, Block)
        self.folded_scales = {
            "post_attention_layernorm.weight": config.residual_scale,
            "post_feedforward_layernorm.weight": config.residual_scale,
            "self_attn.q_norm.weight": config.attention_scale,
            "model.norm.weight": config.logit_scale,
        }

    def init_normal(self, name: str) -> tuple[float, float]:
        return (0.0, 0.0) if name.endswith("norm.weight") else super().init_normal(name)

    def export_offset(self, name: str) -> float:
        return self.export_factor(name) - 1.0  # scale * (1 + weight) is 1 + the exported weight
