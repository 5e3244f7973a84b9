"""Olmo 3 (Olmo Team 2025, arXiv 2512.13961): the decoder of decoder.py with norms after attention and MLP in
place of those before them, an RMSNorm over all heads' queries together and one over all heads' keys, windows
in three layers of four, and YaRN in the others only.

Parameter names and values follow Hugging Face's Olmo3ForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from titanlite.attention.base import Attention
from titanlite.config.component import ConfigError
from titanlite.models import decoder
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.hf_config import (
    DEFAULT_WINDOW,
    LAYER_TYPES,
    from_hf,
    layers_from_hf,
    layers_to_hf,
    to_hf,
)
from titanlite.models.layers import RMSNorm
from titanlite.models.olmoe import TP_PLAN, SelfAttention

PATTERN = "SSSL"  # also without layer_types
ROPE_THETA = 5e5  # also of a missing key


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(RotaryConfig):
    """The architecture of one flavor."""

    vocab_size: int = 100278
    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = ROPE_THETA
    max_position: int = 65536
    sliding_window: int = 4096
    layer_pattern: str = PATTERN
    window_rope_scaled: bool = False


YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_factor": 8.0, "rope_original_max_position": 8192,
    "rope_attention_factor": 1.2079441541679836,  # the default, 0.1 ln(8) + 1, which config.json spells out
}  # fmt: skip
# The fields of config.json in allenai/Olmo-3-1025-7B and allenai/Olmo-3-1125-32B on huggingface.co, as other
# programs repeat them. Not compared with the published files.
FLAVORS = {
    "debug": Olmo3Config(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=32, hidden_dim=384, vocab_size=8192,
        max_position=2048, sliding_window=512,
    ),
    "7B": Olmo3Config(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008, **YARN),
    "32B": Olmo3Config(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648, **YARN),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Olmo3(ModelFamily, name="olmo3"):
    """Olmo 3. All flavors have windows in three layers of four."""

    flavors = FLAVORS
    hf_model_type = "olmo3"

    def build(self) -> Decoder:
        return Olmo3Decoder(self.config)

    def hf_config(self) -> dict[str, Any]:
        config = self.config
        return {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "attention_bias": False,
            **to_hf(config, rope_by_layer_type=True),
            **layers_to_hf(config),
            # transformers needs a window also if no layer has one.
            "sliding_window": config.sliding_window or DEFAULT_WINDOW,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        fields = from_hf(
            config, rope_by_layer_type=True, rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_theta=ROPE_THETA,
        )  # fmt: skip
        window_rope = (config.get("rope_parameters") or {}).get(LAYER_TYPES["S"]) or {}
        if config.get("rope_theta") not in (None, ROPE_THETA) and "rope_theta" not in window_rope:
            raise ConfigError(
                f"config.json: rope_parameters: {LAYER_TYPES['S']} has no rope_theta: transformers 4 reads "
                f"rope_theta = {config['rope_theta']}, transformers 5 {ROPE_THETA}; write it there"
            )
        layers = fields["n_layers"]
        window = config.get("sliding_window", DEFAULT_WINDOW)
        return cls.of_shape(fields | layers_from_hf(config.get("layer_types"), layers, window, PATTERN))


class Block(decoder.Block):
    """x + scale * norm(attention(x)), then x + scale * norm(mlp(x)), with residual_scale."""

    tp_plan: ClassVar[dict[str, str]] = {
        "model.layers.*.post_attention_layernorm": "residual",
        "model.layers.*.post_feedforward_layernorm": "residual",
    }

    def __init__(self, config: RotaryConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__(config, attention, mlp)
        del self.input_layernorm
        self.post_feedforward_layernorm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        x_BTD, h_BTD = self.attend(x_BTD, cos, sin, attention)
        return torch.add(x_BTD, self.post_feedforward_layernorm(self.mlp(h_BTD)), alpha=self.scale)

    def attend(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended = self.post_attention_layernorm(self.self_attn(x_BTD, cos, sin, attention))
        x_BTD = torch.add(x_BTD, attended, alpha=self.scale)
        return x_BTD, x_BTD


class Olmo3Decoder(RotaryDecoder):
    """RotaryDecoder with Olmo 3's blocks. Scales that Hugging Face's form lacks are folded into norms."""

    def __init__(self, config: Olmo3Config):
        super().__init__(config, SelfAttention, TP_PLAN, block=Block)
        del self.tp_plan["model.layers.*.input_layernorm"]
        self.folded_scales = {
            "post_attention_layernorm.weight": config.residual_scale,
            "post_feedforward_layernorm.weight": config.residual_scale,
            "self_attn.q_norm.weight": config.attention_scale,
            "model.norm.weight": config.logit_scale,
        }
