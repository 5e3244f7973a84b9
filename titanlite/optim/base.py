"""The contract of an optimizer: built from named parameters, its learning rate set from outside each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from titanlite.config.component import Component, ConfigError


@dataclass(frozen=True, kw_only=True)
class Optimizer(Component):
    """Kind: `[optimizer] name = ...`."""

    lr: float = 3e-4
    """Peak learning rate, what the schedule's factor is applied to."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"{self.lr} is not above 0 and finite", "lr")

    def build(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of this rank's named parameters. Every group keeps its peak rate under `peak_lr`."""
        raise NotImplementedError


@torch.no_grad()
def guarded_step(optimizer: torch.optim.Optimizer, apply: torch.Tensor, divisor: torch.Tensor | None) -> None:
    """Take the optimizer's step with gradients divided by `divisor` (None: as they are), if `apply` says so;
    else weights and optimizer state stay bit-identical.

    `apply`: bool scalar. Optimizers whose step takes torch.amp.GradScaler's tensors (torch's fused Adam,
    AdamW, SGD and Adagrad) decide and divide in their own kernels, without a host synchronisation. For all
    others the host waits for the decision, once per step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    if getattr(optimizer, "_step_supports_amp_scaling", False) and device.type in ("cpu", "cuda"):
        # To another device (gradients on the host) by a copy that waits: the kernel would not.
        optimizer.found_inf = (~apply).float().to(device)  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor if divisor is None else divisor.to(device)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif apply.item():
        for p in parameters if divisor is not None else []:
            if p.grad is not None:
                p.grad.div_(divisor)
        optimizer.step()


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set each group's rate to `factor` times its peak; returns the first group's, for the log."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return optimizer.param_groups[0]["lr"]
