"""OLMoE (Muennighoff et al. 2024): the decoder of decoder.py with experts in every block and an RMSNorm over
all heads' queries together, and one over all heads' keys.

Parameter names follow Hugging Face's OlmoeForCausalLM in transformers 5.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from titanlite.config.component import ConfigError
from titanlite.models import decoder
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig
from titanlite.models.hf_config import check_no_window, from_hf, to_hf
from titanlite.models.layers import RMSNorm
from titanlite.models.moe import MoEConfig, MoEDecoder, MoEFamily, experts_from_hf, experts_to_hf


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    """The architecture of one flavor. `hidden_dim`: 0, there are no dense blocks."""

    may_be_zero: ClassVar[tuple[str, ...]] = (*MoEConfig.may_be_zero, "hidden_dim")

    vocab_size: int = 50304
    hidden_dim: int = 0
    norm_topk_prob: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_dim:
            raise ConfigError(f"hidden_dim = {self.hidden_dim}: OLMoE has experts only; set moe_hidden_dim")


# The fields of config.json in allenai/OLMoE-1B-7B-0924 on huggingface.co.
FLAVORS = {
    "debug": OlmoeConfig(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=32, vocab_size=8192, max_position=2048,
        n_experts=8, n_experts_per_token=2, moe_hidden_dim=192,
    ),
    "1B-7B": OlmoeConfig(
        dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, head_dim=128, n_experts=64, n_experts_per_token=8,
        moe_hidden_dim=1024,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Olmoe(MoEFamily, name="olmoe"):
    """OLMoE. 1B-7B has 6.9e9 parameters, of which a token uses 1.3e9."""

    flavors = FLAVORS
    hf_model_type = "olmoe"

    def build(self) -> Decoder:
        return MoEDecoder(self.config, SelfAttention, TP_PLAN)

    def hf_config(self) -> dict[str, Any]:
        config = self.config
        check_no_window(config)
        if config.head_dim * config.n_heads != config.dim:
            raise ConfigError(
                f"head_dim = {config.head_dim}: in Hugging Face's OLMoE it is dim / n_heads",
                "model.overrides.head_dim",
            )
        return {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "attention_bias": False,
            "clip_qkv": None,
            **to_hf(config),
            **experts_to_hf(config),
            "intermediate_size": config.moe_hidden_dim,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        if config.get("clip_qkv") is not None:
            raise ConfigError(
                f"config.json: clip_qkv = {json.dumps(config['clip_qkv'])}; only null is supported"
            )
        fields = from_hf(config, rms_norm_eps=1e-5, tie_word_embeddings=False)
        moe_hidden_dim = fields.pop("hidden_dim")
        return cls.of_shape({**fields, **experts_from_hf(config), "moe_hidden_dim": moe_hidden_dim})


TP_PLAN = {"model.layers.*.self_attn.[qk]_norm": "all_heads"}


class SelfAttention(decoder.SelfAttention):
    """Attention with a norm over the queries of all heads, and a norm over their keys."""

    scales_queries = "q_norm"

    def __init__(self, config: RotaryConfig):
        super().__init__(config)
        self.q_norm = RMSNorm(config.n_heads * config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.n_kv_heads * config.head_dim, config.norm_eps)

    def normed(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self.q_norm(q_BTHE.flatten(-2)), self.k_norm(k_BTKE.flatten(-2))
        return q.view_as(q_BTHE), k.view_as(k_BTKE)
