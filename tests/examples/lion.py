"""An optimizer from outside the package: Lion (Chen et al. 2023, arXiv 2302.06675).

Any torch.optim.Optimizer will do; `groups` gives it titanlite's parameter groups. To use it, put this file
into the current directory or install it, and write

    [job]
    imports = ["lion"]

    [optimizer]
    name = "lion"
    lr = 1e-4               # a third to a tenth of AdamW's
    weight_decay = 1.0      # three to ten times AdamW's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer


class LionOptimizer(torch.optim.Optimizer):
    """Steps by the sign of an interpolation between momentum and gradient, which all weights share in size.

    Parameters may be DTensors: all operations are element-wise, and so is the state `exp_avg`.
    """

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, beta1, beta2 = group["lr"], group["beta1"], group["beta2"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                momentum = state["exp_avg"]
                update = momentum.lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                momentum.lerp_(p.grad, 1 - beta2)


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer, name="lion"):
    """Lion: sign of the momentum, with half of AdamW's state."""

    beta1: float = 0.9
    """Share of the momentum in the update."""
    beta2: float = 0.99
    """Decay rate of the momentum."""

    def hyperparameters(self, rule: str) -> dict[str, float]:
        return {"beta1": self.beta1, "beta2": self.beta2}

    def state_bytes(self, parameter: torch.Tensor, rule: str) -> float:
        return 4.0  # one moment in fp32

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        return LionOptimizer(self.groups(model))
