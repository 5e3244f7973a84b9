"""Which steps are profiled, and what a profile leaves: a trace that opens, a table that adds up."""

from __future__ import annotations

import gzip
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import make_job
from titanlite.config.component import ConfigError
from titanlite.metrics.profiling import Profiler, Profiling, kernel_table
from titanlite.train import train


def plan(first_step: int, last_step: int = 40, **config: Any) -> dict[str, list[int]]:
    """Steps by what the profiler does in them."""
    profiling, actual = Profiling(enable_profiling=True, **config), {}
    profiler = Profiler(profiling, Path(), 0, first_step, last_step)
    for step in range(first_step, last_step + 1):
        actual.setdefault(profiler._action(step).name, []).append(step)
    actual.pop("NONE", None)
    return actual


@pytest.mark.parametrize(
    ("first_step", "config", "wanted"),
    [
        (1, {}, {"WARMUP": [8, 9], "RECORD_AND_SAVE": [10]}),
        (4, {}, {"WARMUP": [8, 9], "RECORD_AND_SAVE": [10]}),
        (9, {}, {"WARMUP": [9], "RECORD_AND_SAVE": [10]}),
        (11, {}, {"WARMUP": [18, 19], "RECORD_AND_SAVE": [20]}),
        (1, {"profiler_warmup": 0, "profiler_active": 2}, {"RECORD": [9], "RECORD_AND_SAVE": [10]}),
        (1, {"profile_freq": 3}, {"WARMUP": [1, 2], "RECORD_AND_SAVE": [3]}),
        (1, {"profile_freq": 1, "profiler_warmup": 0}, {"RECORD_AND_SAVE": [1]}),
        # half a trace is none, and counts for none
        (10, {"profiler_active": 2}, {"WARMUP": [17, 18], "RECORD": [19], "RECORD_AND_SAVE": [20]}),
        (1, {"last_step": 10}, {"WARMUP": [8, 9], "RECORD_AND_SAVE": [10]}),
        (1, {"last_step": 9}, {}),
    ],
)
def test_the_steps_up_to_a_multiple_are_traced(first_step, config, wanted) -> None:
    assert plan(first_step, **config) == wanted


@pytest.mark.parametrize("last_step", [1, 3])
def test_what_the_end_of_a_run_cuts_off_is_no_trace(tmp_path: Path, last_step: int) -> None:
    profiling = Profiling(enable_profiling=True, profile_freq=2, profiler_warmup=0, profiler_active=2)
    with Profiler(profiling, tmp_path / "profile", 0, 1, 1000) as profiler:
        for _ in range(last_step):
            torch.ones(8).sum()
            profiler.step_done()
    traces = [path.name for path in tmp_path.glob("profile/*")]
    assert traces == (["trace-step-2-rank-0.json.gz"] if last_step == 3 else [])


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("no folder")
    with Profiler(
        Profiling(enable_profiling=True, profile_freq=3), tmp_path / "profile", 0, 1, 3
    ) as profiler:
        for _ in range(3):
            profiler.step_done()


def test_a_run_leaves_a_trace_and_a_table(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = ["--profiling.enable_profiling", "--profiling.profile_freq=4", "--training.steps=6"]
    train(make_job(tmp_path, corpus, *profile))
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "trace-step-4-rank-0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names
    assert any(str(name).startswith("Optimizer.step#AdamW") for name in names)
    (table,) = re.findall(r"time per step up to step 4.*?name\n(.*?others)", capfd.readouterr().err, re.S)
    shares = [float(line.split()[1].rstrip("%")) for line in table.splitlines()]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert shares[:-1] == sorted(shares[:-1], reverse=True)


@pytest.mark.full
def test_profiling_changes_no_number(tmp_path: Path, corpus: Path) -> None:
    def losses(name: str, *overrides: str) -> list[float]:
        train(job := make_job(tmp_path, corpus, *overrides, name=name))
        lines = (job.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["train/loss"] for line in lines]

    assert losses("profiled", "--profiling.enable_profiling", "--profiling.profile_freq=4") == losses("plain")


@pytest.mark.parametrize(("config", "rank"), [(Profiling(enable_profiling=True), 1), (Profiling(), 0)])
def test_other_ranks_and_other_runs_do_nothing(tmp_path: Path, config: Profiling, rank: int) -> None:
    def untimed() -> AbstractContextManager[None]:
        raise AssertionError("a step is held up for nothing")

    with Profiler(config, tmp_path / "profile", rank, 1, 20, untimed) as profiler:
        for _ in range(20):
            profiler.step_done()
    assert not (tmp_path / "profile").exists()


class Event:
    """One of key_averages()."""

    def __init__(self, key: str, device: Any, cpu: float, cuda: float, count: int, named: bool = False):
        self.key, self.device_type, self.count, self.is_user_annotation = key, device, count, named
        self.self_cpu_time_total, self.self_device_time_total = cpu, cuda


def test_with_a_device_its_kernels_count() -> None:
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        Event("aten::mm", cpu, 9e9, 0, 3),
        Event("ProfilerStep*", cuda, 0, 9000, 1, named=True),  # a range over the kernels, not one of them
        Event("gemm", cuda, 0, 6000, 4),
        Event("add", cuda, 0, 2000, 8),
    ]
    lines = kernel_table(events, steps=2).splitlines()[1:]
    assert [line.split() for line in lines] == [["3.00", "75.0%", "2", "gemm"], ["1.00", "25.0%", "4", "add"]]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"profile_freq": 2}, "profile_freq"),
        ({"profiler_active": 0}, "profiler_active"),
        ({"profiler_warmup": -1}, "profiler_warmup"),
    ],
)
def test_steps_that_do_not_fit_are_refused(config: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError) as e:
        Profiling(**config)
    assert e.value.key == key


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"enable_memory_snapshot": True}, "profiling.enable_memory_snapshot"),
        ({"enable_profiling": True, "profiler": "nsys"}, "profiling.profiler"),
    ],
)
def test_what_needs_a_gpu_says_so(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device") as e:
        Profiling(**config).check(torch.device("cpu"), 1)
    assert e.value.key == key
    Profiling(**config).check(torch.device("cuda"), 1)


def test_a_rank_that_is_not_there_is_refused() -> None:
    Profiling(ranks=[0, 3]).check(torch.device("cpu"), 4)
    with pytest.raises(ConfigError, match="no rank 4 among 4") as e:
        Profiling(ranks=[0, 4]).check(torch.device("cpu"), 4)
    assert e.value.key == "profiling.ranks"
    with pytest.raises(ConfigError, match="names no rank") as e:
        Profiling(ranks=[]).check(torch.device("cpu"), 4)
    assert e.value.key == "profiling.ranks"
