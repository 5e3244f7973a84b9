"""Pins events.jsonl: a history of which no start and no rewind removes a line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.jobs import make_job
from tests.support.non_finite import bad_steps
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.metrics.sinks.events import EventLog
from titanlite.train import train


def events_in(folder: Path) -> list[dict[str, Any]]:
    """The events of a file, without their times, which must be of now and in UTC."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in events:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(event.pop("time"))
        assert timedelta(0) <= age < timedelta(hours=1)
    return events


def test_no_start_and_no_rewind_removes_an_event(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 0)
    log.event(7, "skipped", {"loss": math.nan, "first_sequence": 48, "reason": "not finite"})
    log.event(4, "rewound", {})
    log.close()
    log = EventLog(tmp_path / "events.jsonl", 2)
    log.event(2, "resumed", {})
    log.close()
    assert events_in(tmp_path) == [
        {"step": 0, "event": "started"},
        {"step": 7, "event": "skipped", "loss": "nan", "first_sequence": 48, "reason": "not finite"},
        {"step": 4, "event": "rewound"},
        {"step": 2, "event": "resumed"},
    ]


def test_a_line_that_a_kill_has_cut_short_damages_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    EventLog(path, 0).close()
    lines = path.read_bytes().splitlines()
    assert lines[:2] == [b'{"step": 1}', b'{"ste']
    assert json.loads(lines[2])["event"] == "started"


def test_a_run_records_its_events_and_sources(tmp_path: Path, corpus: Path) -> None:
    synchronous = "--checkpoint.async_mode=disabled"
    job = make_job(tmp_path, corpus, "--training.steps=2", synchronous)
    assert train(job) == 0
    with bad_steps({3}):
        assert train(make_job(tmp_path, corpus, "--training.steps=4", synchronous)) == 0
    events = [(event["event"], event["step"]) for event in events_in(job.folder)]
    assert events == [
        ("started", 0), ("saved", 2), ("ended", 2),
        ("resumed", 2), ("skipped", 3), ("saved", 4), ("ended", 4),
    ]  # fmt: skip
    sources = json.loads((job.folder / "sources.json").read_text())["sources"]
    assert {source["sequences"]: source["share"] for source in sources} == {13: 0.25, 294: 0.75}
    assert all(str(corpus) in source["source"] for source in sources)
    metrics = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    per_step = metrics[0]["progress/sequences"]
    assert [m["progress/sequences"] for m in metrics] == [per_step * m["step"] for m in metrics]


def test_the_end_of_a_process_has_its_reason(tmp_path: Path, corpus: Path) -> None:
    steps = ("--training.steps=2", "--checkpoint.interval=1")
    job = make_job(tmp_path, corpus, *steps)
    with failing_save(), pytest.raises(RuntimeError):
        train(job)
    assert train(job) == 0
    ends = [(event["step"], event["reason"]) for event in events_in(job.folder) if event["event"] == "ended"]
    assert ends == [(1, "RuntimeError: no save"), (2, "all steps are done")]


@contextmanager
def failing_save() -> Iterator[None]:
    """Every save raises an error of two lines."""
    with pytest.MonkeyPatch.context() as patch:
        error = RuntimeError("no save\nsecond line")
        patch.setattr(Checkpointer, "save", Mock(side_effect=error))
        yield


def test_the_first_step_after_a_restart_tells_how_long_it_took(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TITANLITE_RESTART_BEGAN", str(time.monotonic() - 100))
    job = make_job(tmp_path, corpus, "--training.steps=2", "--checkpoint.enable=false")
    assert train(job) == 0
    (event,) = [event for event in events_in(job.folder) if event["event"] == "recovered"]
    assert event["step"] == 1
    assert 100 < event["seconds"] < 200
    line = f"step 1 is done, {event['seconds']:.1f} s after a rank failed or the nodes changed\n"
    assert line in capsys.readouterr().err
