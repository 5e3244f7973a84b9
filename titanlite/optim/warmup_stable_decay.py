"""The warmup-stable-decay learning-rate schedule (Hu et al. 2024, MiniCPM), with torchtitan's keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from titanlite.config.amount import Steps
from titanlite.config.component import ConfigError
from titanlite.optim.schedule import LRScheduler

MAX_DEFAULT_WARMUP = 200  # steps, with warmup_steps = -1


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(LRScheduler, name="warmup_stable_decay"):
    """Linear warmup, a constant phase (by default none), then decay to min_lr_factor (docs/numerics.md)."""

    warmup_steps: Steps = -1
    """Steps of linear warmup: step s has the factor s / warmup_steps. -1: a tenth of the schedule, at most
    200 steps."""
    total_steps: Steps = 0
    """Length of the schedule in steps; 0: training.steps. A run may stop before."""
    decay_ratio: float = -1.0
    """Length of the decay at the end, as a fraction of total_steps, never before warmup ends. 0: no decay.
    Below 0: decay follows warmup."""
    decay_start: Steps = -1
    """Last step before the decay, instead of decay_ratio: for a branch from the checkpoint of this step. -1:
    decay_ratio decides."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay: linear, 1 - sqrt (Haegele et al. 2024), or cosine."""
    min_lr_factor: float = 0.0
    """Factor at the end of the decay, which the schedule reaches one step after its last step."""

    def __post_init__(self) -> None:
        if self.warmup_steps < -1:
            raise ConfigError(f"{self.warmup_steps} is neither -1 nor at least 0", "warmup_steps")
        if self.total_steps < 0:
            raise ConfigError(f"{self.total_steps} is below 0; 0 means training.steps", "total_steps")
        if not self.decay_ratio <= 1:
            raise ConfigError(f"{self.decay_ratio} is above 1", "decay_ratio")
        if self.decay_start < 1 and self.decay_start != -1:
            raise ConfigError(f"{self.decay_start} is neither -1 nor a step", "decay_start")
        if not 0 <= self.min_lr_factor <= 1:
            raise ConfigError(f"{self.min_lr_factor} is not in [0, 1]", "min_lr_factor")

    def warmup(self, training_steps: int) -> int:
        """Number of warmup steps in a run of `training_steps` steps: warmup_steps, with -1 resolved."""
        total = self.total_steps or training_steps
        return self.warmup_steps if self.warmup_steps >= 0 else min(MAX_DEFAULT_WARMUP, total // 10)

    def last_before_decay(self, training_steps: int) -> int:
        """The last step before the decay: decay_start, with -1 resolved. Without a decay, a step after the
        end of the schedule."""
        if self.decay_start >= 0:
            return self.decay_start
        total = self.total_steps or training_steps
        decay_steps = total - self.warmup(training_steps)
        if self.decay_ratio >= 0:
            decay_steps = min(round(total * self.decay_ratio), decay_steps)
        return total + 1 - decay_steps  # + 1: min_lr_factor is reached after the last step, not at it

    def check(self, training_steps: int) -> None:
        """Raises ConfigError unless the schedule covers the run and its phases follow each other."""
        total, warmup = self.total_steps or training_steps, self.warmup(training_steps)
        if total < training_steps:
            raise ConfigError(
                f"{total} is below training.steps = {training_steps}: the schedule would end before the run",
                "lr_scheduler.total_steps",
            )
        if self.warmup_steps >= total:
            resolved = replace(self, warmup_steps=-1).warmup(training_steps)
            raise ConfigError(
                f"{self.warmup_steps} steps of warmup need a schedule of more than {total} steps; set "
                f"warmup_steps = {resolved}, or -1, which means {resolved} here",
                "lr_scheduler.warmup_steps",
            )
        if self.decay_start >= 0 and not warmup <= self.decay_start < total:
            raise ConfigError(
                f"{self.decay_start} is not a step from {max(warmup, 1)}, where warmup ends, to {total - 1}, "
                "the last but one of the schedule",
                "lr_scheduler.decay_start",
            )

    def describe(self, training_steps: int) -> str:
        """A decay to 0 that follows warmup directly is not mentioned."""
        total, warmup = self.total_steps or training_steps, self.warmup(training_steps)
        text = f"{super().describe(total)}, {warmup:,} of them warmup"
        last = self.last_before_decay(training_steps)
        if last > total:
            return f"{text}, no decay"
        if last <= warmup + 1 and not self.min_lr_factor:
            return text
        end = f" to {self.min_lr_factor:g} of the peak" if self.min_lr_factor else ""
        return f"{text}, {self.decay_type} decay{end} after step {last:,}"

    def factor(self, step: int, training_steps: int) -> float:
        """Factor of the peak learning rate at `step` = 1, 2, ...; min_lr_factor after the decay."""
        warmup = self.warmup(training_steps)
        if step < warmup:
            return step / warmup
        last = self.last_before_decay(training_steps)
        decay_steps = (self.total_steps or training_steps) + 1 - last
        if decay_steps <= 0 or step <= last:
            return 1.0
        progress = min((step - last) / decay_steps, 1.0)
        shape = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.decay_type]
        return self.min_lr_factor + (1 - self.min_lr_factor) * shape
