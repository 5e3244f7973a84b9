"""Pins the piecewise schedule: its values at, between and beyond the points, and which points are refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.jobs import write_toml
from titanlite.config.component import ConfigError
from titanlite.job import load_job
from titanlite.optim.piecewise import Piecewise
from titanlite.optim.warmup_stable_decay import WarmupStableDecay

BEND = 0.2 * math.sqrt(0.5)  # 0.2 times the cosine of 45 degrees
POINTS = [[2.0, 0.2], [4.0, 1.0], [8.0, 0.6]]


@pytest.mark.parametrize(
    ("interpolation", "expected"),
    [
        ("linear", [0.2, 0.2, 0.6, 1.0, 0.9, 0.8, 0.7, 0.6, 0.6]),
        ("constant", [0.2, 0.2, 0.2, 1.0, 1.0, 1.0, 1.0, 0.6, 0.6]),
        ("cosine", [0.2, 0.2, 0.6, 1.0, 0.8 + BEND, 0.8, 0.8 - BEND, 0.6, 0.6]),
    ],
)
def test_factors_by_hand(interpolation, expected):
    schedule = Piecewise(points=POINTS, interpolation=interpolation)
    assert [schedule.factor(step, 9) for step in range(1, 10)] == pytest.approx(expected)


def test_one_point_is_a_constant():
    assert [Piecewise(points=[[5.0, 0.5]]).factor(step, 9) for step in (1, 5, 9)] == [0.5, 0.5, 0.5]


def test_it_can_say_warmup_stable_decay():
    points = [[0.0, 0.0], [10.0, 1.0], [60.0, 1.0], [101.0, 0.1]]
    same = WarmupStableDecay(warmup_steps=10, decay_start=60, min_lr_factor=0.1)
    for step in range(1, 120):
        assert Piecewise(points=points).factor(step, 100) == pytest.approx(same.factor(step, 100), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.integers(0, 50).map(float), st.floats(0, 1), min_size=1, max_size=6),
    st.sampled_from(["linear", "cosine", "constant"]),
)
def test_the_factor_passes_through_the_points_and_stays_between_neighbours(points, interpolation):
    ordered = [list(point) for point in sorted(points.items())]
    schedule = Piecewise(points=ordered, interpolation=interpolation)
    assert all(schedule.factor(int(step), 50) == factor for step, factor in points.items())
    for step in range(1, 60):
        before = [factor for at, factor in schedule.points if at <= step][-1:]
        after = [factor for at, factor in schedule.points if at >= step][:1]
        around = before + after
        assert min(around) - 1e-12 <= schedule.factor(step, 50) <= max(around) + 1e-12


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "there is no point: a constant learning rate is [[0, 1.0]]"),
        ([[1.0]], "[1.0] is not a point [step, factor]"),
        ([[1.0, 1.0, 1.0]], "[1.0, 1.0, 1.0] is not a point [step, factor]"),
        ([[1.5, 1.0]], "1.5 of [1.5, 1.0] is not a step"),
        ([[-1.0, 1.0]], "-1 of [-1.0, 1.0] is not a step"),
        ([[math.nan, 1.0]], "nan of [nan, 1.0] is not a step"),
        ([[math.inf, 1.0]], "inf of [inf, 1.0] is not a step"),
        ([[5.0, 1.0], [5.0, 0.5]], "step 5 does not come after step 5"),
        ([[5.0, 1.0], [4.0, 0.5]], "step 4 does not come after step 5"),
        ([[5.0, 1.1]], "the factor 1.1 of step 5 is not in [0, 1]"),
        ([[5.0, -0.1]], "the factor -0.1 of step 5 is not in [0, 1]"),
        ([[5.0, math.nan]], "the factor nan of step 5 is not in [0, 1]"),
    ],
)
def test_wrong_points_are_refused(points, said):
    with pytest.raises(ConfigError) as e:
        Piecewise(points=points)
    assert (str(e.value), e.value.key) == (said, "points")


def test_a_run_that_would_end_at_a_learning_rate_of_0_is_refused():
    schedule = Piecewise(points=[[0.0, 1.0], [9.0, 0.0]])
    schedule.check(8)
    schedule.check(9)
    with pytest.raises(ConfigError, match=r"would be 0 from step 9 to the end, training.steps = 10; ") as e:
        schedule.check(10)
    assert e.value.key == "lr_scheduler.points"


def test_description():
    assert Piecewise(points=POINTS).describe(1000) == (
        "piecewise over 1,000 steps, 0.2 at step 2, 1 at step 4, 0.6 at step 8, linear between them"
    )
    many = Piecewise(points=[[float(i), 1.0] for i in range(10)]).describe(10)
    assert ", 1 at step 0, 1 at step 1, 6 more points, 1 at step 8, 1 at step 9, linear" in many
    assert Piecewise(points=[[3.0, 0.5]]).describe(10).endswith(", constant 0.5")


def test_points_are_read_from_toml_with_whole_numbers(tmp_path: Path, corpus: Path) -> None:
    file = write_toml(tmp_path, corpus)
    base = file.read_text().replace("warmup_steps = 2\ntotal_steps = 16", 'name = "piecewise"')
    file.write_text(base)
    job = load_job(file, ["--lr_scheduler.points=[[0, 0], [4, 1], [8, 0.5]]"])
    assert [job.lr_scheduler.factor(step, 8) for step in (2, 4, 6, 8)] == [0.5, 1.0, 0.75, 0.5]
