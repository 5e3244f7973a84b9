"""Schedules of hyperparameters other than the learning rate: weight decay, and the decay rates of running
means. Like the learning rate they are functions of the step, without state to save."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titanlite.config.component import ConfigError
from titanlite.optim.points import Interpolation, Points, check_points, describe_points, number_at

WEIGHT_DECAY = "weight_decay"


def is_valid(key: str, value: float) -> bool:
    """Whether a hyperparameter may have this value: weight decay from 0 on, decay rates in [0, 1)."""
    return 0 <= value < (math.inf if key == WEIGHT_DECAY else 1.0)


@dataclass(frozen=True, kw_only=True)
class HyperparameterSchedule:
    """A hyperparameter of the optimizer that follows the step, by `factors` or by `values`. AdamW's bias
    correction, 1 - beta^step with the beta of the step, is exact only for a beta that is constant."""

    key: str
    """The hyperparameter: `weight_decay`, `beta1`, `beta2`, or with muon `momentum`."""
    factors: Points = field(default_factory=list)
    """Points [step, factor] in the order of steps, by which the value of each parameter group is multiplied:
    `[[0, 1.0], [10000, 0.0]]`. A step may be an amount: `["2B tokens", 0.0]`."""
    values: Points = field(default_factory=list)
    """Points [step, value] in the order of steps, in place of the value of the optimizer, which param_groups
    must not set, too: `[[0, 0.85], [400, 0.97]]`. Not for weight_decay, which norms do not have."""
    interpolation: Interpolation = "linear"
    """Between two points: a straight line, half a period of a cosine, or the earlier point's number. Before
    the first and after the last point: constant."""

    def __post_init__(self) -> None:
        if bool(self.factors) == bool(self.values):
            raise ConfigError("set either `factors` or `values`", "factors")
        if self.values and self.key == WEIGHT_DECAY:
            raise ConfigError("norms and biases have no weight decay: give factors instead", "values")
        check_points(self.factors, "factors", "factor", lambda x: 0 <= x < math.inf, "at least 0 and finite")
        check_points(self.values, "values", "value", lambda x: is_valid(self.key, x), "in [0, 1)")

    def value(self, own: float, step: int) -> float:
        """The value at `step` = 1, 2, ... `own`: the parameter group's own value."""
        if self.values:
            return number_at(self.values, step, self.interpolation)
        return own * number_at(self.factors, step, self.interpolation)

    def extremes(self, own: float) -> list[float]:
        """The values at the points; all other values lie between them."""
        return [point[1] for point in self.values] or [own * point[1] for point in self.factors]

    def describe(self) -> str:
        """The schedule in a few words, for the log."""
        kind = "" if self.values else "factor "
        return f"{self.key}: {kind}{describe_points(self.values or self.factors, self.interpolation)}"
