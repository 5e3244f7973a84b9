"""What a run sets in its process, and leaves as it was."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.jobs import make_job
from titanlite.metrics.meter import Meter
from titanlite.train import train


def test_garbage_is_collected_when_it_is_due(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str | int] = []
    report = Meter.report
    monkeypatch.setattr(gc, "collect", lambda: done.append("by itself" if gc.isenabled() else "due"))
    monkeypatch.setattr(
        Meter, "report", lambda self, step, values: (done.append(step), report(self, step, values))
    )
    train(make_job(tmp_path, corpus, "--training.gc_freq=3", "--training.steps=7"))
    assert done == ["due", 1, 2, "due", 3, 4, 5, "due", 6, 7]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_may_be_left_to_python(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted() -> None:
        raise AssertionError

    monkeypatch.setattr(gc, "collect", unwanted)
    train(make_job(tmp_path, corpus, "--training.gc_freq=0", "--training.steps=2"))
