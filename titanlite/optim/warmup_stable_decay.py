"""The warmup-stable-decay learning-rate schedule (Hu et al. 2024, MiniCPM), with torchtitan's keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from titanlite.config.component import ConfigError
from titanlite.optim.schedule import LRScheduler

MAX_DEFAULT_WARMUP = 200  # steps, with warmup_steps = -1


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(LRScheduler, name="warmup_stable_decay"):
    """Linear warmup to the peak, a constant phase, then decay to min_lr_factor. The default has no constant
    phase. docs/numerics.md has the formula."""

    warmup_steps: int = -1
    """Number of steps of linear warmup: step s has the factor s / warmup_steps. -1: a tenth of the schedule,
    at most 200 steps."""
    total_steps: int = 0
    """Length of the schedule in steps; 0: training.steps. A run may stop before its schedule ends."""
    decay_ratio: float = -1.0
    """Length of the decay at the end of the schedule, as a fraction of total_steps: 0.2 decays over the last
    fifth. The decay never begins before warmup ends. Below 0: decay begins when warmup ends. 0: no decay."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay: linear, 1 - sqrt (Haegele et al. 2024), or cosine."""
    min_lr_factor: float = 0.0
    """Factor at the end of the decay. The schedule reaches it one step after its last step, so that no step
    is trained at a learning rate of 0."""

    def __post_init__(self) -> None:
        if self.warmup_steps < -1:
            raise ConfigError(f"{self.warmup_steps} is neither -1 nor at least 0", "warmup_steps")
        if self.total_steps < 0:
            raise ConfigError(f"{self.total_steps} is below 0; 0 means training.steps", "total_steps")
        if not self.decay_ratio <= 1:
            raise ConfigError(f"{self.decay_ratio} is above 1", "decay_ratio")
        if not 0 <= self.min_lr_factor <= 1:
            raise ConfigError(f"{self.min_lr_factor} is not in [0, 1]", "min_lr_factor")

    def warmup(self, training_steps: int) -> int:
        """Number of warmup steps in a run of `training_steps` steps: warmup_steps, with -1 resolved."""
        total = self.total_steps or training_steps
        return self.warmup_steps if self.warmup_steps >= 0 else min(MAX_DEFAULT_WARMUP, total // 10)

    def check(self, training_steps: int) -> None:
        """Raises ConfigError unless the schedule covers the run and warmup ends before the schedule does."""
        total = self.total_steps or training_steps
        if total < training_steps:
            raise ConfigError(
                f"{total} is below training.steps = {training_steps}: the schedule would end before the run",
                "lr_scheduler.total_steps",
            )
        if self.warmup_steps >= total:
            resolved = replace(self, warmup_steps=-1).warmup(training_steps)
            raise ConfigError(
                f"{self.warmup_steps} steps of warmup need a schedule of more than {total} steps; set "
                f"--lr_scheduler.warmup_steps={resolved}, or -1, which means {resolved} here",
                "lr_scheduler.warmup_steps",
            )

    def describe(self, training_steps: int) -> str:
        total = self.total_steps or training_steps
        return f"{super().describe(total)}, {self.warmup(training_steps):,} of them warmup"

    def factor(self, step: int, training_steps: int) -> float:
        """Factor of the peak learning rate at `step` = 1, 2, ...; min_lr_factor after the decay."""
        total, warmup = self.total_steps or training_steps, self.warmup(training_steps)
        if step < warmup:
            return step / warmup
        decay_steps = total - warmup
        if self.decay_ratio >= 0:
            decay_steps = min(round(total * self.decay_ratio), decay_steps)
        last_at_peak = total + 1 - decay_steps  # + 1: min_lr_factor is reached after the last step, not at it
        if decay_steps <= 0 or step <= last_at_peak:
            return 1.0
        progress = min((step - last_at_peak) / decay_steps, 1.0)
        shape = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.decay_type]
        return self.min_lr_factor + (1 - self.min_lr_factor) * shape
