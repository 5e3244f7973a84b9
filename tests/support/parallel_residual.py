"""A family from outside titanlite: attention and feed-forward in parallel, as in GPT-J, with its own
parameter names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.attention.base import Attention
from titanlite.attention.sdpa import CAUSAL
from titanlite.models.base import Decoder, DecoderConfig, HeadFn, ModelFamily, logits
from titanlite.models.layers import Head, Linear, RMSNorm, RopeScaling, apply_rope, rope_tables


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The architecture fields of this family besides those of every family."""

    rope_theta: float = 10000.0


FLAVORS = {
    "tiny": Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=64, vocab_size=258),
}


@dataclass(frozen=True, kw_only=True)
class ParallelResidual(ModelFamily, name="parallel_residual"):
    """Attention and feed-forward in parallel."""

    flavors = FLAVORS

    def build(self) -> Decoder:
        return Net(self.config)


TP_PLAN = {
    "wte": "embedding",
    "h.*.norm": "sequence",
    "h.*.attn": "gather",
    "h.*.attn.[qkv]": "colwise",
    "h.*.attn.out": "rowwise",
    "h.*.mlp": "gather",
    "h.*.mlp.up": "colwise",
    "h.*.mlp.down": "rowwise",
    "norm": "sequence",
    "head": "head",
}


class SelfAttention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.q = Linear(config.dim, config.n_heads * config.head_dim)
        self.k = Linear(config.dim, config.n_kv_heads * config.head_dim)
        self.v = Linear(config.dim, config.n_kv_heads * config.head_dim)
        self.out = Linear(config.n_heads * config.head_dim, config.dim)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q, self.k, self.v))
        return self.out(attention.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.up, self.down = Linear(config.dim, config.hidden_dim), Linear(config.hidden_dim, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm, self.attn, self.mlp = RMSNorm(config.dim, 1e-5), SelfAttention(config), FeedForward(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attn(h, cos, sin, attention) + self.mlp(h)


class Net(Decoder):
    tp_plan = TP_PLAN
    mlp_down = "mlp.down"

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.wte: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.h = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(config.dim, 1e-5)
        self.head: Head | None = Head(config.dim, config.vocab_size)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention: Attention = CAUSAL,
        head_fn: HeadFn = logits,
    ) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta, RopeScaling())
        x = tokens if self.wte is None else self.wte(tokens)  # hidden states of an earlier stage
        for block in self.h.values():
            x = block(x, cos, sin, attention)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x, head_fn)

    def pipeline_stage(self, blocks: Collection[str], first: bool, last: bool) -> Decoder:
        with torch.device("meta"):
            stage = Net(self.config)
        stage.h = nn.ModuleDict({i: block for i, block in self.h.items() if i in blocks})
        stage.wte = self.wte if first else None
        stage.norm, stage.head = (self.norm, self.head) if last else (None, None)
        return stage

    def blocks(self) -> nn.ModuleDict:
        return self.h

    def embedding_and_head(self) -> list[list[nn.Module]]:
        groups = [[self.wte], [self.norm, self.head]]
        return [
            [module for module in group if module is not None] for group in groups if group[0] is not None
        ]

    def init_normal(self, name: str) -> tuple[float, float]:
        return (1.0, 0.0) if name.endswith("norm.weight") else (0.0, 0.02)

    def num_matmul_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters()) - self.vocab_size * self.config.dim
