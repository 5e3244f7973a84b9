"""AdamW (Loshchilov & Hutter 2019): CompiledAdamW for large models on CUDA and for bfloat16 or 8-bit state;
otherwise torch's fused implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

import torch

from titanlite.config.component import ConfigError, check_at_least
from titanlite.mesh import Mesh, local_shard
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer
from titanlite.optim.low_bit import BLOCK, CompiledAdamW, has_blocks, moments_by_rows

MANY = 1 << 26  # values of the parameters on one GPU
BFLOAT16_BETA2 = 0.99  # largest beta2 with bfloat16 state: at 0.999, sqrt(v) is 21% too large
StateDtype = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, kw_only=True)
class AdamWKeys(Optimizer):
    """The keys of AdamW and the estimates from its state: the base of optimizers that update at least some
    parameters by AdamW."""

    beta1: float = 0.9
    """Decay rate of the gradient's running mean."""
    beta2: float = 0.95
    """Decay rate of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the update's denominator."""
    state_dtype: StateDtype = "float32"
    """Storage of AdamW's moments, in bytes per parameter: `float32` 8, `bfloat16` 4 (beta2 of at most 0.99),
    `int8` 2.125."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"{getattr(self, key)} is not in [0, 1)", key)
        check_at_least(self, 0, "eps")

    def hyperparameters(self, rule: str) -> dict[str, float]:
        return {"beta1": self.beta1, "beta2": self.beta2}

    def set_scheduled(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().set_scheduled(optimizer, step)
        for group in optimizer.param_groups:
            if "betas" in group:  # where torch's AdamW reads them
                group["betas"] = group["beta1"], group["beta2"]

    def state_bytes(self, parameter: torch.Tensor, rule: str) -> float:
        if self.state_dtype == "int8" and has_blocks(parameter):
            return 2 * (1 + 4 / BLOCK)  # two codes, and one fp32 scale per block for each
        return 4.0 if self.state_dtype == "bfloat16" else 8.0

    def check(self, model: Decoder, tensor_parallel: int = 1) -> None:
        super().check(model, tensor_parallel)
        if self.state_dtype == "int8":
            self._check_blocks(model, tensor_parallel)
        if self.state_dtype == "bfloat16":
            self._check_beta2(model)

    def _check_beta2(self, model: Decoder) -> None:
        """Raises ConfigError for a beta2 under AdamW's rule that is too large for bfloat16 state."""
        scheduled = [(i, schedule) for i, schedule in enumerate(self.schedules) if schedule.key == "beta2"]
        for group in self.grouped(model):
            if group.rule not in ("", "adamw"):
                continue
            beta2, key = group.scheduled["beta2"], "beta2"
            if group.entry is not None and self.param_groups[group.entry].beta2 is not None:
                key = f"param_groups.{group.entry}.beta2"
            for i, schedule in scheduled:
                beta2 = max(schedule.extremes(beta2))
                key = f"schedules.{i}.{'values' if schedule.values else 'factors'}"
            if beta2 > BFLOAT16_BETA2:
                raise ConfigError(
                    f'state_dtype = "bfloat16" needs beta2 of at most {BFLOAT16_BETA2}, not {beta2:g}: '
                    "rounding would lose most changes of the second moment; use int8 or float32",
                    f"optimizer.{key}",
                )

    def _check_blocks(self, model: Decoder, tensor_parallel: int) -> None:
        """Raises ConfigError if tensor parallel would cut a block of 8-bit state."""
        rowwise = [pattern for pattern, style in model.tp_plan.items() if style == "rowwise"]
        grouped = self.grouped(model).items()
        for name in [name for group, names in grouped if group.rule in ("", "adamw") for name in names]:
            parameter, module = model.get_parameter(name), name.rpartition(".")[0]
            size = parameter.shape[-1] if has_blocks(parameter) else 0
            if size // tensor_parallel % BLOCK and any(fnmatch(module, pattern) for pattern in rowwise):
                raise ConfigError(
                    f"{name} has rows of {size} values, which {tensor_parallel} tensor-parallel ranks share: "
                    f"with 8-bit state, each rank needs a multiple of {BLOCK}; use a tensor_parallel_degree "
                    f'that divides {size // BLOCK}, or optimizer.state_dtype = "bfloat16"',
                    "optimizer.state_dtype",
                )

    def update_of(
        self, weight: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """lr * (m / (sqrt(v) + eps) + weight_decay * w) with the moments m and v after bias correction. w is
        the weight before the step, which follows from the weight after it. With 8-bit state the stored
        moments are used, with their rounding errors of about 1%."""
        lr, decay, step = group["lr"], group["weight_decay"], state["step"]
        (beta1, beta2), update = group["betas"], torch.empty_like(weight, dtype=torch.float32)
        for rows, m, v in moments_by_rows(state):
            denominator = (v / (1 - beta2**step)).sqrt_().add_(self.eps)
            update[rows] = (m / (1 - beta1**step)).div_(denominator)
        return update.add_(weight, alpha=decay).mul_(lr / (1 - lr * decay))

    def signal_and_noise(
        self, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Estimates from the moments m and v after bias correction. If the gradient's expectation G and
        variance V are constant, E[m^2] = G^2 + k V and E[v] = G^2 + V, where k is the sum of the squares of
        m's weights: (1 - beta1) / (1 + beta1) after many steps. After one step m^2 = v tells nothing. None
        with schedules of beta1 or beta2, which change the weights of m and the bias correction."""
        step, (beta1, beta2) = state["step"], group["betas"]
        if step < 2 or beta1 == 0 or "own_beta1" in group or "own_beta2" in group:
            return None
        decayed = beta1**step
        k = (1 - beta1) / (1 + beta1) * (1 + decayed) / (1 - decayed)
        sums = [(m.square().sum(), v.sum()) for _, m, v in moments_by_rows(state)]
        mean_square = sum(first for first, _ in sums) / (1 - decayed) ** 2
        square = sum(second for _, second in sums) / (1 - beta2**step)
        signal = (mean_square - k * square) / (1 - k)
        return signal, square - signal


@dataclass(frozen=True, kw_only=True)
class AdamW(AdamWKeys, name="adamw"):
    """AdamW, with decoupled weight decay: a step shrinks weights by learning rate x weight decay."""

    def width_exponent(self, rule: str) -> float:
        return 1.0

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        return build_adamw(self.groups(model), self.eps, self.state_dtype, mesh.same_bits)


def build_adamw(
    groups: list[dict[str, Any]], eps: float, state_dtype: StateDtype, same_bits: bool = False
) -> torch.optim.Optimizer:
    """The AdamW optimizer of parameter groups, each with `params`, `lr`, `weight_decay`, `beta1` and `beta2`.
    With `MANY` values on a GPU, torch's fused implementation is slower: it also writes the divided gradients.
    With few, it is faster: it asks less of the host (adamw_update_h200.json). `same_bits`: the implementation
    does not depend on the size of the shards. torch's fused one on a CPU does: it rounds the last values of a
    shard otherwise."""
    groups = [{**group, "betas": (group["beta1"], group["beta2"])} for group in groups]
    if same_bits:
        if state_dtype == "float32" and all(p.is_cuda for group in groups for p in group["params"]):
            return torch.optim.AdamW(groups, eps=eps, fused=True)
        return CompiledAdamW(groups, eps, state_dtype, large=0)
    shards = [local_shard(p) for group in groups for p in group["params"] if p.is_cuda]
    if state_dtype != "float32" or sum(shard.numel() for shard in shards) >= MANY:
        return CompiledAdamW(groups, eps, state_dtype)
    return torch.optim.AdamW(groups, eps=eps, fused=True)
