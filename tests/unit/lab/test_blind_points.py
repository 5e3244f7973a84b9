"""Runs that were predicted before they were measured: benchmarks/blind_points.py."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import blind_points
from benchmarks.blind_points import Measurement, Point, Run, compared, summary
from benchmarks.plan_errors import PEAK, STEP

PREDICTED = json.loads(blind_points.PREDICTIONS.read_text())["points"]


def test_all_points_were_predicted() -> None:
    points = blind_points.points()
    assert [{key: row[key] for key in vars(points[0])} for row in PREDICTED] == [vars(p) for p in points]
    assert len({point.name for point in points}) == len(points)
    verdicts = Counter((row["gpus"], row["fits"]) for row in PREDICTED)
    assert verdicts[1, "fits"] >= 14
    assert verdicts[1, "close"] + verdicts[1, "does not fit"] >= 3
    assert {gpus for gpus, _ in verdicts} == {1, 2, 4}


def test_points_share_a_gpu_as_long_as_their_predicted_peaks_fit(tmp_path: Path) -> None:
    options = argparse.Namespace(at_once=3, debug=False)
    measurement = Measurement(options, tmp_path)
    small, timed = Point(name="small"), Point(name="timed", timed=True)
    assert measurement._must_be_alone(timed, 1.0)
    assert measurement._must_be_alone(small, 100.0)
    assert not measurement._must_be_alone(small, 40.0)

    def running(gib: float, alone: bool = False) -> Run:
        process = subprocess.Popen(["true"])
        process.wait()
        return Run(small, gib, alone, tmp_path, process, 0.0)

    assert measurement._has_room(200.0, alone=True)  # nothing runs
    measurement.running = [running(60.0)]
    assert measurement._has_room(60.0, alone=False)
    assert not measurement._has_room(70.0, alone=False)
    assert not measurement._has_room(1.0, alone=True)
    measurement.running = [running(1.0), running(1.0), running(1.0)]
    assert not measurement._has_room(1.0, alone=False)
    measurement.running = [running(1.0, alone=True)]
    assert not measurement._has_room(1.0, alone=False)


REPORTS = [{"step": n, PEAK: 10.0 + min(n, 2), STEP: 9.0 if n < 3 else 1.0 + n / 10} for n in (1, 2, 3, 4, 5)]


def test_the_peak_is_of_all_reports_and_the_step_time_of_the_last_ones_alone() -> None:
    assert blind_points.measured(REPORTS, timed=True) == {"peak_allocated_gib": 12.0, "step_s": 1.4}
    assert blind_points.measured(REPORTS, timed=False) == {"peak_allocated_gib": 12.0}
    assert blind_points.measured([{"step": 1}], timed=True) == {}


def predicted(fits: str, gib: float) -> dict[str, Any]:
    times = {"planned_s": 1.0, "guess": False}
    return {"name": "a", "gpus": 1, "planned_gib": gib, "fits": fits, "peak_at": "loss", **times}


def test_a_row_has_the_errors_of_the_last_run() -> None:
    peaks = {"peak_allocated_gib": 10.0, "peak_reserved_gib": 11.0}
    reports = [{"step": 2, PEAK: 9.0}, {"step": 3, PEAK: 10.0, blind_points.DETAIL: 0.5}]
    ran = {"name": "a", "exit_code": 0, "step_s": 0.8, "reports": reports, **peaks}
    ended = {"name": "a", "exit_code": 1, "out_of_memory": "out of memory in the loss"}
    row = compared(predicted("fits", 11.0), [ended, ran, ran | {"name": "b"}])
    assert row is not None
    assert (row["error"], row["time_error"], row["ran_out"]) == (
        pytest.approx(0.1),
        pytest.approx(0.25),
        False,
    )
    assert (row["ordinary_gib"], row["ordinary_error"]) == (9.0, pytest.approx(11 / 9 - 1, abs=1e-4))
    failed = compared(predicted("fits", 11.0), [ran, ended])
    assert failed is not None
    assert failed["ran_out"]
    assert "error" not in failed
    too_large = compared(predicted("does not fit", 200.0), [ran])
    assert too_large is not None
    assert compared(predicted("fits", 1.0), [{"name": "a", "skipped": "the time limit"}]) is None
    counts = summary([row, failed, too_large])
    assert (counts["points"], counts["ran"], counts["ran_out"]) == (3, 2, 1)
    assert (counts["within_5_percent"], counts["ran_out_though_it_fits"]) == (0, 1)
    assert counts["ran_though_it_does_not_fit"] == 1


def test_the_committed_errors_are_those_of_the_recorded_runs() -> None:
    """Of the predictions; of the present plan, for the rows that it was mended after, and one other."""
    committed = json.loads(blind_points.ERRORS.read_text())
    rows = {row["name"]: row for row in committed["rows"]}
    assert committed["summary"] == summary(committed["rows"])
    records = blind_points.RESULTS.glob("blind_points_h200*.json")
    runs = [run for record in records for run in json.loads(record.read_text())["runs"]]
    measured_rows = [row for prediction in PREDICTED if (row := compared(prediction, runs))]
    assert [row["name"] for row in measured_rows] == list(rows)
    for row in measured_rows:
        assert row.items() <= rows[row["name"]].items()
    mended = {name for name, row in rows.items() if "now_gib" in row}
    assert len(mended) == 3
    points = {point.name: point for point in blind_points.points()}
    for name in mended:
        assert blind_points.plan(points[name])["planned_gib"] == rows[name]["now_gib"]
        assert abs(rows[name]["now_error"]) < 0.005
    same = "Qwen2.5 3B of 8 blocks, EMA, mlp"
    assert blind_points.plan(points[same])["planned_gib"] == rows[same]["planned_gib"]
    assert committed["summary"]["ran_out_though_it_fits"] == 0
