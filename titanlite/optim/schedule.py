"""The learning rate as a function of the step: warmup, stable, decay. Nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from titanlite.config.component import ConfigError


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """Warmup to the peak, hold, decay to min_lr_factor: torchtitan's schedule. By default there is no hold.
    The formula is in docs/numerics.md."""

    warmup_steps: int = 200
    """Steps of linear warmup; step s of them has factor s / warmup_steps."""
    total_steps: int = 0
    """Length of the schedule; 0: training.steps. A run may stop before its schedule ends."""
    decay_ratio: float = -1.0
    """Share of total_steps that the decay at the end takes. 0.2: the last fifth; at most what warmup leaves.
    Below 0: decay from the end of warmup on. 0: never decay."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay: linear, 1 - sqrt (Haegele et al. 2024), or cosine."""
    min_lr_factor: float = 0.0
    """Where the decay ends, as a share of the peak. The last step of the schedule is one step above it."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"{self.warmup_steps} is below 0", "warmup_steps")
        if self.total_steps < 0:
            raise ConfigError(f"{self.total_steps} is below 0; 0 means training.steps", "total_steps")
        if not self.decay_ratio <= 1:
            raise ConfigError(f"{self.decay_ratio} is above 1", "decay_ratio")
        if not 0 <= self.min_lr_factor <= 1:
            raise ConfigError(f"{self.min_lr_factor} is not in [0, 1]", "min_lr_factor")

    def factor(self, step: int, training_steps: int) -> float:
        """Factor of the peak rate at `step` = 1, 2, ...; min_lr_factor past the end of a
        schedule that decays."""
        total = self.total_steps or training_steps
        if step < self.warmup_steps:
            return step / self.warmup_steps
        decay_steps = total - self.warmup_steps
        if self.decay_ratio >= 0:
            decay_steps = min(round(total * self.decay_ratio), decay_steps)
        last_at_peak = total + 1 - decay_steps  # + 1: the end point is reached after the last step, not at it
        if decay_steps <= 0 or step <= last_at_peak:
            return 1.0
        progress = min((step - last_at_peak) / decay_steps, 1.0)
        shape = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.decay_type]
        return self.min_lr_factor + (1 - self.min_lr_factor) * shape
