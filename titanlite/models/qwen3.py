"""Qwen3's dense models (Yang et al. 2025): the decoder of decoder.py with RMSNorm on each head's queries and
keys before the rotary embedding. head_dim is independent of the model dim.

Parameter names follow Hugging Face's Qwen3ForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from titanlite.models import decoder
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.hf_config import from_hf, qwen_window, qwen_window_to_hf, to_hf
from titanlite.models.layers import RMSNorm


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(RotaryConfig):
    """The architecture of one flavor."""

    vocab_size: int = 151936
    n_kv_heads: int = 8
    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position: int = 40960


FLAVORS = {
    "debug": Qwen3Config(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=384, vocab_size=8192,
        max_position=2048, tie_word_embeddings=True,
    ),
    "0.6B": Qwen3Config(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tie_word_embeddings=True),
    "1.7B": Qwen3Config(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tie_word_embeddings=True),
    "4B": Qwen3Config(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, tie_word_embeddings=True),
    "8B": Qwen3Config(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
    "14B": Qwen3Config(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
    "32B": Qwen3Config(dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen3(ModelFamily, name="qwen3"):
    """Qwen3, dense. 0.6B, 1.7B and 4B have tied embeddings."""

    flavors = FLAVORS
    hf_model_type = "qwen3"

    def build(self) -> Decoder:
        return RotaryDecoder(self.config, SelfAttention, TP_PLAN)

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            **to_hf(self.config),
            **qwen_window_to_hf(self.config),
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        fields = from_hf(config, ("use_sliding_window",), head_dim=128, tie_word_embeddings=False)
        return cls.of_shape(fields | qwen_window(config, fields["n_layers"]))


TP_PLAN = {"model.layers.*.self_attn.[qk]_norm": "heads"}


class SelfAttention(decoder.SelfAttention):
    """Attention with a norm of the queries and a norm of the keys. All heads share the norms' weights."""

    scales_queries = "q_norm"

    def __init__(self, config: RotaryConfig):
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def normed(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q_BTHE), self.k_norm(k_BTKE)
