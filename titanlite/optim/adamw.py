"""AdamW (Loshchilov & Hutter 2019), torch's fused one, on CPU, CUDA and DTensors alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from titanlite.config.component import ConfigError
from titanlite.optim.base import Optimizer


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer, name="adamw"):
    """AdamW. Weight decay spares vectors: norms and biases."""

    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled decay, times the learning rate, of every matrix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"{getattr(self, key)} is not in [0, 1)", key)
        for key in ("eps", "weight_decay"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"{getattr(self, key)} is below 0", key)

    def build(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        params = [p for _, p in parameters if p.requires_grad]
        groups = [
            {
                "params": [p for p in params if p.ndim >= 2],
                "weight_decay": self.weight_decay,
                "peak_lr": self.lr,
            },
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "peak_lr": self.lr},
        ]
        groups = [g for g in groups if g["params"]]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)
