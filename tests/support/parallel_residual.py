"""A family from outside titanlite: attention and feed-forward side by side, as in GPT-J, and names of its
own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.attention.base import Mask, causal_attention
from titanlite.models.base import Decoder, DecoderConfig, LossFunction, ModelFamily
from titanlite.models.layers import Head, Linear, RMSNorm, RopeScaling, apply_rope, rope_tables


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """What the flavors have besides the fields that all families have."""

    rope_theta: float = 10000.0


FLAVORS = {
    "tiny": Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=64, vocab_size=258),
}


@dataclass(frozen=True, kw_only=True)
class ParallelResidual(ModelFamily, name="parallel_residual"):
    """Attention and feed-forward side by side."""

    flavors = FLAVORS

    def build(self) -> Decoder:
        return Net(self.config)


TENSOR_PLAN = {
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


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.head_dim = c.head_dim
        self.q = Linear(c.dim, c.n_heads * c.head_dim)
        self.k = Linear(c.dim, c.n_kv_heads * c.head_dim)
        self.v = Linear(c.dim, c.n_kv_heads * c.head_dim)
        self.out = Linear(c.n_heads * c.head_dim, c.dim)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask | None
    ) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q, self.k, self.v))
        return self.out(
            causal_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask).flatten(-2)
        )


class FeedForward(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.up, self.down = Linear(c.dim, c.hidden_dim), Linear(c.hidden_dim, c.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm, self.attn, self.mlp = RMSNorm(c.dim, 1e-5), Attention(c), FeedForward(c)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask | None
    ) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attn(h, cos, sin, mask) + self.mlp(h)


class Net(Decoder):
    tensor_plan = TENSOR_PLAN

    def __init__(self, c: Config):
        super().__init__()
        self.config, self.vocab_size, self.dim = c, c.vocab_size, c.dim
        self.wte: nn.Embedding | None = nn.Embedding(c.vocab_size, c.dim)
        self.h = nn.ModuleDict({str(i): Block(c) for i in range(c.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(c.dim, 1e-5)
        self.head: Head | None = Head(c.dim, c.vocab_size)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: LossFunction | None = None,
        positions: torch.Tensor | None = None,
        mask: Mask | None = None,
    ) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta, RopeScaling())
        x = tokens if self.wte is None else self.wte(tokens)  # what an earlier stage has found
        for block in self.h.values():
            x = block(x, cos, sin, mask)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x, targets, loss)

    def part(self, blocks: Collection[str], first: bool, last: bool) -> Decoder:
        with torch.device("meta"):
            part = Net(self.config)
        part.h = nn.ModuleDict({i: block for i, block in self.h.items() if i in blocks})
        part.wte = self.wte if first else None
        part.norm, part.head = (self.norm, self.head) if last else (None, None)
        return part

    def blocks(self) -> nn.ModuleDict:
        return self.h

    def ends(self) -> list[list[nn.Module]]:
        ends = [[self.wte], [self.norm, self.head]]
        return [[module for module in end if module is not None] for end in ends if end[0] is not None]

    def initial(self, name: str) -> tuple[float, float]:
        return (1.0, 0.0) if name.endswith("norm.weight") else (0.0, 0.02)

    def num_matmul_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters()) - self.vocab_size * self.dim
