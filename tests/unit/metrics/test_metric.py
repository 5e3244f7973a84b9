"""The metrics that are always on, from results of steps that the test makes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.support.fake_ranks import DETAILED, STEP, FakeRanks
from titanlite.metrics.step_times import StepTimes
from titanlite.metrics.training import perplexity
from titanlite.step_clock import StepTimes as Times


def test_the_times_of_a_step_are_in_detailed_reports() -> None:
    phases = {"data": 0.1, "forward": 0.6, "start": 0.3}
    times = Times(step_s=1.0, phases=phases, wait_s=0.25, host_bound=True)
    clock = SimpleNamespace(times=lambda: times)
    expected = {"time/data_s": 0.1, "time/forward_s": 0.6}
    assert StepTimes(FakeRanks(clock=clock)).measure(DETAILED) == expected
    ranks = FakeRanks(size=2, clock=clock)
    assert StepTimes(ranks).measure(DETAILED) == expected | {"time/communication_wait_s": 0.25}
    assert StepTimes(ranks).measure(STEP) == {}
    assert StepTimes(FakeRanks()).measure(DETAILED) == {}, "no step was measured"


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (2.0, math.exp(2.0)), (1e6, math.inf), (math.inf, math.inf)]
)
def test_perplexity(loss: float, expected: float) -> None:
    assert perplexity(loss) == expected
    assert math.isnan(perplexity(math.nan))
