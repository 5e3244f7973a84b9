"""Small random models for tests of import and export, and the same models in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.deepseek_v3 import DeepSeekV3
from titanlite.models.gemma3 import Gemma3
from titanlite.models.gpt_oss import GptOss
from titanlite.models.llama3 import Llama3
from titanlite.models.mistral import Mistral
from titanlite.models.olmo3 import Olmo3
from titanlite.models.olmoe import Olmoe
from titanlite.models.qwen2 import Qwen2
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_5 import Qwen3_5
from titanlite.models.qwen3_5_moe import Qwen3_5MoE
from titanlite.models.qwen3_moe import Qwen3MoE

SHAPE = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 64,
    "vocab_size": 258,
}  # fmt: skip
SCALED = {"rope_factor": 8.0, "rope_original_max_position": 64, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_max_position": 64, "rope_theta": 1e4}
# More than ten, so that the order of their numbers is not that of their names.
EXPERTS = {"n_experts": 12, "n_experts_per_token": 3, "moe_hidden_dim": 24}
# A window of 12 tokens in two layers of three, and scores that head_dim does not scale.
GEMMA3 = {
    "name": "gemma3", "n_layers": 3, "head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24,
}  # fmt: skip
QWEN3_5 = {
    "n_layers": 3, "layer_pattern": "DL", "head_dim": 16, "delta_n_k_heads": 2, "delta_n_v_heads": 4,
    "delta_k_head_dim": 8, "delta_v_head_dim": 12,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "scaled rope": {**SCALED, "tie_word_embeddings": False},
    "one key per query, head dim apart": {"n_kv_heads": 4, "head_dim": 16, "tie_word_embeddings": False},
    "qwen3": {"name": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen3, tied": {"name": "qwen3", "tie_word_embeddings": True},
    "qwen2, yarn": {"name": "qwen2", "tie_word_embeddings": False, **YARN},
    "qwen3_moe": {"name": "qwen3_moe", "tie_word_embeddings": False, **EXPERTS},
    "olmoe": {"name": "olmoe", "tie_word_embeddings": False, "hidden_dim": 0, **EXPERTS},
    "gpt_oss": {
        "name": "gpt_oss",
        "hidden_dim": 0,
        "sliding_window": 20,
        "rope_original_max_position": 64,
        "swiglu_limit": 0.4,
        **EXPERTS,
    },
    "deepseek_v3": {
        "name": "deepseek_v3",
        "tie_word_embeddings": False,
        "n_kv_heads": 4,
        "head_dim": 24,
        "rope_head_dim": 8,
        "v_head_dim": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "n_expert_groups": 4,
        "n_expert_groups_per_token": 2,
        **EXPERTS,
    },
    "gemma3": {**GEMMA3, "tie_word_embeddings": False, "rope_type": "linear", "rope_factor": 8.0},
    "gemma3, tied": GEMMA3,
    "olmo3": {"name": "olmo3", "sliding_window": 12, "layer_pattern": "SL", **YARN},
    "qwen3_5, tied": {"name": "qwen3_5", **QWEN3_5},
    "qwen3_5_moe": {
        "name": "qwen3_5_moe",
        "hidden_dim": 0,
        "shared_hidden_dim": 40,
        **QWEN3_5,
        **EXPERTS,
    },
    "mistral, tied": {"name": "mistral", "tie_word_embeddings": True, "sliding_window": 20},
}


class Parameters(Decoder):
    """A model that consists of named parameters outside of its blocks."""

    def __init__(self, parameters: dict[str, nn.Parameter]):
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def blocks(self) -> nn.ModuleDict:
        return nn.ModuleDict()


def family(name: str = "llama3", **overrides: Any) -> ModelFamily:
    """The family of a tiny model with a vocabulary of 258 ids, for raw bytes."""
    choices = (
        *(DeepSeekV3, Gemma3, GptOss, Llama3, Mistral, Olmo3, Olmoe, Qwen2, Qwen3, Qwen3MoE, Qwen3_5),
        Qwen3_5MoE,
    )
    component = {choice.name: choice for choice in choices}[name]
    return component(flavor="debug", overrides={**SHAPE, **overrides})


def keys_of(component: ModelFamily) -> list[str]:
    """The command-line arguments that choose the family."""
    overrides = [f"--model.overrides.{key}={json.dumps(value)}" for key, value in component.overrides.items()]
    return [f"--model.name={component.name}", *overrides]


def random_net(component: ModelFamily, seed: int = 0) -> Decoder:
    """A model of the family, with weights large enough that mistakes show."""
    net = component.build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + net.init_normal(name)[0])
        for name, buffer in net.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return net


def hugging_face(component: ModelFamily, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """transformers' model with the same weights."""
    import transformers

    config = transformers.AutoConfig.for_model(**component.hf_config())
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    model.load_state_dict(random_net(component, seed).state_dict(), strict=False)
    return model.eval().to(dtype)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory."""
    from safetensors.torch import load_file

    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def row(length: int = 256, vocab_size: int = 256, seed: int = 7) -> torch.Tensor:
    """Tokens [1, length]."""
    return torch.randint(0, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
