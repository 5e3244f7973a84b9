"""Pins the meter on a clock of the test's own: what a step's time is, what is taken out of it, throughput
and FLOPs from it, MFU only where the device's peak is known, and a new window after each report.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titanlite.config.component import ConfigError
from titanlite.data.step_sizes import StepSize
from titanlite.metrics import meter as meter_module
from titanlite.metrics.meter import Meter, Metrics, StepCost
from titanlite.metrics.sinks.base import Sinks, Writer
from titanlite.step_clock import StepClock


class Clock:
    """Stands in for the module `time`: moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Collected(Writer):
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, Any]]] = []
        self.closed = False

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.written.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def make_meter(clock: Clock, *sinks: Collected, peak_flops: float | None = None) -> Meter:
    """1000 tokens per step over 4 ranks, 2 GFLOP per token of whole sequences and 1 GFLOP of half ones."""
    flops = {100: 2 * 10**9, 50: 10**9}
    cost = StepCost(seq_len=100, world_size=4, flops_per_token=flops, peak_flops=peak_flops)
    writers = Sinks({str(i): sink for i, sink in enumerate(sinks)})
    cpu = torch.device("cpu")
    return Meter(
        cpu,
        writers,
        cost,
        lambda: None,
        StepClock(cpu),
        lambda step: False,
        lambda x: x + 1,
        _began=clock.now,
    )


WHOLE = StepSize(0, 10)  # 10 whole sequences


def take_steps(meter: Meter, clock: Clock, steps: int, seconds: float, size: StepSize = WHOLE) -> None:
    for _ in range(steps):
        clock.sleep(seconds)
        meter.step_done(size)


def report_one_step(clock: Clock, values: dict[str, Any], *sinks: Collected) -> dict[str, Any]:
    meter = make_meter(clock, *sinks)
    take_steps(meter, clock, steps=1, seconds=2.0)
    return meter.report(1, values)


LOSS = {"train/loss": 2.0}


def test_throughput_is_that_of_the_steps_since_the_last_report(clock):
    meter = make_meter(clock)
    take_steps(meter, clock, steps=5, seconds=2.0)
    values = meter.report(5, LOSS)
    assert values["time/step_s"] == pytest.approx(2.0)
    assert values["throughput/tokens_per_second"] == pytest.approx(500.0)
    assert values["throughput/tokens_per_second_per_device"] == pytest.approx(125.0)
    assert values["throughput/tflops"] == pytest.approx(0.25)  # of one device: 125 x 2 GFLOP
    take_steps(meter, clock, steps=3, seconds=4.0)
    assert meter.report(8, LOSS)["time/step_s"] == pytest.approx(4.0)


def test_throughput_counts_the_tokens_of_steps_of_different_sizes(clock):
    meter = make_meter(clock)
    take_steps(meter, clock, steps=1, seconds=2.0)
    take_steps(meter, clock, steps=1, seconds=2.0, size=StepSize(10, 30, num_splits=2))
    values = meter.report(2, LOSS)
    assert values["throughput/tokens_per_second"] == pytest.approx((1000 + 3000) / 4)
    assert values["throughput/tflops"] == pytest.approx((1000 * 2 + 3000 * 1) / 1000 / 4 / 4)


def test_mfu_is_absent_where_the_peak_is_unknown(clock):
    meter = make_meter(clock, peak_flops=None)
    take_steps(meter, clock, steps=1, seconds=2.0)
    assert "throughput/mfu" not in meter.report(1, LOSS)


def test_mfu_is_flops_of_one_device_over_its_peak(clock):
    meter = make_meter(clock, peak_flops=1e12)
    take_steps(meter, clock, steps=1, seconds=2.0)
    assert meter.report(1, LOSS)["throughput/mfu"] == pytest.approx(0.25)


def test_time_apart_is_not_step_time_and_is_reported_once(clock):
    meter = make_meter(clock)
    take_steps(meter, clock, steps=4, seconds=2.0)
    for _ in range(2):
        with meter.untimed("checkpoint/stall_s"):
            clock.sleep(15.0)
    values = meter.report(4, LOSS)
    assert values["checkpoint/stall_s"] == pytest.approx(30.0)
    assert values["time/step_s"] == pytest.approx(2.0)
    take_steps(meter, clock, steps=1, seconds=2.0)
    values = meter.report(5, LOSS)
    assert "checkpoint/stall_s" not in values
    assert values["time/step_s"] == pytest.approx(2.0)


def test_what_the_device_still_has_to_do_of_the_steps_is_not_time_apart(clock):
    meter = make_meter(clock)
    pending = [3.0, 5.0]  # of the steps, then of the body
    meter.synchronize = lambda: clock.sleep(pending.pop(0))
    meter.step_done(WHOLE)
    with meter.untimed("time/validation_s"):
        pass
    values = meter.report(1, LOSS)
    assert values["time/validation_s"] == pytest.approx(5.0)
    assert values["time/step_s"] == pytest.approx(3.0)


def test_data_wait_is_a_share_of_the_time(clock):
    meter = make_meter(clock)
    for _ in range(2):
        with meter.waiting_for_data(1):
            clock.sleep(0.5)
        take_steps(meter, clock, steps=1, seconds=1.5)
    assert meter.report(2, LOSS)["time/data_wait_pct"] == pytest.approx(25.0)
    take_steps(meter, clock, steps=1, seconds=1.0)
    assert meter.report(3, LOSS)["time/data_wait_pct"] == 0.0


def test_a_report_begins_a_new_window_of_phases(clock):
    meter = make_meter(clock)
    with meter.waiting_for_data(1):
        pass
    take_steps(meter, clock, steps=1, seconds=1.0)
    assert meter.clock.times() is not None
    meter.report(1, LOSS)
    assert meter.clock.times() is None


def test_data_wait_is_a_share_of_the_time_of_the_steps(clock):
    # A validation in the window must not make a starved loader look fed.
    meter = make_meter(clock)
    with meter.waiting_for_data(1):
        clock.sleep(1.0)
    take_steps(meter, clock, steps=1, seconds=1.0)
    with meter.untimed("time/validation_s"):
        clock.sleep(98.0)
    assert meter.report(1, LOSS)["time/data_wait_pct"] == pytest.approx(50.0)


def test_a_cpu_reports_no_memory(clock):
    assert not [key for key in report_one_step(clock, LOSS) if key.startswith("memory/")]


def test_the_memory_of_the_rank_that_has_most_is_reported(clock, monkeypatch):
    peaks = {"memory/peak_allocated_gib": 3.5, "memory/peak_reserved_gib": 4.0}
    monkeypatch.setattr(meter_module, "peak_memory", lambda device: dict(peaks))
    values = report_one_step(clock, LOSS)  # make_meter's other rank has 1 GiB more
    most = {"memory/max_allocated_gib": 4.5, "memory/max_reserved_gib": 5.0}
    assert {key: value for key, value in values.items() if key.startswith("memory/")} == peaks | most
    meter = make_meter(clock)
    meter.cost = replace(meter.cost, world_size=1)
    assert not [key for key in meter.report(1, dict(LOSS)) if "/max_" in key]


def test_every_sink_gets_what_is_returned(clock):
    sinks = [Collected(), Collected()]
    values = report_one_step(clock, LOSS | {"data/batch_sha": "00ff"}, *sinks)
    assert values["data/batch_sha"] == "00ff"
    assert [sink.written for sink in sinks] == [[(1, values)], [(1, values)]]


def test_a_log_freq_below_one_is_refused():
    with pytest.raises(ConfigError) as e:
        Metrics(log_freq=0)
    assert e.value.key == "log_freq"
