"""Qwen3.5's mixtures of experts: Qwen3.5 with experts in every block, and beside them a shared expert whose
output is multiplied by the sigmoid of a gate.

Parameter names and values follow Hugging Face's Qwen3_5MoeForCausalLM in transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder, ModelFamily, Role
from titanlite.models.decoder import MLP_PLAN
from titanlite.models.layers import Linear, SwiGLU
from titanlite.models.moe import MoE, MoEConfig, MoEDecoder, MoEFamily, experts_from_hf, experts_to_hf
from titanlite.models.qwen3_5 import (
    ATTENTION_PLAN,
    DELTA_TP_FIELDS,
    Block,
    Hybrid,
    Qwen3_5Config,
    SelfAttention,
    WithMTP,
    fields_from_hf,
    fields_to_hf,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoEConfig(Qwen3_5Config, MoEConfig):
    """The architecture of one flavor. `hidden_dim`: 0, there are no dense blocks. `shared_hidden_dim`: hidden
    units of the shared expert."""

    may_be_zero: ClassVar[tuple[str, ...]] = (*Qwen3_5Config.may_be_zero, "hidden_dim")

    hidden_dim: int = 0
    n_kv_heads: int = 2
    norm_topk_prob: bool = True
    shared_hidden_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_dim:
            raise ConfigError(f"hidden_dim = {self.hidden_dim}: all blocks have experts; set moe_hidden_dim")
        if not self.norm_topk_prob:
            raise ConfigError("norm_topk_prob = false: Qwen3.5 divides a token's weights by their sum")


# The fields of text_config in config.json of Qwen/Qwen3.5-35B-A3B and Qwen3.5-397B-A17B on huggingface.co, as
# other programs repeat them. Not compared with the published files.
FLAVORS = {
    "debug": Qwen3_5MoEConfig(
        dim=128, n_layers=4, n_heads=4, head_dim=64, vocab_size=8192, max_position=2048, n_experts=8,
        n_experts_per_token=2, moe_hidden_dim=192, shared_hidden_dim=192, delta_n_k_heads=2,
        delta_n_v_heads=4, delta_k_head_dim=32, delta_v_head_dim=32,
    ),
    "35B-A3B": Qwen3_5MoEConfig(
        dim=2048, n_layers=40, n_heads=16, n_experts=256, n_experts_per_token=8, moe_hidden_dim=512,
        shared_hidden_dim=512,
    ),
    "397B-A17B": Qwen3_5MoEConfig(
        dim=4096, n_layers=60, n_heads=32, n_experts=512, n_experts_per_token=10, moe_hidden_dim=1024,
        shared_hidden_dim=1024, delta_n_v_heads=64,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoE(MoEFamily, name="qwen3_5_moe"):
    """Qwen3.5 with experts, text only. Flavors: parameters, and active parameters per token."""

    flavors = FLAVORS
    hf_model_type = "qwen3_5_moe_text"
    hf_multimodal_type = "qwen3_5_moe"
    tp_fields: ClassVar[dict[str, str]] = {
        **MoEFamily.tp_fields,
        **DELTA_TP_FIELDS,
        "shared_hidden_dim": "",
    }

    def build(self) -> Decoder:
        config = self.config
        return Qwen3_5MoEWithMTP(config) if config.n_mtp_layers else Qwen3_5MoEDecoder(config)

    def hf_config(self) -> dict[str, Any]:
        fields = {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            **fields_to_hf(self.config),
            **experts_to_hf(self.config),
            "moe_intermediate_size": self.config.moe_hidden_dim,
            "shared_expert_intermediate_size": self.config.shared_hidden_dim,
        }
        del fields["intermediate_size"]
        return fields

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        keys = ("moe_intermediate_size", "shared_expert_intermediate_size")
        if missing := [key for key in keys if config.get(key) is None]:
            raise ConfigError(f"config.json has no {missing[0]}")
        moe_hidden_dim, shared_hidden_dim = (config[key] for key in keys)
        fields = fields_from_hf({"num_key_value_heads": 2, **config, "intermediate_size": moe_hidden_dim})
        return cls.of_shape(
            {
                **fields,
                **experts_from_hf({**config, "norm_topk_prob": config.get("norm_topk_prob", True)}),
                "hidden_dim": 0,
                "moe_hidden_dim": moe_hidden_dim,
                "shared_hidden_dim": shared_hidden_dim,
            }
        )


class GatedSharedMoE(MoE):
    """A layer of experts with a shared expert, which every token visits, and its gate."""

    def __init__(self, config: Qwen3_5MoEConfig):
        super().__init__(config)
        self.shared_expert = SwiGLU(config.dim, config.shared_hidden_dim)
        self.shared_expert_gate = Linear(config.dim, 1)

    def forward(self, h_BTD: torch.Tensor) -> torch.Tensor:
        shared_BTD = torch.sigmoid(self.shared_expert_gate(h_BTD)) * self.shared_expert(h_BTD)
        return super().forward(h_BTD) + shared_BTD


def moe_mlp(config: Qwen3_5MoEConfig, block: int) -> nn.Module:
    """The layer of experts of the block with the number `block`."""
    return GatedSharedMoE(config)


class Qwen3_5MoEDecoder(Hybrid, MoEDecoder):
    """The model with experts."""

    config: Qwen3_5MoEConfig

    def __init__(self, config: Qwen3_5MoEConfig):
        super().__init__(config, SelfAttention, ATTENTION_PLAN, moe_mlp, Block)
        self.set_up()
        shared = {name.replace(".mlp", ".mlp.shared_expert"): style for name, style in MLP_PLAN.items()}
        self.tp_plan |= {**shared, "model.layers.*.mlp.shared_expert_gate": "own_tokens"}

    def parameter_role(self, name: str) -> Role:
        return "router" if name.endswith("shared_expert_gate.weight") else super().parameter_role(name)


class Qwen3_5MoEWithMTP(WithMTP, Qwen3_5MoEDecoder):
    """The model with experts and a module for multi-token prediction."""

    def __init__(self, config: Qwen3_5MoEConfig):
        super().__init__(config)
        self.add_module_with(GatedSharedMoE(config))
