"""AdamW (Loshchilov & Hutter 2019): torch's fused implementation, which supports CPU, CUDA and DTensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titanlite.config.component import ConfigError
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer, name="adamw"):
    """AdamW. Weight decay is decoupled: each step shrinks the weights by learning rate x weight decay."""

    beta1: float = 0.9
    """Decay rate of the running mean of the gradient."""
    beta2: float = 0.95
    """Decay rate of the running mean of the squared gradient."""
    eps: float = 1e-8
    """Added to the denominator of the update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"{getattr(self, key)} is not in [0, 1)", key)
        if not self.eps >= 0:
            raise ConfigError(f"{self.eps} is below 0", "eps")

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(self.groups(model), lr=self.lr, betas=betas, eps=self.eps, fused=True)
