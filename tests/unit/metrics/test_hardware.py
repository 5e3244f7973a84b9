"""The state of the GPUs, with a driver that the test imitates."""

from __future__ import annotations

import math
from unittest.mock import patch

import torch

from tests.support.fake_ranks import DETAILED, STEP, FakeRanks
from titanlite.metrics.hardware import Hardware, extremes

NAN = math.nan


def test_the_gpu_that_stands_out_is_reported_with_its_rank() -> None:
    rows = [[0, 600.0, 1900.0, 60.0, 99.0], [2, 500.0, 1200.0, 88.0, 98.0], [1, 550.0, 1950.0, 61.0, 97.0]]
    assert extremes(rows) == {
        "memory/alloc_retries": 3,
        "gpu/power_w": 600.0, "gpu/power_w_rank": 0,
        "gpu/sm_clock_mhz": 1200.0, "gpu/sm_clock_mhz_rank": 1,
        "gpu/temperature_c": 88.0, "gpu/temperature_c_rank": 1,
        "gpu/utilization_pct": 97.0, "gpu/utilization_pct_rank": 2,
    }  # fmt: skip


def test_one_gpu_needs_no_rank_and_unknown_values_are_left_out() -> None:
    assert extremes([[0, 600.0, NAN, 60.0, NAN]]) == {
        "memory/alloc_retries": 0,
        "gpu/power_w": 600.0,
        "gpu/temperature_c": 60.0,
    }
    assert extremes([[0, *[NAN] * 4], [0, 500.0, *[NAN] * 3]])["gpu/power_w_rank"] == 1


def test_a_cpu_has_none() -> None:
    assert Hardware(FakeRanks()).measure(DETAILED) == {}


def test_a_missing_library_is_said_once_and_retries_are_counted_since_the_last_report() -> None:
    hardware = Hardware(FakeRanks(device=torch.device("cuda", 0)))
    with (
        patch("torch.cuda.memory_stats", side_effect=[{"num_alloc_retries": n} for n in (3, 5)]),
        patch("torch.cuda.power_draw", side_effect=ModuleNotFoundError("no pynvml")) as draw,
        patch("titanlite.metrics.hardware.logger") as logger,
    ):
        assert [hardware.measure(DETAILED) for _ in range(2)] == [
            {"memory/alloc_retries": 3},
            {"memory/alloc_retries": 2},
        ]
        assert hardware.measure(STEP) == {}
    assert draw.call_count == logger.info.call_count == 1
    assert "install nvidia-ml-py" in logger.info.call_args.args[0]
