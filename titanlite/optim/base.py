"""The contract of an optimizer: parameter groups from parameter roles and name patterns, a learning rate that
is set before each step, and a step that is skipped if a flag on the device says so."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import torch

from titanlite.config.component import Component, ConfigError, suggest
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.optim.hyperparameters import WEIGHT_DECAY, HyperparameterSchedule, is_valid
from titanlite.torch_compat import takes_grad_scaler_tensors

CLIP_NORM = "clip_norm"  # key of the scalar that training.clip = "tensor" adds to each parameter's state


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Settings of the parameters whose names match a pattern. The first match counts."""

    pattern: str
    """Shell-style pattern of full parameter names: `*.mlp.*`, `model.layers.0.*`, `*.[qk]_proj.weight`. It
    must match a parameter."""
    lr_multiplier: float = 1.0
    """Factor of optimizer.lr."""
    weight_decay: float | None = None
    """Weight decay. Unset: optimizer.weight_decay, but 0 for norms and biases."""
    beta1: float | None = None
    """Decay rate of the gradient's running mean, for AdamW's rule. Unset: optimizer.beta1."""
    beta2: float | None = None
    """Decay rate of the squared gradient's running mean, for AdamW's rule, and for Muon's with `normalize`.
    Unset: optimizer.beta2."""
    momentum: float | None = None
    """Decay rate of the gradient's running mean, for Muon's rule. Unset: optimizer.momentum."""
    rule: str = ""
    """Update rule, for an optimizer with several: `muon` has `muon` and `adamw`. Empty: by the parameter's
    role."""

    def __post_init__(self) -> None:
        for key in ("lr_multiplier", "weight_decay"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{value} is not a finite number of at least 0", key)
        for key, value in self.hyperparameters().items():
            if not is_valid(key, value):
                raise ConfigError(f"{value} is not in [0, 1)", key)

    def hyperparameters(self) -> dict[str, float]:
        """The hyperparameters of update rules that the group sets."""
        values = {"beta1": self.beta1, "beta2": self.beta2, "momentum": self.momentum}
        return {key: value for key, value in values.items() if value is not None}


class GroupSettings(NamedTuple):
    """Settings of one group of parameters. `entry`: the group's index in param_groups; None for parameters
    that no pattern matches. `rule`: empty if the optimizer has a single update rule. `hyperparameters`: of
    the rule, by name (Optimizer.hyperparameters)."""

    entry: int | None
    rule: str
    peak_lr: float
    weight_decay: float
    hyperparameters: tuple[tuple[str, float], ...]

    @property
    def scheduled(self) -> dict[str, float]:
        """The values that schedules may change: the hyperparameters of the rule, and weight decay."""
        return {WEIGHT_DECAY: self.weight_decay, **dict(self.hyperparameters)}


@dataclass(frozen=True, kw_only=True)
class Optimizer(Component, makes=(torch.optim.Optimizer,)):
    """Base of optimizers: `[optimizer] name = "..."` selects a subclass by its name. `build` may return any
    torch.optim.Optimizer.

    State: checkpoints hold each tensor of `optimizer.state[parameter]` under the name `<parameter>.<key>`.
    Name the keys as torch's optimizers do (`exp_avg`, `exp_avg_sq`, `momentum_buffer`, `step`). torch DCP
    reshards the state when a run resumes on another layout, so each state tensor must be one of

    - a tensor of the parameter's shape, sharded like the parameter (`torch.zeros_like(parameter)`);
    - a tensor that differs from that shape only in the last dim, such as one scale per block of values,
      sharded like the parameter;
    - a scalar tensor that is equal on all ranks.

    With training.clip = "tensor" the clipper adds such a scalar, `clip_norm`, after the first step.

    With checkpoint.allow_changed = ["optimizer"], state that the checkpoint does not have is set to zero, so
    zeros must be a valid start.

    The optimizer's first step may make the state. If the state is needed earlier, `make_state` takes a step
    with zero gradients and a learning rate of 0.

    Skipped steps: see `guarded_step`.
    """

    rules: ClassVar[tuple[str, ...]] = ()
    """The names of the update rules, if the optimizer has several."""

    lr: float = 3e-4
    """Peak learning rate, which the factor of [lr_scheduler] multiplies."""
    weight_decay: float = 0.1
    """Weight decay of all parameters except norms and biases."""
    param_groups: list[ParamGroup] = field(default_factory=list)
    """Groups of parameters with other hyperparameters, such as learning rate or weight decay."""
    schedules: list[HyperparameterSchedule] = field(default_factory=list)
    """Hyperparameters that follow the step; the learning rate follows [lr_scheduler]."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"{self.lr} is not above 0 and finite", "lr")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"{self.weight_decay} is not a finite number of at least 0", "weight_decay")
        for i, group in enumerate(self.param_groups):
            if group.rule and group.rule not in self.rules:
                key = f"param_groups.{i}.rule"
                if not self.rules:
                    raise ConfigError(f"{self.name} has a single update rule; remove this key", key)
                raise ConfigError(f"unknown rule {group.rule!r}{suggest(group.rule, self.rules)}", key)
        for i, schedule in enumerate(self.schedules):
            if schedule.key in [earlier.key for earlier in self.schedules[:i]]:
                raise ConfigError(f"{schedule.key} has an earlier schedule", f"schedules.{i}.key")
            setting = [
                j for j, group in enumerate(self.param_groups) if schedule.key in group.hyperparameters()
            ]
            if schedule.values and setting:
                raise ConfigError(
                    f"param_groups.{setting[0]} sets {schedule.key}, which values would replace: give "
                    "factors, or remove the group's key",
                    f"schedules.{i}.values",
                )

    @abstractmethod
    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters, normally made from `self.groups(model)`.

        `model`: this rank's parameters, under the names that they have in the whole model. With pipeline
        parallel these are the parameters of the rank's stages. `mesh`: for optimizers that communicate.
        """

    def update_of(
        self, weight: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Recompute from the optimizer's state the update that the newest step has subtracted from a
        parameter, for the metrics `norms/update_ratio_*`. None, the default: unknown.

        `weight`: the parameter after the step. `state`: its optimizer state, which is not empty; scalars such
        as `step` are numbers, except for a parameter that is itself a scalar. `group`: its parameter group.
        Tensors are this rank's shards, and plain tensors; they must not be changed."""
        return None

    def signal_and_noise(
        self, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Estimates for the gradient noise scale, summed over the elements of this rank's shard of a
        parameter: the square of the expected gradient, and the variance of a step's gradient. Scalar tensors;
        None, the default: unknown. Arguments: see `update_of`."""
        return None

    def state_bytes(self, parameter: torch.Tensor, rule: str) -> float | None:
        """Bytes of optimizer state per element of a whole parameter under an update rule. FSDP counts them to
        decide whether it frees gathered weights, and `titanlite plan` plans with them. None, the default:
        unknown."""
        return None

    def step_flops(self, model: Decoder, name: str, rule: str) -> float:
        """FLOPs of the matrix products in a step's update of the parameter `name`, for `titanlite plan`.
        Default: none."""
        return 0.0

    def default_rule(self, model: Decoder, name: str) -> str:
        """The update rule of the parameter `name`, one of `rules`, unless param_groups says another. `model`
        may be a pipeline stage. Default: empty, for an optimizer with a single rule."""
        return ""

    def peak_lr(self, rule: str) -> float:
        """The peak learning rate of parameters under an update rule, before the multiplier of their group."""
        return self.lr

    def hyperparameters(self, rule: str) -> dict[str, float]:
        """The hyperparameters of an update rule that groups of parameters and schedules may change, beside
        learning rate and weight decay: their names and values. All are decay rates in [0, 1); schedules take
        any name, param_groups only `beta1`, `beta2` and `momentum`. A parameter group of the optimizer that
        `build` returns has its values under these names, and the rule reads them in each step. Default: none.
        """
        return {}

    def set_scheduled(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the hyperparameters in the parameter groups of a built optimizer to what `schedules` say for
        `step` = 1, 2, ..."""
        for schedule in self.schedules:
            for group in optimizer.param_groups:
                if (key := schedule.key) in group:
                    group[key] = schedule.value(group.setdefault(f"own_{key}", group[key]), step)

    def check_scheduled(self, optimizer: torch.optim.Optimizer, model: Decoder) -> None:
        """Raises ConfigError for a schedule of a hyperparameter that no parameter group of the optimizer has:
        it would have no effect. `optimizer`: built for `model`, which may be a pipeline stage."""
        kept = {key for group in optimizer.param_groups for key in group}
        named = {key for settings in self.grouped(model) for key in settings.scheduled}
        for i, schedule in enumerate(self.schedules):
            if schedule.key in named - kept:
                raise ConfigError(
                    f"the parameter groups of {type(optimizer).__name__} have no {schedule.key!r}: give it "
                    "the groups that self.groups(model) returns",
                    f"optimizer.schedules.{i}.key",
                )

    def width_exponent(self, rule: str) -> float | None:
        """The power p for which a peak learning rate proportional to width ** -p makes an update of a matrix
        in the blocks change its output by the same amount at every width (muP). `rule`: the matrix's update
        rule. None, the default: unknown."""
        return None

    def check_cpu_offload(self) -> None:
        """Raises ConfigError if the optimizer cannot work on parameters in host memory, where
        training.enable_cpu_offload keeps them. Default: it can."""

    def groups(self, model: Decoder) -> list[dict[str, Any]]:
        """Parameter groups for the constructor of a torch.optim.Optimizer: `params`, `lr` (the peak),
        `weight_decay`, the hyperparameters of the rule, and `rule` if the optimizer has several. Frozen
        parameters are left out."""
        return [
            {
                "params": [model.get_parameter(name) for name in names],
                "lr": settings.peak_lr,
                "weight_decay": settings.weight_decay,
                **dict(settings.hyperparameters),
                **({"rule": settings.rule} if self.rules else {}),
            }
            for settings, names in self.grouped(model).items()
        ]

    def check(self, model: Decoder, tensor_parallel: int = 1) -> None:
        """Raises ConfigError for a pattern that selects no parameter of the whole model, for hyperparameters
        of a group that its update rule does not have, for schedules of hyperparameters that no rule has or
        with values that are out of range, and if the optimizer cannot work on shards of `tensor_parallel`
        ranks. With pipeline parallel a rank has only some of the parameters, so `model` must not be split
        into stages yet."""
        self._check_hyperparameters(list(self.grouped(model)))
        used = {settings.entry for settings in self.grouped(model)}
        names = [name for name, _ in model.named_parameters()]
        for i, group in enumerate(self.param_groups):
            if i in used:
                continue
            key = f"optimizer.param_groups.{i}.pattern"
            if any(fnmatchcase(name, group.pattern) for name in names):
                raise ConfigError(f"{group.pattern!r}: earlier groups match the same parameters", key)
            known = {re.sub(r"\.\d+\.", ".*.", name) for name in names}
            is_head = fnmatchcase("lm_head.weight", group.pattern)
            why = ": embedding and head of this model share a weight" if is_head else ""
            hint = suggest(group.pattern, known)
            raise ConfigError(f"{group.pattern!r} matches no parameter{why}{hint}", key)

    def _check_hyperparameters(self, groups: list[GroupSettings]) -> None:
        """Raises ConfigError for hyperparameters of param_groups and schedules that the rules of the
        parameters do not have, and for scheduled values that are out of range."""
        for group in groups:
            given = {} if group.entry is None else self.param_groups[group.entry].hyperparameters()
            if foreign := given.keys() - dict(group.hyperparameters).keys():
                key = f"optimizer.param_groups.{group.entry}.{min(foreign)}"
                raise ConfigError(f"the update rule {group.rule or self.name} has no {min(foreign)}", key)
        known = {key for group in groups for key in group.scheduled}
        for i, schedule in enumerate(self.schedules):
            if schedule.key not in known:
                hint = suggest(schedule.key, known)
                raise ConfigError(f"no parameter has {schedule.key!r}{hint}", f"optimizer.schedules.{i}.key")
            for group in groups:
                own = group.scheduled.get(schedule.key)
                for value in [] if own is None else schedule.extremes(own):
                    if not is_valid(schedule.key, value):
                        key = f"optimizer.schedules.{i}.factors"
                        raise ConfigError(f"{schedule.key} would be {value:g}, which is not in [0, 1)", key)

    def describe(self, model: Decoder) -> list[str]:
        """One line for each parameter group of the whole model and for each schedule, for the log."""
        lines = []
        for settings, names in self.grouped(model).items():
            pattern = "" if settings.entry is None else f", {self.param_groups[settings.entry].pattern}"
            size = sum(model.get_parameter(name).numel() for name in names)
            tensors = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
            given = {} if settings.entry is None else self.param_groups[settings.entry].hyperparameters()
            others = "".join(f", {key} {value:g}" for key, value in given.items())
            lines.append(
                f"{settings.rule or self.name}{pattern}: {tensors} of {size:,} parameters, peak learning "
                f"rate {settings.peak_lr:g}, weight decay {settings.weight_decay:g}{others}"
            )
        return lines + [schedule.describe() for schedule in self.schedules]

    def grouped(self, model: Decoder) -> dict[GroupSettings, list[str]]:
        """Names of the trained parameters by the settings of their group."""
        grouped: dict[GroupSettings, list[str]] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            i = next((i for i, g in enumerate(self.param_groups) if fnmatchcase(name, g.pattern)), None)
            group = ParamGroup(pattern="") if i is None else self.param_groups[i]
            rule = group.rule or self.default_rule(model, name)
            decay = 0.0 if model.parameter_role(name) == "norm" else self.weight_decay
            if group.weight_decay is not None:
                decay = group.weight_decay
            given, values = group.hyperparameters(), self.hyperparameters(rule)
            values = {key: given.get(key, value) for key, value in values.items()}
            peak_lr = self.peak_lr(rule) * group.lr_multiplier
            settings = GroupSettings(i, rule, peak_lr, decay, tuple(values.items()))
            grouped.setdefault(settings, []).append(name)
        return grouped


def check_covers(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Raises ConfigError unless the optimizer has all trained parameters of the model: another one would stay
    as it is, in silence."""
    known = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in known]
    if missing:
        raise ConfigError(
            f"{type(optimizer).__name__} lacks {len(missing)} trained parameters, for example {missing[0]}: "
            "give it the groups that self.groups(model) returns",
            "optimizer.name",
        )


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to `factor` times its peak learning rate, which is the learning rate
    that the group was built with. The first call stores it as `peak_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor


@torch.no_grad()
def guarded_step(optimizer: torch.optim.Optimizer, apply: torch.Tensor, divisor: torch.Tensor | None) -> None:
    """If `apply`, take the optimizer's step with gradients divided by `divisor`. Otherwise weights and
    optimizer state stay bit-identical.

    `apply`: bool scalar on the device, equal on all ranks. `divisor`: scalar on the device; None: do not
    divide. Optimizers that follow the protocol of torch.amp.GradScaler read `apply` and `divisor` as tensors
    and need no host synchronisation: they set `_step_supports_amp_scaling`, and their step reads `found_inf`
    (1.0: skip) and `grad_scale` (the divisor or None). torch's fused Adam, AdamW, SGD and Adagrad follow it,
    as do CompiledAdamW and MuonOptimizer. For all other optimizers this function divides the gradients, and
    the host waits for `apply` once per step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    if takes_grad_scaler_tensors(optimizer) and device.type in ("cpu", "cuda"):
        # With CPU offload the copies to the CPU must block: the optimizer's CPU kernel would not wait for
        # them.
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
    elif not optimizer.state:  # all steps so far were skipped, but a checkpoint needs state
        make_state(optimizer)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer without state make its state, by a step that changes no weight: with zero gradients
    and a learning rate of 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


@torch.no_grad()
def load_in_place(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict of an equal optimizer, with the dtypes that the state dict has.

    torch's load_state_dict casts state to the dtype of the weights, which would spoil 8-bit codes, and makes
    new parameter groups, which the optimizers inside a composite would not see."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, saved in state_dict["state"].items():
        state = optimizer.state[parameters[i]]
        for key, value in saved.items():
            state.setdefault(key, torch.empty_like(value)).copy_(value)
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
