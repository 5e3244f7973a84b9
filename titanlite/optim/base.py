"""The contract of an optimizer: parameter groups from the model's parameter roles and from name patterns, a
learning rate that is set before each step, and a step that the device may refuse."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from titanlite.config.component import Component, ConfigError, suggest
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.torch_compat import takes_grad_scaler_tensors


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Learning rate and weight decay of the parameters whose names match a pattern. If several patterns match
    a parameter, the first one counts."""

    pattern: str
    """Shell-style pattern of full parameter names: `*.mlp.*`, `model.layers.0.*`, `*.[qk]_proj.weight`. A
    pattern that selects no parameter is an error."""
    lr_multiplier: float = 1.0
    """Factor of optimizer.lr for these parameters."""
    weight_decay: float | None = None
    """Weight decay of these parameters. Unset: optimizer.weight_decay, but 0 for norms and biases."""

    def __post_init__(self) -> None:
        for key in ("lr_multiplier", "weight_decay"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{value} is not finite and at least 0", key)


class _Settings(NamedTuple):
    """What the parameters of one group share. `entry`: the number of their entry in param_groups, if any."""

    entry: int | None
    peak_lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Optimizer(Component):
    """Kind: `[optimizer] name = ...`. `build` returns any torch.optim.Optimizer.

    State: checkpoints hold each tensor of `optimizer.state[parameter]` under the name `<parameter>.<key>`.
    Use torch's keys for torch's meanings (`exp_avg`, `exp_avg_sq`, `momentum_buffer`, `step`). torch DCP
    reshards the state when a run resumes on another layout, so each state tensor must be one of

    - a tensor of the parameter's shape, sharded like the parameter (`torch.zeros_like(parameter)`);
    - a tensor of that shape but for the last dim, such as one scale per block, sharded like the parameter;
    - a scalar tensor that is equal on all ranks.

    State may be made by the optimizer's first step; where it is needed earlier, `make_state` makes it by a
    step with zero gradients and a learning rate of 0.

    Skipped steps: `guarded_step` says how an optimizer learns that a step is to be skipped.
    """

    lr: float = 3e-4
    """Peak learning rate, which the factor of [lr_scheduler] multiplies."""
    weight_decay: float = 0.1
    """Weight decay of all parameters but norms and biases, which have none."""
    param_groups: list[ParamGroup] = field(default_factory=list)
    """Groups of parameters with a learning rate or a weight decay of their own."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"{self.lr} is not above 0 and finite", "lr")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"{self.weight_decay} is not finite and at least 0", "weight_decay")

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters, normally made from `self.groups(model)`.

        `model`: this rank's parameters under the whole model's names; a pipeline rank has only those of its
        stages. `mesh`: the ranks, for optimizers that communicate.
        """
        raise NotImplementedError

    def groups(self, model: Decoder) -> list[dict[str, Any]]:
        """Parameter groups for the constructor of a torch.optim.Optimizer: `params`, `lr` (the peak) and
        `weight_decay`. Frozen parameters are left out."""
        return [
            {
                "params": [model.get_parameter(name) for name in names],
                "lr": settings.peak_lr,
                "weight_decay": settings.weight_decay,
            }
            for settings, names in self._grouped(model).items()
        ]

    def check(self, model: Decoder) -> None:
        """Raises ConfigError for a pattern that selects no parameter. `model`: the whole model, because a
        pipeline rank has only some of its parameters."""
        used = {settings.entry for settings in self._grouped(model)}
        names = [name for name, _ in model.named_parameters()]
        for i, group in enumerate(self.param_groups):
            if i in used:
                continue
            key = f"optimizer.param_groups.{i}.pattern"
            if any(fnmatchcase(name, group.pattern) for name in names):
                raise ConfigError(f"{group.pattern!r}: earlier groups match all of its parameters", key)
            known = {re.sub(r"\.\d+\.", ".*.", name) for name in names}
            raise ConfigError(f"{group.pattern!r} matches no parameter{suggest(group.pattern, known)}", key)

    def describe(self, model: Decoder) -> list[str]:
        """One line for each parameter group of the whole model, for the log."""
        lines = []
        for settings, names in self._grouped(model).items():
            pattern = "" if settings.entry is None else f", {self.param_groups[settings.entry].pattern}"
            size = sum(model.get_parameter(name).numel() for name in names)
            lines.append(
                f"{self.name}{pattern}: {len(names)} tensors of {size:,} parameters, peak learning rate "
                f"{settings.peak_lr:g}, weight decay {settings.weight_decay:g}"
            )
        return lines

    def _grouped(self, model: Decoder) -> dict[_Settings, list[str]]:
        """Names of the trained parameters by what they share."""
        grouped: dict[_Settings, list[str]] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            settings = _Settings(
                None, self.lr, 0.0 if model.parameter_role(name) == "norm" else self.weight_decay
            )
            for i, group in enumerate(self.param_groups):
                if fnmatchcase(name, group.pattern):
                    decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
                    settings = _Settings(i, self.lr * group.lr_multiplier, decay)
                    break
            grouped.setdefault(settings, []).append(name)
        return grouped


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to `factor` times its peak.

    The peak of a group is the learning rate that the optimizer was built with. It is kept as `peak_lr`.
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor


@torch.no_grad()
def guarded_step(optimizer: torch.optim.Optimizer, ok: torch.Tensor, divisor: torch.Tensor | None) -> None:
    """Take the optimizer's step if `ok`, with gradients divided by `divisor`; otherwise weights and optimizer
    state stay bit-identical.

    `ok`: bool scalar on the device, equal on all ranks. `divisor`: scalar on the device; None: gradients stay
    as they are. Optimizers that follow the protocol of torch.amp.GradScaler read both as tensors and need no
    host synchronisation: they set `_step_supports_amp_scaling`, and their step reads `found_inf` (1.0: skip)
    and `grad_scale` (the divisor or None). torch's fused Adam, AdamW, SGD and Adagrad do. For all other
    optimizers the gradients are divided here, and the host waits for `ok` once per step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    if takes_grad_scaler_tensors(optimizer) and device.type in ("cpu", "cuda"):
        # Offloaded weights: a blocking copy moves the scalars to the CPU, because the kernel would not wait.
        optimizer.found_inf = (~ok).float().to(device)  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor if divisor is None else divisor.to(device)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif ok.item():
        for p in parameters if divisor is not None else []:
            if p.grad is not None:
                p.grad.div_(divisor)
        optimizer.step()
    elif not optimizer.state:  # a checkpoint before the first step that is not skipped needs state, too
        make_state(optimizer)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer without state make its state, by a step that changes no weight: zero gradients and a
    learning rate of 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
