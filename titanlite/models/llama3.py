"""Llama 3 (Grattafiori et al. 2024): the decoder of decoder.py. The flavors from 1B have Llama 3.1's scaling
of the rotary frequencies.

Parameter names follow Hugging Face's LlamaForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.hf_config import check_no_window, from_hf, to_hf


@dataclass(frozen=True, kw_only=True)
class Llama3Config(RotaryConfig):
    """The architecture of one flavor."""

    vocab_size: int = 128256
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    max_position: int = 131072


FLAVORS = {
    "debug": Llama3Config(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=8192,
        max_position=2048, tie_word_embeddings=True,
    ),
    "125M": Llama3Config(
        dim=768, n_layers=16, n_heads=12, n_kv_heads=4, head_dim=64, hidden_dim=2048, vocab_size=32768,
        max_position=8192, tie_word_embeddings=True,
    ),
    "1B": Llama3Config(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, hidden_dim=8192, rope_factor=32.0,
        tie_word_embeddings=True,
    ),
    "3B": Llama3Config(
        dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, head_dim=128, hidden_dim=8192, rope_factor=32.0,
        tie_word_embeddings=True,
    ),
    "8B": Llama3Config(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336, rope_factor=8.0,
    ),
    "70B": Llama3Config(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128, hidden_dim=28672, rope_factor=8.0,
    ),
    "405B": Llama3Config(
        dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, head_dim=128, hidden_dim=53248, rope_factor=8.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Llama3(ModelFamily, name="llama3"):
    """Llama 3. 1B and 3B are Llama 3.2 (tied embeddings), 8B to 405B Llama 3.1."""

    flavors = FLAVORS
    hf_model_type = "llama"

    def build(self) -> Decoder:
        return RotaryDecoder(self.config)

    def hf_config(self) -> dict[str, Any]:
        check_no_window(self.config)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            **to_hf(self.config),
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        return cls.of_shape(from_hf(config, rms_norm_eps=1e-6, tie_word_embeddings=False))
