"""Pins the power scheduler: the power law between warmup and decay, where it begins, its shapes of decay, and
that all but the decay is independent of the length of the run."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.component import ConfigError
from titanlite.optim.power import Power


def factors(schedule: Power, training_steps: int) -> list[float]:
    """The factors of steps 1 .. training_steps."""
    return [schedule.factor(step, training_steps) for step in range(1, training_steps + 1)]


def test_an_inverse_square_root_by_hand():
    schedule = Power(warmup_steps=4, exponent=-0.5, decay_ratio=0.0)
    schedule.check(400)
    got = factors(schedule, 400)
    assert got[:4] == [0.25, 0.5, 0.75, 1.0]
    assert [got[step - 1] for step in (16, 36, 100, 400)] == pytest.approx([1 / 2, 1 / 3, 1 / 5, 1 / 10])


def test_the_power_law_may_begin_after_warmup():
    schedule = Power(warmup_steps=2, exponent=-1.0, power_start=4, decay_ratio=0.0)
    assert factors(schedule, 8) == pytest.approx([0.5, 1, 1, 1, 4 / 5, 4 / 6, 4 / 7, 4 / 8])


def test_warmup_beyond_the_beginning_of_the_power_law_rises_to_it():
    schedule = Power(warmup_steps=4, exponent=-1.0, power_start=2, decay_ratio=0.0)
    assert factors(schedule, 5) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.4])


def test_it_is_the_published_law():
    """Rate min(max, batch a n^b) after n tokens: batch a = 1, b = -0.51 and 1,000 tokens per step."""
    peak, start = 1e-3, 762  # 762 is the last step at which (1000 s)^-0.51 is above the peak
    assert (1000 * start) ** -0.51 > peak > (1000 * (start + 1)) ** -0.51
    schedule = Power(warmup_steps=10, power_start=start, decay_ratio=0.0)
    for step in (10, 700, 900, 5000, 100_000):
        law = min(peak, (1000 * step) ** -0.51)
        assert peak * schedule.factor(step, 100_000) == pytest.approx(law, rel=1e-3)


def test_no_warmup_begins_at_the_peak():
    schedule = Power(warmup_steps=0, exponent=-1.0, decay_ratio=0.0)
    assert factors(schedule, 3) == pytest.approx([1, 1 / 2, 1 / 3])


@pytest.mark.parametrize(
    ("decay_type", "halfway"),
    [
        ("linear", 0.5 * (0.5 + 0.125)),
        ("sqrt", 0.125 + 0.375 * (1 - math.sqrt(0.5))),
        ("cosine", 0.5 * (0.5 + 0.125)),
        ("exponential", 0.25),
    ],
)
def test_shapes_of_decay(decay_type, halfway):
    """Step 16 has the factor 1/2. Step 18 is halfway to 1/8 at step 20, which follows the last step."""
    keys = {"warmup_steps": 4, "exponent": -0.5, "decay_start": 16, "min_lr_factor": 0.125}
    schedule = Power(decay_type=decay_type, **keys)
    schedule.check(19)
    assert schedule.factor(16, 19) == pytest.approx(0.5)
    assert schedule.factor(18, 19) == pytest.approx(halfway)
    assert schedule.factor(20, 19) == schedule.factor(999, 19) == pytest.approx(0.125)


def test_an_exponential_decay_falls_by_equal_ratios():
    schedule = Power(warmup_steps=4, decay_start=10, decay_type="exponential", min_lr_factor=0.01)
    ratios = [later / earlier for earlier, later in pairwise(factors(schedule, 30)[9:])]
    assert ratios == pytest.approx([ratios[0]] * 20)
    assert ratios[0] < 0.9


def test_only_the_decay_depends_on_the_length():
    schedule = Power(warmup_steps=10)
    assert factors(schedule, 100)[:91] == factors(schedule, 1000)[:91]
    assert schedule.factor(92, 100) < schedule.factor(92, 1000)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_factors_are_in_0_to_1_and_the_phases_join(data):
    """From the last step before the decay on, no change is above the steepest slope of the decay."""
    total = data.draw(st.integers(3, 200))
    warmup = data.draw(st.integers(0, total - 2))
    start = data.draw(st.integers(max(warmup, 1), total - 1))
    exponent, floor = data.draw(st.floats(-3, 0)), data.draw(st.floats(1e-3, 1))
    law = data.draw(st.integers(1, total))
    keys = {"warmup_steps": warmup, "decay_start": start, "exponent": exponent, "power_start": law}
    kind = data.draw(st.sampled_from(["linear", "cosine", "exponential"]))
    before = (max(start, law) / law) ** exponent
    schedule = Power(total_steps=total, decay_type=kind, min_lr_factor=floor * before, **keys)
    schedule.check(total)
    got = factors(schedule, total + 2)
    assert all(0 <= factor <= 1 + 1e-12 for factor in got)
    assert got[start - 1] == pytest.approx(before)
    assert got[total] == got[total + 1] == pytest.approx(floor * before)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(got[max(warmup, 1) - 1 :]))
    slope = max(math.pi / 2, -math.log(floor)) * before / (total + 1 - start)
    assert all(earlier - later <= slope + 1e-12 for earlier, later in pairwise(got[start - 1 :]))


def test_an_end_above_the_beginning_of_the_decay_is_refused():
    schedule = Power(warmup_steps=4, exponent=-0.5, decay_start=16, min_lr_factor=0.6)
    with pytest.raises(ConfigError, match=r"^0.6 is above the factor 0.5 of step 16, where decay beg") as e:
        schedule.check(20)
    assert e.value.key == "lr_scheduler.min_lr_factor"


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("exponent", {"exponent": 0.1}),
        ("exponent", {"exponent": math.nan}),
        ("exponent", {"exponent": -math.inf}),
        ("power_start", {"power_start": 0}),
        ("power_start", {"power_start": -2}),
        ("min_lr_factor", {"decay_type": "exponential"}),
        ("decay_ratio", {"decay_ratio": 1.5}),
    ],
)
def test_values_that_make_no_schedule_are_refused(key, keys):
    with pytest.raises(ConfigError) as e:
        Power(**keys)
    assert e.value.key == key


def test_description():
    assert Power(warmup_steps=10).describe(1000) == (
        "power over 1,000 steps, 10 of them warmup, step^-0.51 after step 10, linear decay after step 901"
    )
    schedule = Power(warmup_steps=10, power_start=50, decay_ratio=0.0)
    assert schedule.describe(1000).endswith("warmup, step^-0.51 after step 50, no decay")
