"""The piecewise learning-rate schedule: given factors at given steps."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.config.component import ConfigError
from titanlite.optim.points import Interpolation, Points, check_points, describe_points, number_at
from titanlite.optim.schedule import LRScheduler


@dataclass(frozen=True, kw_only=True)
class Piecewise(LRScheduler, name="piecewise"):
    """Given factors at given steps, interpolated between them, and constant before the first and after the
    last point."""

    points: Points
    """Points [step, factor] in the order of steps, factors in [0, 1]: `[[0, 0.0], [200, 1.0], [10000, 0.1]]`.
    A step may be an amount: `["2B tokens", 1.0]`."""
    interpolation: Interpolation = "linear"
    """Between two points: a straight line, half a period of a cosine, or the factor of the earlier point."""

    def __post_init__(self) -> None:
        check_points(self.points, "points", "factor", lambda factor: 0 <= factor <= 1, "in [0, 1]")
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
        return f"{super().describe(training_steps)}, {describe_points(self.points, self.interpolation)}"

    def factor(self, step: int, training_steps: int) -> float:
        """Factor of the peak learning rate at `step` = 1, 2, ..."""
        return number_at(self.points, step, self.interpolation)
