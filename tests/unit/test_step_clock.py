"""The clock of a step's phases, on a host clock that the test sets."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from titanlite.step_clock import StepClock


class Host:
    """Replaces time.perf_counter()."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def host() -> object:
    """The host's clock, which the test moves."""
    with patch("titanlite.step_clock.time", Host()) as host:
        yield host


def take_step(clock: StepClock, host: Host, data_s: float = 0.5, wait_s: float = 0.25) -> None:
    """A step of 7.5 s, `data_s` for its batches and waits of `wait_s` in each of its forward and backward."""
    wait = clock.waiting_in(lambda: setattr(host, "now", host.now + wait_s))
    clock.begin(1, measured=False)
    host.now += data_s
    for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("optimizer", 4.0)):
        clock.enter(phase)
        host.now += seconds
        if phase != "optimizer":
            wait()
    clock.end()


def test_the_phases_of_a_step_add_up_to_it(host: Host) -> None:
    clock = StepClock(torch.device("cpu"))
    take_step(clock, host)
    host.now += 100  # validation
    take_step(clock, host, data_s=1.5, wait_s=0.75)
    times = clock.times()
    assert times is not None
    assert times.phases == {"data": 1.0, "forward": 1.5, "backward": 2.5, "optimizer": 4.0}
    assert (times.step_s, times.wait_s, times.own_s) == (9.0, 1.0, 8.0)
    assert times == clock.times()  # reading forgets nothing


def test_times_are_those_since_the_last_clear(host: Host) -> None:
    clock = StepClock(torch.device("cpu"))
    assert clock.times() is None
    take_step(clock, host, data_s=9.0)
    clock.clear()
    assert clock.times() is None
    take_step(clock, host)
    times = clock.times()
    assert times is not None
    assert times.phases["data"] == 0.5


def test_waits_outside_a_step_do_not_count(host: Host) -> None:
    """Validation waits for FSDP's collectives, too."""
    clock = StepClock(torch.device("cpu"))
    wait = clock.waiting_in(lambda: setattr(host, "now", host.now + 3.0))
    take_step(clock, host)
    wait()
    with clock.waiting():
        host.now += 1.0
    times = clock.times()
    assert times is not None
    assert times.wait_s == 0.5


def test_the_phase_is_told_when_it_begins() -> None:
    told: list[tuple[int, str]] = []
    clock = StepClock(torch.device("cpu"), lambda *phase: told.append(phase))
    clock.begin(7, measured=True)
    clock.enter("forward")
    clock.end()
    assert told == [(7, "data"), (7, "forward"), (7, "end")]


def test_other_devices_are_not_measured() -> None:
    clock = StepClock(torch.device("mps"))
    clock.begin(1, measured=True)
    clock.end()
    assert clock.times() is None
