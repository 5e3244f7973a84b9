"""Where the time of a run went: of runs that were killed, stopped and rewound, on a clock of the test's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.clocked_runs import ClockedRun
from tests.support.jobs import ROOT
from titanlite.metrics.sinks.base import ALL_DONE, STOPPED
from titanlite.report.facts import facts
from titanlite.report.page import report
from titanlite.report.recorded_run import read_run
from titanlite.report.timeline import PAUSES, Timeline, timeline

STALL = "checkpoint/stall_s"
UNKNOWN = (
    "The time between processes, and after their last records, is not known: metrics.jsonl and events.jsonl "
    "have no times, or times that go back."
)


def test_every_pause_that_a_run_measures_is_lost_time() -> None:
    files = ["titanlite/run.py", *(ROOT / "titanlite/metrics").glob("*.py")]
    code = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    assert set(re.findall(r'untimed(?:\(|, )"([\w/]+)"', code)) == set(PAUSES.values())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClockedRun:
    return ClockedRun(tmp_path / "run", monkeypatch)


def times(run: ClockedRun) -> Timeline:
    return timeline(read_run(run.folder, "run"))


def killed_and_stopped(run: ClockedRun) -> None:
    """A run of 40 steps of 2 s: killed after step 34, resumed from step 25, stopped after step 30, and
    resumed from there."""
    run.start(0, 28.0)
    run.steps(25)
    run.pause(STALL, 1.0)
    run.steps(34)
    run.wait(20.0)
    run.start(25, 18.0)
    run.steps(30)
    run.end(3.0, STOPPED)
    run.wait(5.0)
    run.start(30, 18.0, {"time/validation_s": 0.5})
    run.steps(40)
    run.end(4.0, ALL_DONE)


def test_the_time_of_a_run_that_was_killed_and_stopped(run: ClockedRun) -> None:
    killed_and_stopped(run)
    spent = times(run)
    assert spent.seconds == pytest.approx(
        {
            "training": 40 * 2,
            "start": 28,
            # From record 30: four steps without a record, 20 s, set-up. Then from the event `ended`.
            "restarts": (4 * 2 + 20 + 18) + (5 + 18),
            "validation": 0.5,
            "saves": 1,
            "steps trained again": 5 * 2,  # 26 to 30, of the record of steps 21 to 30
            "ends": 3 + 4,
        }
    )
    assert spent.total_s == pytest.approx(run.now)
    assert spent.goodput == pytest.approx(80 / run.now)
    assert [restart.seconds for restart in spent.restarts] == pytest.approx([46, 23])
    assert [(restart.set_up_s, restart.has_failed) for restart in spent.restarts] == [(18, True), (18, False)]
    (note,) = spent.notes
    assert note.startswith(
        "Of 2 restarts, 1 followed a process that was killed or failed: its time after its"
    )
    line = facts(read_run(run.folder, "run"))["goodput"]
    assert line == f"{80 / run.now:.1%}: 80.0 s of 3.3 min in steps that count; 2 restarts"
    page = report([read_run(run.folder, "run")])
    assert f"<p>goodput {line}</p>" in page
    assert "followed a process that was killed or failed" in page


def test_hours_of_machines_have_no_time_between_processes(run: ClockedRun) -> None:
    killed_and_stopped(run)
    lost_or_idle = (4 * 2 + 20) + 5 + (3 + 4)  # steps without a record, waits, ends
    assert 3600 * times(run).hours[-1] == pytest.approx(run.now - lost_or_idle)


def test_without_a_clock_the_table_says_what_it_lacks(run: ClockedRun) -> None:
    killed_and_stopped(run)
    for name in ("metrics.jsonl", "metrics.superseded.jsonl"):
        path = run.folder / name
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**r, "time/utc": "yesterday"}) + "\n" for r in records))
    spent = times(run)
    assert spent.notes == [UNKNOWN]
    assert spent.total_s < run.now - 40
    assert spent.seconds["restarts"] == pytest.approx(18 + 18)


def test_a_clock_that_goes_back_is_not_used(run: ClockedRun) -> None:
    run.start(0, 28.0)
    run.steps(40)
    run.now -= 300.0  # the next machine has another clock
    run.start(30, 18.0)
    run.steps(40)
    assert times(run).notes == [UNKNOWN]
    assert times(run).seconds["restarts"] == pytest.approx(18)


def test_the_time_until_an_error_counts_as_restart(run: ClockedRun) -> None:
    run.start(0, 28.0)
    run.steps(20)
    run.end(60.0, "TimeoutError: rank 1 does not answer")
    run.wait(5.0)
    run.start(15, 18.0)
    run.steps(20)
    run.end(0.0, ALL_DONE)
    spent = times(run)
    assert spent.seconds["restarts"] == pytest.approx(60 + 5 + 18)
    assert "ends" not in spent.seconds
    assert [restart.has_failed for restart in spent.restarts] == [True]


def test_steps_that_count_without_a_record_are_training(run: ClockedRun) -> None:
    run.log_freq = 100
    run.start(0, 10.0)
    run.steps(60)
    run.wait(7.0)
    run.start(50, 10.0)
    run.steps(100)
    spent = times(run)
    assert spent.seconds == pytest.approx({"training": 200, "start": 10, "restarts": 10 * 2 + 7 + 10})
    assert spent.total_s == pytest.approx(run.now)
    assert any("no record, 49," in note for note in spent.notes)
    assert any("has not ended, or has failed" in note for note in spent.notes)


@pytest.mark.parametrize("back_to", [16, 22], ids=["before a record", "within a window"])
def test_the_steps_that_a_rewind_undoes_are_trained_again(run: ClockedRun, back_to: int) -> None:
    run.start(0, 10.0)
    run.steps(25)
    run.rewind(back_to, 3.0)
    run.steps(40)
    run.end(0.0, ALL_DONE)
    spent = times(run)
    expected = {"training": 80, "start": 10, "rewinds": 3, "steps trained again": 2 * (25 - back_to)}
    assert spent.seconds == pytest.approx(expected)
    assert spent.total_s == pytest.approx(run.now)
    assert spent.notes == []


def test_a_second_kill_before_the_checkpoint_of_the_first_resume(run: ClockedRun) -> None:
    run.log_freq = 1
    run.start(0, 10.0)
    run.steps(20)
    run.wait(1.0)
    run.start(15, 10.0)
    run.steps(18)
    run.wait(1.0)
    run.start(12, 10.0)
    run.steps(30)
    spent = times(run)
    assert spent.seconds == pytest.approx(
        {"training": 60, "start": 10, "restarts": 22, "steps trained again": 2 * (20 - 15 + 18 - 12)}
    )
    assert spent.total_s == pytest.approx(run.now)


def test_the_time_before_a_new_start_and_after_all_steps_does_not_count(run: ClockedRun) -> None:
    run.start(0, 10.0)
    run.steps(5)
    run.wait(1000.0)
    began = run.now
    run.start(0, 10.0)
    run.steps(10)
    run.end(1.0, ALL_DONE)
    run.wait(500.0)
    run.start(10, 10.0)
    run.steps(20)
    run.end(1.0, ALL_DONE)
    spent = times(run)
    assert spent.total_s == pytest.approx(run.now - began - 500)
    assert spent.seconds["start"] == pytest.approx(10 + 10)
    assert spent.restarts == []
    assert spent.notes == [
        "Earlier starts at step 1 in this folder, 1, are not counted.",
        "The time between the end of all steps and a later start with more is not counted.",
    ]


def test_time_that_no_record_explains_is_named(run: ClockedRun) -> None:
    run.start(0, 10.0)
    run.steps(15)
    run.wait(60.0)  # as of a machine that was suspended
    run.steps(20)
    run.end(0.0, ALL_DONE)
    assert times(run).seconds["other"] == pytest.approx(60)
