"""Pins the warmup-stable-decay schedule: torchtitan's values, linear warmup, a constant phase, the shapes of
decay with its end points, and that the factor is a function of the step and the schedule's length alone.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from titanlite.config.component import ConfigError
from titanlite.optim.warmup_stable_decay import WarmupStableDecay


def factors(schedule: WarmupStableDecay, training_steps: int) -> list[float]:
    """The factors of steps 1 .. training_steps."""
    return [schedule.factor(step, training_steps) for step in range(1, training_steps + 1)]


def test_the_factors_are_torchtitans():
    """The golden file holds values that torchtitan 0.2.2's own function returned, for 200 settings."""
    golden = Path(__file__).parents[2] / "golden/torchtitan_0_2_2_schedule.jsonl"
    cases = [json.loads(line) for line in golden.read_text().splitlines()]
    assert len(cases) == 200
    for case in cases:
        steps, expected = case.pop("steps"), case.pop("factors")
        mine = {step: WarmupStableDecay(**case).factor(int(step), steps) for step in expected}
        assert mine == pytest.approx(expected, abs=1e-12), (steps, case)


def test_a_schedule_of_one_step_trains_it_at_the_peak():
    for decay_type in ("linear", "sqrt", "cosine"):
        assert WarmupStableDecay(warmup_steps=0, decay_type=decay_type).factor(1, 1) == 1.0


def test_warmup_is_linear_and_reaches_the_peak_at_its_last_step():
    schedule = WarmupStableDecay(warmup_steps=4, decay_ratio=0.0)
    assert factors(schedule, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_no_warmup():
    assert factors(WarmupStableDecay(warmup_steps=0, decay_ratio=0.0), 3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("training_steps", "warmup"), [(1, 0), (5, 0), (10, 1), (160, 16), (2000, 200), (40000, 200)]
)
def test_by_default_warmup_is_a_tenth_of_the_schedule_and_200_steps_at_most(training_steps, warmup):
    schedule = WarmupStableDecay()
    assert schedule.warmup(training_steps) == warmup
    assert WarmupStableDecay(total_steps=training_steps).warmup(1) == warmup
    assert factors(schedule, training_steps) == factors(
        WarmupStableDecay(warmup_steps=warmup), training_steps
    )
    schedule.check(training_steps)


@pytest.mark.parametrize(("warmup_steps", "total"), [(2000, 1000), (10, 10), (3, 2)])
def test_the_refusal_of_a_long_warmup_names_a_value_that_works(warmup_steps, total):
    with pytest.raises(ConfigError, match="need a schedule of more than") as e:
        WarmupStableDecay(warmup_steps=warmup_steps).check(total)
    named = int(str(e.value).split("--lr_scheduler.warmup_steps=")[1].split(",")[0])
    WarmupStableDecay(warmup_steps=named).check(total)


def test_warmup_stable_decay():
    schedule = WarmupStableDecay(warmup_steps=2, decay_ratio=0.4)
    assert factors(schedule, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_without_a_ratio_decay_follows_warmup():
    schedule = WarmupStableDecay(warmup_steps=2)
    assert factors(schedule, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_shapes_of_decay(decay_type):
    schedule = WarmupStableDecay(warmup_steps=0, decay_ratio=0.5, decay_type=decay_type)
    shape = {
        "linear": lambda x: 1 - x,
        "sqrt": lambda x: 1 - x**0.5,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    }[decay_type]
    # 100 steps, a decay of 50: step 51 is the last at the peak, step 101 would be at the end point
    assert schedule.factor(51, 100) == 1.0
    assert schedule.factor(76, 100) == pytest.approx(shape(25 / 50), abs=1e-12)
    assert schedule.factor(100, 100) == pytest.approx(shape(49 / 50), abs=1e-12)
    assert schedule.factor(101, 100) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_decay_never_rises_and_no_step_is_wasted_at_zero(decay_type):
    decay = factors(WarmupStableDecay(warmup_steps=10, decay_type=decay_type), 100)[10:]
    assert all(later < earlier for earlier, later in pairwise(decay))
    assert decay[-1] > 0


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_decay_ends_at_min_lr_factor_and_stays_there(decay_type):
    schedule = WarmupStableDecay(warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1)
    assert schedule.factor(100, 100) > 0.1
    assert [schedule.factor(step, 100) for step in (101, 102, 5000)] == pytest.approx([0.1, 0.1, 0.1])


def test_min_lr_factor_scales_the_decay_and_leaves_warmup_alone():
    schedule = WarmupStableDecay(warmup_steps=4, decay_ratio=0.5, min_lr_factor=0.2)
    assert schedule.factor(1, 20) == 0.25
    assert schedule.factor(16, 20) == pytest.approx(
        0.2 + 0.8 * (1 - 5 / 10)
    )  # halfway of a decay of 10 steps


def test_a_decay_that_overlaps_warmup_starts_when_warmup_ends():
    schedule = WarmupStableDecay(warmup_steps=6, decay_ratio=1.0)
    assert factors(schedule, 10)[:6] == pytest.approx([step / 6 for step in range(1, 7)])
    assert factors(schedule, 10)[6:] == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_total_steps_sets_the_length_independently_of_training_steps():
    schedule = WarmupStableDecay(warmup_steps=2, total_steps=100)
    assert factors(schedule, 10) == [schedule.factor(step, 100) for step in range(1, 11)]
    assert factors(schedule, 10) == factors(WarmupStableDecay(warmup_steps=2), 100)[:10]


def test_total_steps_zero_means_the_steps_of_the_training():
    schedule = WarmupStableDecay(warmup_steps=2)
    assert schedule.factor(10, 20) != schedule.factor(10, 40)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("warmup_steps", -2),
        ("total_steps", -1),
        ("decay_ratio", 1.1),
        ("decay_ratio", math.nan),
        ("min_lr_factor", -0.1),
        ("min_lr_factor", 1.1),
        ("min_lr_factor", math.nan),
    ],
)
def test_values_that_make_no_schedule_are_refused(key, value):
    with pytest.raises(ConfigError) as e:
        WarmupStableDecay(**{key: value})
    assert e.value.key == key
