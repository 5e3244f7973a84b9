"""Which ranks are named as slow, from times that the test sets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from tests.support.fake_ranks import STEP, FakeRanks
from titanlite.metrics.slow_ranks import SlowRanks
from titanlite.step_clock import StepTimes

HOSTS = ["a", "b", "c", "d"]
TIMES = StepTimes(step_s=1.0, phases={"data": 0.1, "forward": 0.6, "start": 0.3}, wait_s=0.0, host_bound=True)


class Clock:
    """A clock of set times."""

    def __init__(self, times: StepTimes | None = None):
        self.given = times

    def times(self) -> StepTimes | None:
        """The set times."""
        return self.given


def warnings(
    reports: Sequence[Sequence[float]], data_s: float = 0.0, host_bound: float = 1.0, rank: int = 0
) -> list[str]:
    """The log of `rank`. `reports`: each rank's own time, for each report. The last rank has waited
    `data_s` longer for data than the others."""
    current: list[list[float]] = []
    num_ranks = len(reports[0])
    fake = FakeRanks(rank, num_ranks, floats=lambda: current, values=HOSTS, clock=Clock(TIMES))
    ranks = SlowRanks(fake)
    with patch("titanlite.metrics.slow_ranks.logger") as logger:
        for report in reports:
            current[:] = [[own_s, 0.0, host_bound] for own_s in report]
            current[-1][1] = data_s
            ranks.measure(STEP)
    return [call.args[0] for call in logger.warning.call_args_list]


FAST, SLOW = [1.0, 1.1, 1.0, 1.0], [1.0, 1.1, 1.0, 1.3]


def test_a_rank_is_named_once_and_again_when_it_has_recovered() -> None:
    assert warnings([FAST, FAST, SLOW, SLOW, SLOW, SLOW, FAST, FAST, FAST]) == [
        "rank 3 on d is slow: without waiting for other ranks, its steps take 1.300 s, the median over "
        "ranks is 1.000 s (+30%); its host issues the work more slowly",
        "rank 3 on d is as fast as the other ranks again",
    ]


@pytest.mark.parametrize(
    ("reports", "number"),
    [
        ([SLOW, SLOW, FAST], 0),  # the first report has the compilation
        ([SLOW, SLOW, SLOW], 1),
        ([FAST, SLOW, FAST, SLOW, FAST], 0),  # not in a row
        ([FAST, SLOW, SLOW, FAST, SLOW, FAST, SLOW], 1),  # it has not recovered
        ([FAST, *[[1.0, 1.0, 1.0, 1.19]] * 3], 0),
        ([FAST, *[[1.0, 1.0, 1.0, 1.21]] * 3], 1),
        ([FAST, *[[0.01, 0.01, 0.01, 0.029]] * 3], 0),  # below 20 ms
        ([FAST, *[[1.0, 1.5]] * 3], 1),  # two ranks
        ([FAST, *[[1.0, 1.5, 1.5, 1.0]] * 3], 2),  # ranks of one tensor-parallel group wait for each other
        ([FAST, *[[0.5, 1.0, 1.0, 1.0]] * 3], 0),  # a fast rank is no fault
    ],
)
def test_what_stands_out(reports: list[list[float]], number: int) -> None:
    reports = [report[: len(reports[-1])] for report in reports]
    assert len(warnings(reports)) == number


def test_the_cause_is_named() -> None:
    reports = [FAST, SLOW, SLOW]
    assert warnings(reports)[0].endswith("; its host issues the work more slowly")
    assert warnings(reports, host_bound=0.0)[0].endswith("; its device computes more slowly")
    assert warnings(reports, data_s=0.2)[0].endswith("; most of the difference is its wait for data")
    assert warnings(reports, data_s=0.1)[0].endswith("; its host issues the work more slowly")


def test_rank_0_speaks_for_all() -> None:
    assert warnings([FAST, SLOW, SLOW], rank=1) == []


@pytest.mark.full
def test_noise_is_no_alarm() -> None:
    """1000 runs of 20 reports: a step's mean over ten steps varies by 5% here."""
    random.seed(0)
    for _ in range(1000):
        assert not warnings([[random.gauss(1.0, 0.05) for _ in range(4)] for _ in range(20)])


def test_metrics_name_the_slowest_rank() -> None:
    rows = [[1.0, 0, 1], [1.5, 0, 1]]
    clock = Clock(TIMES)
    ranks = SlowRanks(FakeRanks(1, 2, floats=lambda: rows, values=HOSTS, clock=clock))
    assert ranks.measure(STEP) == {"time/slowest_rank": 1, "time/slowest_rank_pct": 50.0}
    assert SlowRanks(FakeRanks(0, 1, clock=clock)).measure(STEP) == {}
    clock.given = None
    assert ranks.measure(STEP) == {}
