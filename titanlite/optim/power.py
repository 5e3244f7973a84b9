"""The power scheduler (Shen et al. 2024, arXiv 2408.13359): the learning rate falls as a power of the step,
whatever the length of the run, and then decays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from titanlite.config.amount import Steps
from titanlite.config.component import ConfigError
from titanlite.optim.phases import ThreePhases


@dataclass(frozen=True, kw_only=True)
class Power(ThreePhases, name="power"):
    """Linear warmup, a power of the step, then decay to min_lr_factor (docs/numerics.md). Only the decay
    depends on the schedule's length."""

    warmup_steps: Steps = -1
    """Steps of linear warmup, up to the power law's factor. -1: a tenth of the schedule, at most 200
    steps."""
    exponent: float = -0.51
    """Power of the step, at most 0."""
    power_start: Steps = -1
    """Last step at the peak: a later step s has the factor (s / power_start)^exponent. -1: the last step of
    warmup."""
    decay_ratio: float = 0.1
    """Length of the decay at the end, as a fraction of total_steps, never before warmup ends. 0: no decay.
    Below 0: decay follows warmup, without a power law."""
    decay_type: Literal["linear", "sqrt", "cosine", "exponential"] = "linear"  # type: ignore[assignment]
    """Shape of the decay: linear, 1 - sqrt (Haegele et al. 2024), cosine, or exponential, which needs a
    min_lr_factor above 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -math.inf < self.exponent <= 0:
            raise ConfigError(f"{self.exponent} is not a number of at most 0", "exponent")
        if self.power_start < 1 and self.power_start != -1:
            raise ConfigError(f"{self.power_start} is neither -1 nor a step", "power_start")
        if self.decay_type == "exponential" and not self.min_lr_factor:
            raise ConfigError("an exponential decay never reaches 0; set a factor above 0", "min_lr_factor")

    def middle(self, step: int, warmup: int) -> float:
        start = self._power_start(warmup)
        return (max(step, start) / start) ** self.exponent

    def describe_middle(self, warmup: int) -> str:
        return f", step^{self.exponent:g} after step {self._power_start(warmup):,}"

    def _power_start(self, warmup: int) -> int:
        return self.power_start if self.power_start >= 1 else max(warmup, 1)

    def decayed(self, start: float, progress: float) -> float:
        if self.decay_type == "exponential":
            return start ** (1 - progress) * self.min_lr_factor**progress
        return super().decayed(start, progress)
