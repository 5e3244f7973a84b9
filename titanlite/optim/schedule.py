"""The learning rate as a function of the step: warmup, stable, decay. Nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from titanlite.config.component import ConfigError


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """Warmup to the peak, hold, decay to min_lr_factor. Unless decay_ratio is set, there is no hold."""

    warmup_steps: int = 200
    """Steps of linear warmup; step s of them has factor s / warmup_steps."""
    total_steps: int = 0
    """Length of the schedule; 0: training.steps. A run may stop before its schedule ends."""
    decay_ratio: float = -1.0
    """Share of total_steps spent decaying at the end; below 0: everything after warmup; 0: never."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay: linear, 1 - sqrt (Haegele et al. 2024), or cosine."""
    min_lr_factor: float = 0.0
    """Where the decay ends, as a share of the peak."""

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
        decay_steps = total - self.warmup_steps if self.decay_ratio < 0 else round(total * self.decay_ratio)
        decay_start = max(total - decay_steps, self.warmup_steps)
        if decay_steps <= 0 or step <= decay_start:
            return 1.0
        progress = min(
            (step - decay_start) / (total - decay_start + 1), 1.0
        )  # + 1: no step is spent at the end point
        shape = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.decay_type]
        return self.min_lr_factor + (1 - self.min_lr_factor) * shape
