"""The search finds a known best rate, and does not drop a run that is behind until its rate decays."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.lab.axes import Axis, take_axes
from titanlite.lab.halving import Rung, Trial, fit_parabola, grid, halve, rungs, survivors, ties
from titanlite.lab.search import _best_value_line
from titanlite.optim.warmup_stable_decay import WarmupStableDecay

STEPS = 1000
CURVATURE, START, NOISE = np.array([0.01, 1.0]), 3.0, 0.1  # of the quadratic; the variance of a gradient

LossOf = Callable[[float, int, int], float]  # of a learning rate, the steps, and the steps of the schedule


def rates_of(lr: float, num_steps: int, schedule_steps: int) -> list[float]:
    """The learning rates of the first `num_steps` steps of a schedule that is constant for one half of
    `schedule_steps` and decays to zero in the other."""
    schedule = WarmupStableDecay(warmup_steps=0, total_steps=schedule_steps, decay_ratio=0.5)
    return [lr * schedule.factor(step, num_steps) for step in range(1, num_steps + 1)]


def toy_loss(lr: float, num_steps: int, schedule_steps: int) -> float:
    """The expected loss of SGD with noisy gradients on a quadratic with several curvatures. Exact: means and
    variances of the errors follow from their last values."""
    mean, variance = np.full(2, START), np.zeros(2)
    for rate in rates_of(lr, num_steps, schedule_steps):
        mean = (1 - rate * CURVATURE) * mean
        variance = (1 - rate * CURVATURE) ** 2 * variance + rate**2 * NOISE
    return float(np.sum(CURVATURE * (mean**2 + variance)) / 2)


def trained_loss(lr: float, num_steps: int, schedule_steps: int) -> float:
    """The mean loss of 256 models that torch's SGD trains on this quadratic."""
    rng = torch.Generator().manual_seed(0)
    weights = torch.full((256, 2), START, dtype=torch.float64, requires_grad=True)
    curvature, optimizer = torch.tensor(CURVATURE), torch.optim.SGD([weights])
    for rate in rates_of(lr, num_steps, schedule_steps):
        noise = NOISE**0.5 * torch.randn(weights.shape, generator=rng, dtype=torch.float64)
        weights.grad = weights.detach() * curvature + noise
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return float((curvature * weights.detach() ** 2).sum(1).mean() / 2)


def found(trials: list[Trial], plan: list[Rung], loss_of: LossOf, cut: bool = False) -> Trial:
    """The best trial by successive halving. `cut`: rungs stop in the middle of the whole schedule instead of
    having schedules of their own."""

    def train(i: int, going_on: list[Trial]) -> dict[Trial, float]:
        steps = STEPS // plan[i].divisor
        return {t: loss_of(float(t[0]), steps, STEPS if cut else steps) for t in going_on}

    return survivors(halve(trials, plan, train)[-1], 1)[0]


@pytest.mark.parametrize("loss_of", [toy_loss, full(trained_loss)])
def test_a_known_best_rate_is_found_within_a_grid_step(loss_of: LossOf) -> None:
    (axis,), _ = take_axes(["--optimizer.lr=1e-2:1.9:9"])
    rates = np.geomspace(1e-2, 1.9, 60)
    best = rates[np.argmin([toy_loss(rate, STEPS, STEPS) for rate in rates])]
    chosen = float(found(grid([axis]), rungs(9), loss_of)[0])
    step = 190 ** (1 / 8)
    assert best / step < chosen < best * step
    values = [float(value) for value in axis.values]
    at = values.index(chosen)
    around = values[at - 1 : at + 2]
    losses = [loss_of(value, STEPS, STEPS) for value in around]
    fit = fit_parabola(dict(zip(around, losses)), 0.01)
    assert fit is not None
    assert fit.value == pytest.approx(best, rel=0.3)
    assert fit.loss < losses[1] + 1e-9
    assert fit.low is not None
    assert fit.high is not None
    assert fit.low < fit.value < fit.high


@pytest.mark.parametrize("loss_of", [toy_loss, trained_loss])
def test_a_run_that_leads_only_before_its_decay_does_not_win(loss_of: LossOf) -> None:
    """Control: with cut schedules the higher rate is dropped, although it ends lower."""
    trials: list[Trial] = [("0.1",), ("0.8",)]
    plan = [Rung(2, 4), Rung(1, 1)]
    whole = {t: loss_of(float(t[0]), STEPS, STEPS) for t in trials}
    early = {t: loss_of(float(t[0]), STEPS // 4, STEPS) for t in trials}
    assert survivors(whole, 1) != survivors(early, 1)  # the flip
    assert [found(trials, plan, loss_of)] == survivors(whole, 1)
    assert [found(trials, plan, loss_of, cut=True)] == survivors(early, 1)


def test_rungs_halve_the_runs_and_double_the_steps() -> None:
    assert rungs(16) == [Rung(16, 8), Rung(8, 4), Rung(4, 2), Rung(3, 1)]
    assert rungs(5) == [Rung(5, 2), Rung(3, 1)]
    assert rungs(3) == [Rung(3, 1)]
    assert rungs(16, most=1) == [Rung(16, 1)]
    assert rungs(16, most=2) == [Rung(16, 2), Rung(8, 1)]


def test_runs_that_diverge_do_not_continue() -> None:
    trained = list[tuple[int, int]]()

    def train(i: int, going_on: list[Trial]) -> dict[Trial, float]:
        trained.append((i, len(going_on)))
        return {t: math.inf if float(t[0]) > 2 else float(t[0]) for t in going_on}

    halve([(str(i),) for i in range(8)], rungs(8), train)
    assert trained == [(0, 8), (1, 3), (2, 3)]
    trained.clear()
    assert len(halve([("3",), ("4",), ("5",), ("6",)], rungs(4), train)) == 1


def test_ties_are_within_the_noise() -> None:
    losses: dict[Trial, float] = {("a",): 2.0, ("b",): 2.009, ("c",): 2.02, ("d",): math.inf}
    assert ties(losses, 0.01) == [("b",)]
    assert ties(losses, 0.0) == []


def test_no_minimum_outside_the_values() -> None:
    assert fit_parabola({}, None) is None
    assert fit_parabola({1: 1, 2: 2}, None) is None
    assert fit_parabola({1: 3, 2: 2, 4: 1}, None) is None  # a line
    assert fit_parabola({1: 1, 2: 2, 4: 1}, None) is None  # a maximum
    assert fit_parabola({1: 2, 2: 1, 4: math.inf}, None) is None
    fit = fit_parabola({1: 2, 2: 1, 4: 2}, None)
    assert fit is not None
    assert fit.value == pytest.approx(2)
    assert fit.low is None


def test_losses_far_from_the_minimum_do_not_move_it() -> None:
    near = {0.5: 1.2, 1.0: 1.0, 2.0: 1.2}
    fit = fit_parabola({8.0: 9.0, 4.0: 3.0} | near, None)
    assert fit is not None
    assert fit.value == pytest.approx(1)
    assert fit == fit_parabola(near, None)


@pytest.mark.parametrize(
    ("noise", "between"), [(0.01, "0.856 to 1.17"), (1.0, "at most 0.5 to at least 2"), (None, "")]
)
def test_the_interval_ends_at_the_values_tried(noise: float | None, between: str) -> None:
    losses = {("0.25",): 3.0, ("0.5",): 1.2, ("1",): 1.0, ("2",): 1.2}
    axis = Axis("optimizer.lr", ("0.25", "0.5", "1", "2"), is_range=True)
    line = _best_value_line(0, axis, ("1",), losses, noise)
    text = "a parabola through the best and the two beside it has its minimum at 1: 1.0000"
    end = f", and is within the noise, of two seeds only, from {between}" if between else ""
    assert line == f"optimizer.lr: {text}{end}"


def test_ranges_and_lists_of_the_command_line() -> None:
    axes, rest = take_axes(
        [
            "--optimizer.lr=1e-4:1e-2:3",
            "--a.b=16:64:3",
            "--optimizer.name=adamw,muon",
            "--x.y=[1,2]",
            "--on",
            "--t=a, b",
        ]
    )
    assert axes == [
        Axis("optimizer.lr", ("0.0001", "0.001", "0.01"), is_range=True),
        Axis("a.b", ("16", "32", "64"), is_range=True),
        Axis("optimizer.name", ("adamw", "muon")),
    ]
    assert rest == ["--x.y=[1,2]", "--on=true", "--t=a, b"]
    assert len(grid(axes)) == 18


@pytest.mark.parametrize(
    "override", ["a=1:1:3", "a=0:1:3", "a=2:1:3", "a=1:2:1", "a=1:3:9", "a=x,,y", "a=x,x"]
)
def test_bad_ranges(override: str) -> None:
    with pytest.raises(ConfigError, match="command line, --a: "):
        take_axes([f"--{override}"])


def test_two_ranges_of_a_key() -> None:
    with pytest.raises(ConfigError, match="more than one range"):
        take_axes(["--a=1:2:2", "--a=x,y"])
