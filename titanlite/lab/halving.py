"""The search for good settings: which runs it has, which of them continue, and where the best value lies.

Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943) over whole schedules. The runs of a rung
train half as many steps as the runs of the next one, each with a learning rate schedule that ends with the
run, and the better half continues. Losses in the middle of a longer schedule would rank the runs
wrongly: a run with a high rate is often behind until its rate decays (Wen et al. 2025, arXiv 2509.02046)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from titanlite.lab.axes import Axis

MIN_GOING_ON = 3  # runs: through fewer there is no parabola
SPREADS = 2  # a tie: the losses differ by less than so many times the difference of two seeds

Trial = tuple[str, ...]  # the values of the axes, in TOML


class Rung(NamedTuple):
    """The number of runs, and by how much their training is shorter than the whole."""

    num_runs: int
    divisor: int


class Parabola(NamedTuple):
    """The minimum of a parabola through losses over the logarithm of a value, and the values between which
    the parabola is within the noise of its minimum, also where nothing was tried; `low` and `high` are None
    without a noise."""

    value: float
    loss: float
    low: float | None
    high: float | None


def grid(axes: Sequence[Axis]) -> list[Trial]:
    """Return every combination of the values."""
    return list(itertools.product(*(axis.values for axis in axes)))


def rungs(num_trials: int, most: int | None = None) -> list[Rung]:
    """Return the rungs, at most `most` of them: each has half of the runs of the one before, but at least 3,
    and the last one trains as long as the job says."""
    sizes = [num_trials]
    while sizes[-1] > MIN_GOING_ON and (most is None or len(sizes) < most):
        sizes.append(max(MIN_GOING_ON, math.ceil(sizes[-1] / 2)))
    return [Rung(size, 2 ** (len(sizes) - 1 - i)) for i, size in enumerate(sizes)]


def survivors(losses: Mapping[Trial, float], num: int) -> list[Trial]:
    """Return the `num` trials with the lowest losses, best first; none whose loss is infinite."""
    finite = [trial for trial in losses if math.isfinite(losses[trial])]
    return sorted(finite, key=lambda trial: losses[trial])[:num]


def halve(
    trials: Sequence[Trial], plan: Sequence[Rung], train: Callable[[int, list[Trial]], dict[Trial, float]]
) -> list[dict[Trial, float]]:
    """Train the trials of each rung and return their losses by rung. `train(i, trials)`: the losses of rung
    i; infinite for a run that diverged. Ends early if no run of a rung has a finite loss."""
    results, remaining = list[dict[Trial, float]](), list(trials)
    for i, rung in enumerate(plan):
        remaining = survivors(results[-1], rung.num_runs) if results else remaining
        if not remaining:
            break
        results.append(train(i, remaining))
    return results


def ties(losses: Mapping[Trial, float], noise: float) -> list[Trial]:
    """Return the trials that are not the best, but within `noise` of it, best first."""
    best, *others = survivors(losses, len(losses))
    return [trial for trial in others if losses[trial] - losses[best] < noise]


def neighbours(losses: Mapping[float, float]) -> list[float]:
    """Return the value with the lowest loss between the two beside it; [] if it is at an end."""
    values = sorted(losses)
    at = values.index(min(values, key=losses.__getitem__)) if values else 0
    return values[at - 1 : at + 2] if 0 < at < len(values) - 1 else []


def fit_parabola(losses: Mapping[float, float], noise: float | None) -> Parabola | None:
    """Fit a parabola through the lowest loss and the two beside it, over the logarithm of the value: losses
    far from the minimum do not lie on a parabola. None if the lowest loss is at an end, or a neighbour
    diverged."""
    values = neighbours(losses)
    y = np.array([losses[value] for value in values])
    if not values or not np.isfinite(y).all():
        return None
    x = np.log(np.array(values))
    center = x.mean()
    a, b, c = np.polyfit(x - center, y, 2)
    at = -b / (2 * a)
    half = None if noise is None else math.sqrt(noise / a)
    bounds = (None, None) if half is None else (math.exp(at - half + center), math.exp(at + half + center))
    return Parabola(math.exp(at + center), float(c - b * b / (4 * a)), *bounds)
