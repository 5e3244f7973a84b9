"""A learning-rate schedule from outside the package: inverse square root (Vaswani et al. 2017, arXiv
1706.03762), which needs no end. To use it, put this file into the current directory or install it, and write

    [job]
    imports = ["inverse_sqrt"]

    [lr_scheduler]
    name = "inverse_sqrt"
    warmup_steps = 1000
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlite.config.amount import Steps
from titanlite.config.component import ConfigError
from titanlite.optim.schedule import LRScheduler


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(LRScheduler, name="inverse_sqrt"):
    """Linear warmup, then a learning rate that falls with the square root of the step."""

    warmup_steps: Steps = 100
    """Steps of linear warmup, at whose end the learning rate has its peak."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ConfigError(f"{self.warmup_steps} is below 1", "warmup_steps")

    def factor(self, step: int, training_steps: int) -> float:
        return min(step / self.warmup_steps, math.sqrt(self.warmup_steps / step))

    def check(self, training_steps: int) -> None:
        if self.warmup_steps > training_steps:
            raise ConfigError(
                f"{self.warmup_steps} is above training.steps = {training_steps}: the run would end within "
                "its warmup",
                "lr_scheduler.warmup_steps",
            )
