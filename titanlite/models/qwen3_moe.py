"""Qwen3's mixtures of experts (Yang et al. 2025): Qwen3 with experts in every block, without shared experts.

Parameter names follow Hugging Face's Qwen3MoeForCausalLM in transformers 5.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.hf_config import check_equal_layers, from_hf, qwen_window, qwen_window_to_hf, to_hf
from titanlite.models.moe import MoEConfig, MoEDecoder, MoEFamily, experts_from_hf, experts_to_hf
from titanlite.models.qwen3 import TP_PLAN, Qwen3Config, SelfAttention


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(Qwen3Config, MoEConfig):
    """The architecture of one flavor. `hidden_dim`: of dense blocks, of which there are none; kept because
    config.json has it."""

    n_kv_heads: int = 4
    norm_topk_prob: bool = True

    def architecture_fields(self) -> dict[str, Any]:
        fields = super().architecture_fields()
        del fields["hidden_dim"]  # without effect
        return fields


# The fields of config.json in Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B on huggingface.co.
FLAVORS = {
    "debug": Qwen3MoEConfig(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=8192,
        max_position=2048, tie_word_embeddings=True, n_experts=8, n_experts_per_token=2, moe_hidden_dim=192,
    ),
    "30B-A3B": Qwen3MoEConfig(
        dim=2048, n_layers=48, n_heads=32, hidden_dim=6144, n_experts=128, n_experts_per_token=8,
        moe_hidden_dim=768,
    ),
    "235B-A22B": Qwen3MoEConfig(
        dim=4096, n_layers=94, n_heads=64, hidden_dim=12288, n_experts=128, n_experts_per_token=8,
        moe_hidden_dim=1536,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen3MoE(MoEFamily, name="qwen3_moe"):
    """Qwen3 with experts. Flavors: parameters, and active parameters per token."""

    flavors = FLAVORS
    hf_model_type = "qwen3_moe"

    def build(self) -> Decoder:
        return MoEDecoder(self.config, SelfAttention, TP_PLAN)

    def hf_config(self) -> dict[str, Any]:
        check_equal_layers(self.config)
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            **to_hf(self.config),
            **qwen_window_to_hf(self.config),
            **experts_to_hf(self.config),
            "moe_intermediate_size": self.config.moe_hidden_dim,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        for key, value in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
            if config.get(key) not in (None, value):
                raise ConfigError(
                    f"config.json: {key} = {json.dumps(config[key])}: blocks without experts are not "
                    f"supported, only {json.dumps(value)}"
                )
        if config.get("moe_intermediate_size") is None:
            raise ConfigError("config.json has no moe_intermediate_size")
        fields = from_hf(config, ("use_sliding_window",), head_dim=128, tie_word_embeddings=False)
        fields |= qwen_window(config, fields["n_layers"])
        if fields["layer_pattern"]:
            raise ConfigError(
                "config.json: layers of several kinds, but transformers' qwen3_moe has the same attention in "
                "all layers"
            )
        return cls.of_shape(
            {**fields, **experts_from_hf(config), "moe_hidden_dim": config["moe_intermediate_size"]}
        )
