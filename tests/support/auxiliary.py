"""A family from outside titanlite with an auxiliary loss, a statistic, a buffer that is state and a buffer
that is recomputed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from titanlite.attention.base import Attention
from titanlite.attention.sdpa import CAUSAL
from titanlite.models.base import Decoder, HeadFn, ModelFamily, logits
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.llama3 import Llama3Config

FLAVORS = {
    "debug": Llama3Config(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=64, vocab_size=258,
        max_position=2048,
    ),
}  # fmt: skip


class Counter(nn.Module):
    """A buffer that is state, and a buffer that is recomputed."""

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("applied_steps", torch.empty(1))
        self.register_buffer("scale", torch.empty(dim), persistent=False)


class Net(RotaryDecoder):
    """Hidden states are kept small by an auxiliary loss, and multiplied by a constant; applied steps are
    counted."""

    def __init__(self, c: RotaryConfig):
        super().__init__(c)
        self.counter = Counter(c.dim)
        self.losses: dict[str, torch.Tensor] = {}

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention: Attention = CAUSAL,
        head_fn: HeadFn = logits,
    ) -> torch.Tensor:
        h_BTD = self.model(tokens, positions, attention)
        self.losses = {"hidden_norm": 0.01 * h_BTD.float().square().sum()}
        h_BTD = h_BTD * self.counter.scale.to(h_BTD.dtype)
        return h_BTD if self.lm_head is None else self.lm_head(h_BTD, head_fn)

    def initial_buffer(self, name: str) -> torch.Tensor:
        return torch.zeros(1) if name == "counter.applied_steps" else torch.full((self.config.dim,), 0.5)

    def auxiliary_losses(self) -> dict[str, torch.Tensor]:
        return self.losses

    def statistics(self) -> dict[str, torch.Tensor]:
        return {"applied_steps": self.counter.applied_steps.float().sum()}

    def after_step(self, applied: torch.Tensor) -> None:
        self.counter.applied_steps += applied


@dataclass(frozen=True, kw_only=True)
class Auxiliary(ModelFamily, name="auxiliary"):
    """Llama with an auxiliary loss."""

    flavors = FLAVORS

    def build(self) -> Decoder:
        return Net(self.config)
