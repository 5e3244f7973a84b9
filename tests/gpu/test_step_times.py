"""The times of a step by CUDA events, the state of the GPU, and which of two GPUs' ranks is slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu import run, trained
from titanlite.step_clock import StepClock

pytestmark = pytest.mark.gpu
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SPIN = 200_000_000  # clock cycles, about a tenth of a second
SLOW = """
import os, time, torch
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.data.loader import SequenceLoader

def slowly(owner, name, wait):
    original = getattr(owner, name)
    def method(*args):
        if os.environ["RANK"] == "1":
            wait()
        return original(*args)
    setattr(owner, name, method)

PLACES = {
    "data": (SequenceLoader, "__next__", lambda: time.sleep(0.2)),
    "host": (ShardedModel, "model_inputs", lambda: time.sleep(0.2)),
    "device": (ShardedModel, "model_inputs", lambda: torch.cuda._sleep(400_000_000)),
}
slowly(*PLACES[os.environ["PLACE"]])
"""


def test_phases_and_waits_are_those_of_the_device_and_nothing_waits_for_it() -> None:
    clock = StepClock(torch.device("cuda"))
    spin = clock.waiting_in(lambda: torch.cuda._sleep(SPIN))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        for step, measured in ((1, False), (2, True)):
            clock.begin(step, measured)
            clock.enter("forward")
            torch.cuda._sleep(SPIN)
            clock.enter("backward")
            torch.cuda._sleep(SPIN)
            spin()
            clock.enter("optimizer")
            clock.end()
        issued_s = time.perf_counter() - began
    finally:
        torch.cuda.set_sync_debug_mode("default")
    times = clock.times()
    assert times is not None
    assert times.phases["forward"] > 0.02
    assert times.phases["backward"] == pytest.approx(2 * times.phases["forward"], rel=0.2)
    assert times.wait_s == pytest.approx(times.phases["forward"], rel=0.2)
    assert times.own_s == pytest.approx(2 * times.phases["forward"], rel=0.2)
    assert issued_s < times.step_s
    assert not times.host_bound
    clock.clear()
    assert clock.times() is None


@pytest.mark.parametrize("ngpu", [1, pytest.param(2, marks=TWO)])
def test_a_detailed_report_has_the_times_and_the_gpu(tmp_path: Path, corpus: Path, ngpu: int) -> None:
    rows: list[dict[str, Any]] = run(tmp_path, corpus, "--metrics.detail_freq=4", ngpu=ngpu)
    detailed = [row for row in rows if "time/forward_s" in row]
    assert [row["step"] for row in detailed] == [1, 4, 8]
    for row in detailed:
        parts = [row[f"time/{phase}_s"] for phase in ("forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert row["memory/alloc_retries"] == 0
        assert ("time/communication_wait_s" in row) == (ngpu > 1)
    assert sum(parts) < 2 * row["time/step_s"]


@TWO
@pytest.mark.parametrize(
    ("place", "cause"),
    [
        ("data", "most of the difference is its wait for data"),
        ("host", "its host issues the work more slowly"),
        ("device", "its device computes more slowly"),
    ],
)
def test_a_slow_rank_is_named_with_its_cause(tmp_path: Path, corpus: Path, place: str, cause: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    log = trained(tmp_path, corpus, '--job.imports=["slow"]', ngpu=2, PLACE=place)
    slow = [line for line in log.splitlines() if " is slow: " in line]
    assert len(slow) == 1, log
    assert "rank 1 on " in slow[0]
    assert slow[0].endswith(cause), slow[0]
