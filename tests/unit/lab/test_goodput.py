"""Goodput under failures: the formula against simulated failures, the times of a run, and what is printed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clocked_runs import ClockedRun
from titanlite import cli
from titanlite.lab.goodput import best_interval, best_interval_s, predict
from titanlite.lab.lost_time import Size, Times, assumed_times, measured_times
from titanlite.metrics.sinks.base import STOPPED
from titanlite.report.recorded_run import read_run

Capture = pytest.CaptureFixture[str]
MTBF_S = 3000.0
TIMES = Times(step=2.0, save=5.0, write=60.0, start=100.0, restart=200.0, pauses=0.1, sources={})
PLAN = ["plan", "llama3_8b", "--gpus=64xH100", "--training.steps=1000"]


def simulated(times: Times, mtbf_s: float, interval: int, num_failures: int = 20_000) -> dict[str, float]:
    """Shares of the time of a long run with failures at random times, followed event by event."""
    rng = np.random.default_rng(0)
    period_s = interval * times.step * (1 + times.pauses)
    counted = again = saves = restarts = 0.0
    for life_s in rng.exponential(mtbf_s, num_failures):  # from a failure to the next
        restarts += min(life_s, times.restart)
        if life_s < times.restart:
            continue
        life_s -= times.restart
        clock, saved = 0.0, 0
        while (clock := clock + period_s + times.save) + times.write <= life_s:
            saved += 1
        counted, saves = counted + saved * period_s, saves + saved * times.save
        again += life_s - saved * (period_s + times.save)
    seconds = {
        "training": counted / (1 + times.pauses), "pauses": counted * times.pauses / (1 + times.pauses),
        "saves": saves, "steps trained again": again, "restarts": restarts,
    }  # fmt: skip
    total = sum(seconds.values())
    return {cause: value / total for cause, value in seconds.items()}


@pytest.mark.parametrize("interval", [50, 500])
@pytest.mark.parametrize("changes", [{}, {"save": 40.0, "write": 0.0}, {"restart": 2000.0}], ids=str)
def test_the_formula_is_the_mean_of_simulated_failures(changes: dict[str, float], interval: int) -> None:
    times = replace(TIMES, start=0.0, **changes)
    expected = simulated(times, MTBF_S, interval)
    shares = predict(times, MTBF_S, interval, 10**6).shares
    assert {cause: shares[cause] for cause in expected} == pytest.approx(expected, abs=0.005)
    wrong = predict(times, 2 * MTBF_S, interval, 10**6).shares  # control
    assert abs(wrong["training"] - expected["training"]) > 0.02


def test_the_shares_and_hours_fit_together() -> None:
    goodput = predict(TIMES, MTBF_S, 100, 5000)
    assert sum(goodput.shares.values()) == pytest.approx(1)
    assert goodput.share == pytest.approx(5000 * 2 / 3600 / goodput.hours)
    assert goodput.shares["start"] == pytest.approx(100 / 3600 / goodput.hours)
    without = predict(TIMES, 1e12, 100, 5000)
    assert without.repeated == pytest.approx((220 / 2 + 60) / 2.2, rel=0.05)
    assert without.hours * 3600 == pytest.approx(100 + 5000 * 2.2 + 50 * 5)


@pytest.mark.parametrize("save_s", [0.4, 40.0, 400.0])
def test_the_best_interval_is_better_than_others(save_s: float) -> None:
    times = replace(TIMES, save=save_s, write=0.0)
    best = best_interval(times, MTBF_S)
    others = [predict(times, MTBF_S, round(best * factor), 10**6).share for factor in (0.6, 0.8, 1.25, 1.7)]
    assert predict(times, MTBF_S, best, 10**6).share > max(others)
    young = math.sqrt(2 * save_s * MTBF_S)
    assert best_interval_s(save_s, MTBF_S) == pytest.approx(young - save_s * 2 / 3, rel=0.03)


def test_the_best_interval_is_no_shorter_than_a_save_or_a_step() -> None:
    assert best_interval(replace(TIMES, save=0.001), MTBF_S) == math.ceil(60 / 2.2)
    assert best_interval(replace(TIMES, save=0.001, write=0.0), MTBF_S) == 1
    assert best_interval_s(2 * MTBF_S, MTBF_S) == MTBF_S


def test_a_run_that_never_saves_in_time_never_ends() -> None:
    goodput = predict(TIMES, 1.0, 10_000, 10**6)
    assert (goodput.share, goodput.hours) == (0.0, math.inf)
    assert sum(goodput.shares.values()) == pytest.approx(1)


# ---- the times of a run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClockedRun:
    """A run that saves every 20 steps, was killed after step 67 and stopped after step 80."""
    run = ClockedRun(tmp_path / "measured", monkeypatch)
    run.start(0, 28.0)
    for step in (20, 40, 60):
        run.steps(step)
        run.pause("checkpoint/stall_s", 1.5)
        run.steps(step + 2)
        run.event(step, "saved")
    run.steps(67)
    run.wait(30.0)
    run.start(60, 20.0, {"time/validation_s": 8.0})
    run.steps(80)
    run.end(0.0, STOPPED)
    run.wait(38.0)
    run.start(80, 20.0)
    run.steps(100)
    (run.folder / "job.toml").write_text("[checkpoint]\ninterval = 20\n")
    (run.folder / "env.json").write_text('{"world_size": 1}')
    return run


def test_the_times_of_a_run(run: ClockedRun) -> None:
    assumed = assumed_times(9.0, Size(1.0, 1.0), is_async=True)
    times = measured_times(read_run(run.folder, "measured"), assumed, None, 8)
    assert (times.step, times.start) == (2.0, 28.0)
    assert times.save == pytest.approx(1.5)
    assert times.write == pytest.approx(2 * 2)
    # After the last record the killed process took a save and seven steps; of steps, half a window of ten is
    # expected, which is 10 s.
    assert times.restart == pytest.approx(np.median([1.5 + 7 * 2 - 10 + 30 + 20, 38 + 20]))
    assert times.pauses == pytest.approx(8 / 200)
    assert set(times.sources.values()) == {"measured in measured"}


def test_what_a_run_does_not_have_is_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ClockedRun(tmp_path / "short", monkeypatch)
    run.start(0, 28.0)
    run.steps(20)
    (run.folder / "env.json").write_text('{"world_size": 1}')
    assumed = assumed_times(9.0, Size(1.0, 1.0), is_async=True)
    times = measured_times(read_run(run.folder, "short"), assumed, Size(1.0, 1.0), 8)
    assert (times.step, times.save, times.write) == (9.0, assumed.save, assumed.write)
    assert times.restart == 28.0
    assert times.sources["restart"] == "assumed as long as the start: short had no restart"
    assert times.sources["save"].startswith("assumed")


def test_larger_checkpoints_take_longer() -> None:
    small, same, large = (assumed_times(1.0, Size(s, s), is_async=True) for s in (1.0, 16.7, 33.4))
    assert (large.save, large.write) == pytest.approx((2 * same.save, 2 * same.write))
    assert large.restart - same.restart == pytest.approx(same.restart - 21.1)
    assert small == same
    assert assumed_times(1.0, Size(1.0, 33.4), is_async=False).save == pytest.approx(2 * 15.5)


# ---- the plan


def planned(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_a_plan_predicts_goodput(capsys: Capture) -> None:
    plan = planned(capsys, *PLAN, "--mtbf=800")
    goodput, step_s = plan["goodput"], plan["time"]["step_s"]
    assert (goodput["nodes"], goodput["mtbf_hours_of_job"]) == (8, 100)
    assert goodput["times_s"]["step"] == step_s
    assert goodput["configured"]["interval"] == 500
    assert goodput["recommended"]["goodput"] > goodput["configured"]["goodput"] > 0.9
    assert "goodput" not in planned(capsys, *PLAN)  # control
    by_restart = planned(capsys, *PLAN, "--mtbf=800", "--restart=3600")["goodput"]
    assert by_restart["configured"]["shares"]["restarts"] == pytest.approx(0.01, rel=0.05)
    assert by_restart["sources"]["restart"] == "--restart"
    assert cli.run([*PLAN, "--mtbf=800"]) == 0
    text = capsys.readouterr().out
    assert "; a failure every 100 h (--mtbf: every 800 h per node; nodes: 8)" in text
    assert f"with --checkpoint.interval={goodput['recommended']['interval']};" in text
    assert "(assumed, as on one H200 and its disk)" in text


def test_copies_in_memory_take_the_place_of_saves(capsys: Capture) -> None:
    """A failure repeats half an interval of copies and the steps while a copy is written."""
    saves = planned(capsys, *PLAN, "--mtbf=80")["goodput"]
    copies = planned(capsys, *PLAN, "--mtbf=80", "--checkpoint.memory_interval=20")["goodput"]
    written = copies["times_s"]["write"] / copies["times_s"]["step"]
    assert copies["configured"]["repeated"] == pytest.approx(10 + written, rel=0.05)
    assert saves["configured"]["repeated"] > 200  # control
    assert copies["times_s"]["pauses"] == pytest.approx(
        saves["times_s"]["save"] / 500 / saves["times_s"]["step"]
    )
    often = planned(capsys, *PLAN, "--mtbf=80", "--checkpoint.memory_interval=-1")["goodput"]
    seconds = often["times_s"]["save"] + often["times_s"]["write"]
    assert often["configured"]["interval"] == math.ceil(4 * seconds / often["times_s"]["step"])
    assert cli.run([*PLAN, "--mtbf=80", "--checkpoint.memory_interval=20"]) == 0
    assert "with --checkpoint.memory_interval=" in capsys.readouterr().out


def test_a_plan_takes_the_times_of_a_run(capsys: Capture, run: ClockedRun) -> None:
    words = ["--mtbf=1", f"--measured-run={run.folder}"]
    measured = planned(capsys, "plan", "debug", "--training.steps=1000", *words)["goodput"]
    assert (measured["times_s"]["step"], measured["times_s"]["save"]) == (2.0, 1.5)
    other = planned(capsys, *PLAN, *words)
    assert other["goodput"]["times_s"]["step"] == other["time"]["step_s"]
    assert other["goodput"]["sources"]["start"] == "measured in measured"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mtbf=0"], "argument --mtbf: '0' is not a number of hours such as 6000 or 0.5"),
        (["--restart=5"], "command line, --restart: it needs --mtbf"),
        (["--measured-run=outputs"], "command line, --measured-run: it needs --mtbf"),
        (["--mtbf=5", "--restart=soon"], "'soon' is not a number of seconds such as 45"),
        (["--mtbf=5", "--measured-run=no/such"], "no/such"),
        (["--mtbf=5", "--no-checkpoint.enable"], "checkpoint.enable: no goodput can be predicted"),
    ],
)
def test_what_cannot_be_predicted_is_refused(capsys: Capture, words: list[str], message: str) -> None:
    assert cli.run([*PLAN, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_job_that_does_not_fit_has_no_goodput(capsys: Capture) -> None:
    words = ["plan", "llama3_8b", "--gpus=1xL4", "--mtbf=5"]
    assert planned(capsys, *words)["goodput"] is None
    assert cli.run(words) == 0
    assert "no goodput, because this layout does not fit" in capsys.readouterr().out
