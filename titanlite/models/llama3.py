"""Llama 3 (Grattafiori et al. 2024): pre-norm decoder, grouped-query attention, rotary embedding, SwiGLU.

Parameter names, shapes and the rotate-half layout are those of Hugging Face's LlamaForCausalLM, so that its
safetensors load by name. Shape suffixes: B batch, T tokens, D model dim, H query heads, K key/value heads, E
head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titanlite.config.component import ConfigError
from titanlite.models.attention import Mask, causal_attention
from titanlite.models.base import Decoder, DecoderConfig, LossFunction, ModelFamily
from titanlite.models.layers import Head, Linear, RMSNorm, RopeScaling, SwiGLU, apply_rope, head, rope_tables


@dataclass(frozen=True, kw_only=True)
class Llama3Config(DecoderConfig):
    """The shape of one flavor. rope_factor 1 means no scaling; max_position is only told to Hugging Face."""

    vocab_size: int = 128256
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position: int = 8192
    max_position: int = 131072
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim = {self.head_dim} is odd; rotary embedding pairs its two halves")

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


@dataclass(frozen=True, kw_only=True)
class Llama3(ModelFamily, name="llama3"):
    """Llama 3. 1B and 3B have Llama 3.2's shapes (tied embeddings), 8B to 405B Llama 3.1's."""

    flavors = FLAVORS

    def build(self) -> Decoder:
        return LlamaForCausalLM(self.config)

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
        if c.rope_factor != 1.0:
            rope |= {
                "rope_type": "llama3",
                "factor": c.rope_factor,
                "low_freq_factor": c.rope_low_freq_factor,
                "high_freq_factor": c.rope_high_freq_factor,
                "original_max_position_embeddings": c.rope_original_max_position,
            }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": c.vocab_size,
            "hidden_size": c.dim,
            "intermediate_size": c.hidden_dim,
            "num_hidden_layers": c.n_layers,
            "num_attention_heads": c.n_heads,
            "num_key_value_heads": c.n_kv_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": c.max_position,
            "rms_norm_eps": c.norm_eps,
            "rope_theta": c.rope_theta,
            "rope_parameters": rope,
            "rope_scaling": rope if c.rope_factor != 1.0 else None,
            "tie_word_embeddings": c.tie_word_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
        }


TENSOR_PLAN = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "sequence",
    "model.layers.*.self_attn": "gather",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.post_attention_layernorm": "sequence",
    "model.layers.*.mlp": "gather",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.norm": "sequence",
}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: Llama3Config):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.dim, c.n_heads * c.head_dim)
        self.k_proj = Linear(c.dim, c.n_kv_heads * c.head_dim)
        self.v_proj = Linear(c.dim, c.n_kv_heads * c.head_dim)
        self.o_proj = Linear(c.n_heads * c.head_dim, c.dim)

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask | None
    ) -> torch.Tensor:
        # -1: the number of heads here, which tensor parallelism divides
        q, k, v = (
            p(x_BTD).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BTHE = causal_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask)
        return self.o_proj(out_BTHE.flatten(-2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: Llama3Config):
        super().__init__()
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = SwiGLU(c.dim, c.hidden_dim)

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask | None
    ) -> torch.Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos, sin, mask)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class LlamaModel(nn.Module):
    """Embedding, blocks, final norm. An end that is None is another stage's: input passes through."""

    def __init__(self, c: Llama3Config):
        super().__init__()
        self.config = c
        self.embed_tokens: nn.Embedding | None = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(c.dim, c.norm_eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None, mask: Mask | None) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        c = self.config
        cos, sin = rope_tables(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        h_BTD = self.embed_tokens(x) if self.embed_tokens is not None else x
        for block in self.layers.values():
            h_BTD = block(h_BTD, cos, sin, mask)
        return self.norm(h_BTD) if self.norm is not None else h_BTD


class LlamaForCausalLM(Decoder):
    """The model with its head. Tied flavors have no lm_head: the embedding's weight serves as the head's."""

    def __init__(self, c: Llama3Config):
        super().__init__()
        self.config, self.vocab_size, self.dim = c, c.vocab_size, c.dim
        self.model = LlamaModel(c)
        self.lm_head = None if c.tie_word_embeddings else Head(c.dim, c.vocab_size)
        self.tensor_plan = TENSOR_PLAN if c.tie_word_embeddings else {**TENSOR_PLAN, "lm_head": "head"}

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: LossFunction | None = None,
        positions: torch.Tensor | None = None,
        mask: Mask | None = None,
    ) -> torch.Tensor:
        h_BTD = self.model(tokens, positions, mask)
        if self.lm_head is not None:
            return self.lm_head(h_BTD, targets, loss)
        if self.config.tie_word_embeddings and self.model.embed_tokens is not None:
            return head(h_BTD, self.model.embed_tokens.weight, targets, loss)
        return h_BTD

    def part(self, blocks: Collection[str], first: bool, last: bool) -> Decoder:
        with torch.device("meta"):
            part = LlamaForCausalLM(self.config)
        part.model.layers = nn.ModuleDict({i: b for i, b in self.model.layers.items() if i in blocks})
        part.model.embed_tokens = self.model.embed_tokens if first else None
        part.model.norm = self.model.norm if last else None
        part.lm_head = self.lm_head if last else None
        return part

    def blocks(self) -> nn.ModuleDict:
        return self.model.layers

    def ends(self) -> list[list[nn.Module]]:
        if self.config.tie_word_embeddings:
            return []
        before: list[nn.Module | None] = [self.model.embed_tokens]
        after: list[nn.Module | None] = [self.model.norm, self.lm_head]
        ends = [[module for module in end if module is not None] for end in (before, after)]
        return [end for end in ends if end]

    def initial(self, name: str) -> tuple[float, float]:
        if name.endswith("norm.weight"):
            return 1.0, 0.0
        # Projections that write to the residual stream shrink with depth (GPT-2), so its variance does not
        # grow with it.
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.0, 0.02 / math.sqrt(2 * self.config.n_layers) if residual else 0.02

    def num_matmul_parameters(self) -> int:
        total = sum(p.numel() for p in self.parameters())
        return total if self.lm_head is None else total - self.vocab_size * self.config.dim
