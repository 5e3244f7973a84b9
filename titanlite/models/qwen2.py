"""Qwen2 and Qwen2.5, dense (Yang et al. 2024): the decoder of decoder.py with biases in the projections to
queries, keys and values.

Parameter names follow Hugging Face's Qwen2ForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.models import decoder
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.hf_config import from_hf, qwen_window, qwen_window_to_hf, to_hf


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(RotaryConfig):
    """The architecture of one flavor."""

    vocab_size: int = 151936
    n_kv_heads: int = 8
    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position: int = 131072


# The fields of config.json in Qwen/Qwen2.5-0.5B to Qwen/Qwen2.5-72B, the base models. Tests compare the
# numbers of parameters. Not compared with published files: max_position of 1.5B, and 72B, which has the
# fields of Qwen2-72B.
FLAVORS = {
    "debug": Qwen2Config(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=8192,
        max_position=2048, tie_word_embeddings=True,
    ),
    "0.5B": Qwen2Config(
        dim=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64, hidden_dim=4864, max_position=32768,
        tie_word_embeddings=True,
    ),
    "1.5B": Qwen2Config(
        dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, hidden_dim=8960, tie_word_embeddings=True,
    ),
    "3B": Qwen2Config(
        dim=2048, n_layers=36, n_heads=16, n_kv_heads=2, hidden_dim=11008, max_position=32768,
        tie_word_embeddings=True,
    ),
    "7B": Qwen2Config(
        dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, hidden_dim=18944, vocab_size=152064,
    ),
    "14B": Qwen2Config(
        dim=5120, n_layers=48, n_heads=40, hidden_dim=13824, vocab_size=152064, norm_eps=1e-5,
    ),
    "32B": Qwen2Config(
        dim=5120, n_layers=64, n_heads=40, hidden_dim=27648, vocab_size=152064, norm_eps=1e-5,
    ),
    "72B": Qwen2Config(
        dim=8192, n_layers=80, n_heads=64, hidden_dim=29568, vocab_size=152064, norm_eps=1e-5,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen2(ModelFamily, name="qwen2"):
    """Qwen2.5, dense. 0.5B, 1.5B and 3B have tied embeddings."""

    flavors = FLAVORS
    hf_model_type = "qwen2"

    def build(self) -> Decoder:
        return RotaryDecoder(self.config, SelfAttention)

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            **to_hf(self.config),
            **qwen_window_to_hf(self.config),
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        own = ("use_sliding_window", "attention_bias")  # the biases are the same in all models
        defaults: dict[str, Any] = {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        }
        fields = from_hf(config, own, **defaults)
        return cls.of_shape(fields | qwen_window(config, fields["n_layers"]))


class SelfAttention(decoder.SelfAttention):
    """Attention with biases in the projections to queries, keys and values, and none in the output's."""

    qkv_bias = True
