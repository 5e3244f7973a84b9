"""Pins the warmup-stable-decay schedule: torchtitan's values, linear warmup, a constant phase, the shapes of
decay with its end points, and that the factor is a function of the step and the schedule's length alone.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    named = int(str(e.value).split("warmup_steps = ")[1].split(",")[0])
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
        ("decay_start", 0),
        ("decay_start", -2),
        ("min_lr_factor", -0.1),
        ("min_lr_factor", 1.1),
        ("min_lr_factor", math.nan),
    ],
)
def test_values_that_make_no_schedule_are_refused(key, value):
    with pytest.raises(ConfigError) as e:
        WarmupStableDecay(**{key: value})
    assert e.value.key == key


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_decay_start_is_the_last_step_at_the_peak(decay_type, ratio):
    """A decay of D steps in a schedule of 40 begins after step 41 - D."""
    started = WarmupStableDecay(warmup_steps=2, decay_start=41 - round(40 * ratio), decay_type=decay_type)
    by_ratio = WarmupStableDecay(warmup_steps=2, decay_ratio=ratio, decay_type=decay_type)
    started.check(40)
    assert factors(replace(started, total_steps=40), 50) == factors(replace(by_ratio, total_steps=40), 50)


def test_a_decay_from_a_given_step_by_hand():
    """decay_ratio = 0, which a constant trunk has, does not switch the decay off."""
    schedule = WarmupStableDecay(warmup_steps=2, decay_ratio=0.0, decay_start=6, min_lr_factor=0.2)
    assert factors(schedule, 9) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    assert schedule.factor(10, 9) == pytest.approx(0.2)


def test_decay_may_start_anywhere_from_the_end_of_warmup_to_the_last_step_but_one():
    for start in (4, 9):
        WarmupStableDecay(warmup_steps=4, decay_start=start).check(10)
    for start in (3, 10, 11):
        with pytest.raises(ConfigError, match=f"^{start} is not a step from 4, where warmup ends, to 9") as e:
            WarmupStableDecay(warmup_steps=4, decay_start=start).check(10)
        assert e.value.key == "lr_scheduler.decay_start"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, ""),
        ({"decay_ratio": 1.0}, ""),
        ({"decay_ratio": 0.0}, ", no decay"),
        ({"decay_ratio": 0.25, "decay_type": "sqrt"}, ", sqrt decay after step 1,501"),
        ({"decay_ratio": 0.0, "decay_start": 1200}, ", linear decay after step 1,200"),
        ({"min_lr_factor": 0.1}, ", linear decay to 0.1 of the peak after step 11"),
    ],
)
def test_the_description_says_where_decay_begins_if_it_does_not_follow_warmup(keys, text):
    schedule = WarmupStableDecay(warmup_steps=10, total_steps=2000, **keys)
    assert schedule.describe(50) == f"warmup_stable_decay over 2,000 steps, 10 of them warmup{text}"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_factors_are_in_0_to_1_and_the_phases_join(data):
    """From the last step at the peak on, no change is above the steepest slope of the decay."""
    total = data.draw(st.integers(3, 300))
    warmup = data.draw(st.integers(0, total - 2))
    start = data.draw(st.integers(max(warmup, 1), total - 1))
    floor = data.draw(st.floats(0, 1))
    kind = data.draw(st.sampled_from(["linear", "cosine"]))
    keys = {"warmup_steps": warmup, "decay_start": start, "decay_type": kind, "min_lr_factor": floor}
    schedule = WarmupStableDecay(total_steps=total, **keys)
    schedule.check(total)
    got = factors(schedule, total + 2)
    assert all(0 <= factor <= 1 for factor in got)
    assert got[max(warmup, 1) - 1 : start] == [1.0] * (start - max(warmup, 1) + 1)
    assert got[total] == got[total + 1] == pytest.approx(floor)
    steepest = math.pi / 2 / (total + 1 - start)
    assert all(earlier - later <= steepest + 1e-12 for earlier, later in pairwise(got[start - 1 :]))
