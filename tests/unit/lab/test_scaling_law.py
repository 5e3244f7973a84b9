"""The fit of a scaling law finds known laws; its intervals contain the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.lab.scaling_law import Floats, Law, fit

SIZES, RATIOS = (25e6, 60e6, 150e6, 400e6), (10.0, 30.0, 90.0)
N = np.repeat(SIZES, len(RATIOS))
D = N * np.tile(RATIOS, len(SIZES))
REPLICAS = 150  # all fits draw the same ones
FAR = 8e9, 160e9  # 20 times the parameters and 4.4 times the tokens of the largest run


def law(E: float, A: float, alpha: float, B: float, beta: float) -> Law:
    return Law(*(np.array([value]) for value in (E, A, alpha, B, beta)))


TRUE = law(1.69, 482.0, 0.35, 2085.4, 0.37)


def noisy(noise: float, seed: int) -> Floats:
    return np.asarray(TRUE.loss(N, D) * (1 + noise * np.random.default_rng(seed).standard_normal(len(N))))


@pytest.mark.parametrize("true", [TRUE, law(0.0, 40.0, 0.2, 900.0, 0.31), law(2.6, 1.4e3, 0.61, 95.0, 0.22)])
def test_a_law_is_found_from_losses_without_noise(true: Law) -> None:
    fitted = fit(N, D, true.loss(N, D), num_replicas=10)
    assert fitted.law.alpha[0] == pytest.approx(true.alpha[0], abs=2e-5)
    assert fitted.law.beta[0] == pytest.approx(true.beta[0], abs=2e-5)
    assert fitted.law.E[0] == pytest.approx(true.E[0], abs=1e-4)
    assert fitted.forecast(*FAR).value == pytest.approx(true.loss(*FAR)[0], abs=1e-4)
    assert fitted.noise < 1e-5


def test_the_optimum_has_the_lowest_loss_for_its_flops() -> None:
    flops = 6 * FAR[0] * FAR[1]
    best = TRUE.best_parameters(flops)[0]
    around = best * np.array([0.98, 1.0, 1.02])
    losses = TRUE.loss(around, flops / 6 / around)
    assert losses.argmin() == 1
    assert TRUE.flops_for(flops / 6 / best)[0] == pytest.approx(flops)


@pytest.mark.full
@pytest.mark.parametrize(("noise", "num"), [(0.01, 16), full(0.002, 200), full(0.01, 200)])
def test_intervals_contain_the_truth_as_often_as_they_say(noise: float, num: int) -> None:
    """95% of them; and half of them between the quartiles, so that intervals that are too wide fail, too."""
    truths = [TRUE.alpha[0], TRUE.beta[0], TRUE.loss(*FAR)[0]]
    inside, within_quartiles = np.zeros(3), np.zeros(3)
    for seed in range(num):
        replicas = fit(N, D, noisy(noise, seed), REPLICAS).replicas
        for i, values in enumerate((replicas.alpha, replicas.beta, replicas.loss(*FAR))):
            low, first, third, high = np.quantile(values, [0.025, 0.25, 0.75, 0.975])
            inside[i] += low <= truths[i] <= high
            within_quartiles[i] += first <= truths[i] <= third
    errors = 3 * np.sqrt(np.array([0.95 * 0.05, 0.5 * 0.5]) * (1 / num + 1 / REPLICAS))
    assert np.all(np.abs(inside / num - 0.95) <= errors[0])
    assert np.all(np.abs(within_quartiles / num - 0.5) <= errors[1])


def test_the_forecast_of_a_run_has_the_noise_of_a_run() -> None:
    fitted = fit(N, D, noisy(0.01, seed=0))
    low, high = np.quantile(fitted.replicas.loss(1e8, 4e9), [0.025, 0.975])
    loss = fitted.forecast(1e8, 4e9)
    assert loss.high - loss.low > 2 * (high - low)  # amid the runs, the law itself is known better
    assert loss.high - loss.low == pytest.approx(4 * fitted.noise * loss.value, rel=0.3)


def parabolas(flops: Floats, off_center: float) -> float:
    """Approach 2: the power of the FLOPs by the minima of parabolas through runs of equal FLOPs, whose sizes
    are around the optimum times a factor that grows with the FLOPs."""
    minima = []
    for i, budget in enumerate(flops):
        sizes = TRUE.best_parameters(budget) * np.geomspace(1 / 8, 8, 9) * off_center**i
        a, b, _ = np.polyfit(np.log(sizes), TRUE.loss(sizes, budget / 6 / sizes), 2)
        minima.append(-b / (2 * a))
    return float(np.polyfit(np.log(flops), minima, 1)[0])


def test_parabolas_through_runs_of_equal_flops_are_biased_without_noise() -> None:
    """A control: the other usual method on losses without noise misses the law by more than ours does."""
    truth = TRUE.beta[0] / (TRUE.alpha[0] + TRUE.beta[0])
    ours = fit(N, D, TRUE.loss(N, D), num_replicas=10).exponent().value
    theirs = parabolas(np.geomspace(1e18, 1e20, 5), off_center=1.5)
    assert abs(ours - truth) < 1e-4
    assert abs(theirs - truth) > 0.005


def test_one_loss_before_its_decay_shifts_the_forecast() -> None:
    """Why such runs are refused: a loss that is 4% too high."""
    losses = TRUE.loss(N, D)
    losses[-1] *= 1.04
    assert fit(N, D, losses, num_replicas=10).forecast(*FAR).value > TRUE.loss(*FAR)[0] + 0.05


def test_runs_that_do_not_determine_a_law_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fall with both parameters and tokens"):
        fit(N, D, 10 - TRUE.loss(N, D), num_replicas=100)
    with pytest.raises(ConfigError, match="the runs do not determine"):
        fit(N, D, noisy(0.2, seed=0), num_replicas=100)
