"""The piecewise learning-rate schedule: given factors at given steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Annotated, Literal

from titanlite.config.amount import Amount, StepCount
from titanlite.config.component import ConfigError
from titanlite.optim.schedule import LRScheduler

MAX_DESCRIBED = 6  # points in the log


@dataclass(frozen=True, kw_only=True)
class Piecewise(LRScheduler, name="piecewise"):
    """Given factors at given steps, interpolated between them, and constant before the first and after the
    last point."""

    points: list[list[Annotated[float, StepCount()]]]
    """Points [step, factor] in the order of steps, factors in [0, 1]: `[[0, 0.0], [200, 1.0], [10000, 0.1]]`.
    A step may be an amount: `["2B tokens", 1.0]`."""
    interpolation: Literal["linear", "cosine", "constant"] = "linear"
    """Between two points: a straight line, half a period of a cosine, or the factor of the earlier point."""

    def __post_init__(self) -> None:
        before = -1.0
        for point in self.points:
            if len(point) != 2:
                raise ConfigError(f"{point} is not a point [step, factor]", "points")
            step, factor = point
            if isinstance(factor, Amount):
                raise ConfigError(f"{factor} of {point} is not a factor", "points")
            if isinstance(step, Amount):  # checked once it is resolved
                continue
            if not (step >= 0 and step.is_integer()):
                raise ConfigError(f"{step:g} of {point} is not a step", "points")
            if step <= before:
                raise ConfigError(f"step {step:g} does not come after step {before:g}", "points")
            if not 0 <= factor <= 1:
                raise ConfigError(f"the factor {factor:g} of step {step:g} is not in [0, 1]", "points")
            before = step
        if not self.points:
            raise ConfigError("there is no point: a constant learning rate is [[0, 1.0]]", "points")

    def check(self, training_steps: int) -> None:
        """Raises ConfigError if the last part of the run would train at a learning rate of 0."""
        step, factor = self.points[-1]
        if factor == 0 and step < training_steps:
            raise ConfigError(
                f"the learning rate would be 0 from step {step:g} to the end, training.steps = "
                f"{training_steps}; end the points with a factor above 0, or at step {training_steps + 1}",
                "lr_scheduler.points",
            )

    def describe(self, training_steps: int) -> str:
        shown = [f"{factor:g} at step {step:,.0f}" for step, factor in self.points]
        if len(shown) > MAX_DESCRIBED:
            shown[2:-2] = [f"{len(shown) - 4} more points"]
        return f"{super().describe(training_steps)}, {self.interpolation} between {', '.join(shown)}"

    def factor(self, step: int, training_steps: int) -> float:
        """Factor of the peak learning rate at `step` = 1, 2, ..."""
        i = bisect_right([at for at, _ in self.points], step)
        if i in (0, len(self.points)):
            return self.points[max(i - 1, 0)][1]
        (left, start), (right, end) = self.points[i - 1 : i + 1]
        progress = (step - left) / (right - left)
        share = {
            "linear": progress,
            "cosine": 0.5 * (1 - math.cos(math.pi * progress)),
            "constant": 0.0,
        }[self.interpolation]
        return (1 - share) * start + share * end
