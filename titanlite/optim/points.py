"""Numbers at given steps, and between them: the points of schedules."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated, Literal

from titanlite.config.amount import Amount, StepCount
from titanlite.config.component import ConfigError

MAX_DESCRIBED = 6  # points in the log
Points = list[list[Annotated[float, StepCount()]]]
Interpolation = Literal["linear", "cosine", "constant"]


def check_points(points: Points, key: str, noun: str, is_valid: Callable[[float], bool], valid: str) -> None:
    """Raises ConfigError unless `points` are pairs [step, number] in the order of steps, with numbers for
    which `is_valid`. `noun` and `valid`: the name and the range of the numbers, for messages."""
    before = -1.0
    for point in points:
        if len(point) != 2:
            raise ConfigError(f"{point} is not a point [step, {noun}]", key)
        step, number = point
        if isinstance(number, Amount):
            raise ConfigError(f"{number} of {point} is not a {noun}", key)
        if isinstance(step, Amount):  # checked once it is resolved
            continue
        if not (step >= 0 and float(step).is_integer()):
            raise ConfigError(f"{step:g} of {point} is not a step", key)
        if step <= before:
            raise ConfigError(f"step {step:g} does not come after step {before:g}", key)
        if not is_valid(number):
            raise ConfigError(f"the {noun} {number:g} of step {step:g} is not {valid}", key)
        before = step


def number_at(points: Points, step: int, interpolation: Interpolation) -> float:
    """The number at a step: constant before the first and after the last point. Between two points: on a
    straight line, on half a period of a cosine, or the number of the earlier point."""
    i = bisect_right([at for at, _ in points], step)
    if i in (0, len(points)):
        return points[max(i - 1, 0)][1]
    (left, start), (right, end) = points[i - 1 : i + 1]
    progress = (step - left) / (right - left)
    share = {
        "linear": progress,
        "cosine": 0.5 * (1 - math.cos(math.pi * progress)),
        "constant": 0.0,
    }[interpolation]
    return (1 - share) * start + share * end


def describe_points(points: Points, interpolation: Interpolation) -> str:
    """The points in a few words, for the log."""
    if len(points) == 1:
        return f"constant {points[0][1]:g}"
    steps = [f"after {step}" if isinstance(step, Amount) else f"at step {step:,.0f}" for step, _ in points]
    shown = [f"{number:g} {step}" for (_, number), step in zip(points, steps)]
    if len(shown) > MAX_DESCRIBED:
        shown[2:-2] = [f"{len(shown) - 4} more points"]
    return f"{', '.join(shown)}, {interpolation} between them"
