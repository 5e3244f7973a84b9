"""Mistral's dense models (Jiang et al. 2023): the decoder of decoder.py. Version 0.1 has a sliding window.

Parameter names follow Hugging Face's MistralForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.hf_config import DEFAULT_WINDOW, check_equal_layers, from_hf, to_hf


@dataclass(frozen=True, kw_only=True)
class MistralConfig(RotaryConfig):
    """The architecture of one flavor."""

    n_heads: int = 32
    n_kv_heads: int = 8
    head_dim: int = 128
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_position: int = 32768


# The fields of config.json in mistralai/Mistral-7B-v0.1, Mistral-7B-v0.3, Mistral-Nemo-Base-2407 and
# Mistral-Small-24B-Base-2501 on huggingface.co. v0.3's were not compared with the published file.
FLAVORS = {
    "debug": MistralConfig(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=8192,
        max_position=2048, sliding_window=512, tie_word_embeddings=True,
    ),
    "7B-v0.1": MistralConfig(
        dim=4096, n_layers=32, hidden_dim=14336, vocab_size=32000, rope_theta=1e4, sliding_window=4096,
    ),
    "7B-v0.3": MistralConfig(dim=4096, n_layers=32, hidden_dim=14336, vocab_size=32768),
    "12B": MistralConfig(dim=5120, n_layers=40, hidden_dim=14336, vocab_size=131072, max_position=128000),
    "24B": MistralConfig(dim=5120, n_layers=40, hidden_dim=32768, vocab_size=131072, rope_theta=1e8),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mistral(ModelFamily, name="mistral"):
    """Mistral, dense. 7B-v0.1 has a sliding window of 4096 tokens; 12B is Nemo, 24B Small 3."""

    flavors = FLAVORS
    hf_model_type = "mistral"

    def build(self) -> Decoder:
        return RotaryDecoder(self.config)

    def hf_config(self) -> dict[str, Any]:
        check_equal_layers(self.config)
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": self.config.sliding_window or None,
            **to_hf(self.config),
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        fields = from_hf(config, num_key_value_heads=8, rms_norm_eps=1e-6, tie_word_embeddings=False)
        return cls.of_shape(fields | {"sliding_window": config.get("sliding_window", DEFAULT_WINDOW) or 0})
