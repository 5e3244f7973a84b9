"""Llama 3 (Grattafiori et al. 2024): the decoder of decoder.py, with Llama 3.1's scaling of the rotary
frequencies.

Parameter names are those of Hugging Face's LlamaForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.hf_config import check_rope_type, from_hf, to_hf
from titanlite.models.layers import RopeScaling


@dataclass(frozen=True, kw_only=True)
class Llama3Config(RotaryConfig):
    """The architecture of one flavor. rope_factor 1 means no scaling of the rotary frequencies."""

    vocab_size: int = 128256
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position: int = 8192
    max_position: int = 131072

    def architecture_fields(self) -> dict[str, Any]:
        unused = set(ROPE.values()) - {"rope_factor"} if self.rope_factor == 1.0 else set()
        return {key: value for key, value in super().architecture_fields().items() if key not in unused}

    @property
    def rope_scaling(self) -> RopeScaling:
        return RopeScaling(
            self.rope_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_original_max_position,
        )


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


ROPE = {  # Hugging Face's name: field of Llama3Config
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position",
}


@dataclass(frozen=True, kw_only=True)
class Llama3(ModelFamily, name="llama3"):
    """Llama 3. 1B and 3B are Llama 3.2 (tied embeddings), 8B to 405B Llama 3.1."""

    flavors = FLAVORS
    hf_model_type = "llama"

    def build(self) -> Decoder:
        return RotaryDecoder(self.config)

    def hf_config(self) -> dict[str, Any]:
        config = self.config
        scaled = {"rope_type": "llama3"} | {key: getattr(config, name) for key, name in ROPE.items()}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "mlp_bias": False,
            **to_hf(config, scaled if config.rope_factor != 1.0 else {}),
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        fields, rope = from_hf(config, rms_norm_eps=1e-6, tie_word_embeddings=False)
        check_rope_type(rope, "default", "llama3")
        scaled = rope["rope_type"] == "llama3"
        fields |= {name: rope[hf_key] for hf_key, name in ROPE.items()} if scaled else {"rope_factor": 1.0}
        return cls.of_shape(fields)
