"""AdamW (Loshchilov & Hutter 2019): torch's fused implementation, which supports CPU, CUDA and DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from titanlite.config.component import ConfigError
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer

StateDtype = Literal["float32"]


@dataclass(frozen=True, kw_only=True)
class AdamWKeys(Optimizer):
    """The keys of AdamW and the estimates from its state: the base of optimizers that update at least some
    parameters by AdamW."""

    beta1: float = 0.9
    """Decay rate of the running mean of the gradient."""
    beta2: float = 0.95
    """Decay rate of the running mean of the squared gradient."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    state_dtype: StateDtype = "float32"
    """dtype of AdamW's state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"{getattr(self, key)} is not in [0, 1)", key)
        if not self.eps >= 0:
            raise ConfigError(f"{self.eps} is below 0", "eps")

    def update_of(
        self, weight: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """lr * (m / (sqrt(v) + eps) + weight_decay * w) with the moments m and v after bias correction. w is
        the weight before the step, which follows from the weight after it."""
        lr, decay, step = group["lr"], group["weight_decay"], state["step"]
        denominator = (state["exp_avg_sq"] / (1 - self.beta2**step)).sqrt_().add_(self.eps)
        update = (state["exp_avg"] / (1 - self.beta1**step)).div_(denominator)
        return update.add_(weight, alpha=decay).mul_(lr / (1 - lr * decay))

    def signal_and_noise(
        self, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Estimates from the moments m and v after bias correction. If the gradient's expectation G and
        variance V are constant, E[m^2] = G^2 + k V and E[v] = G^2 + V, where k is the sum of the squares of
        m's weights: (1 - beta1) / (1 + beta1) after many steps. After one step m^2 = v tells nothing."""
        step = state["step"]
        if step < 2 or self.beta1 == 0:
            return None
        decayed = self.beta1**step
        k = (1 - self.beta1) / (1 + self.beta1) * (1 + decayed) / (1 - decayed)
        mean_square = state["exp_avg"].square().sum() / (1 - decayed) ** 2
        square = state["exp_avg_sq"].sum() / (1 - self.beta2**step)
        signal = (mean_square - k * square) / (1 - k)
        return signal, square - signal


@dataclass(frozen=True, kw_only=True)
class AdamW(AdamWKeys, name="adamw"):
    """AdamW. Weight decay is decoupled: each step shrinks the weights by learning rate x weight decay."""

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        return build_adamw(self.groups(model), (self.beta1, self.beta2), self.eps, self.state_dtype)


def build_adamw(
    groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, state_dtype: StateDtype
) -> torch.optim.Optimizer:
    """The AdamW optimizer of parameter groups, each with `params`, `lr` and `weight_decay`."""
    return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
