"""What a run sets in its process, and leaves as it was."""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.jobs import make_job
from titanlite.metrics.meter import Meter
from titanlite.runtime import process, signals
from titanlite.runtime.environment import NOTES
from titanlite.runtime.process import reporting_to_launcher
from titanlite.runtime.runtime import Runtime
from titanlite.runtime.signals import Stopped
from titanlite.train import train


def test_garbage_is_collected_when_it_is_due(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str | int] = []
    frozen: list[int] = []
    report = Meter.report

    def collect() -> None:
        done.append("by itself" if gc.isenabled() else "due")
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(
        Meter, "report", lambda self, step, values: (done.append(step), report(self, step, values))
    )
    imported = len(gc.get_objects())
    train(make_job(tmp_path, corpus, "--training.gc_freq=3", "--training.steps=7"))
    assert done == ["due", 1, 2, "due", 3, 4, 5, "due", 6, 7]
    assert frozen[0] > 0.9 * imported, "the first collection looks through all that was imported"
    assert frozen[-1] > frozen[0], "the later ones look through what the first step left"
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


class Model:
    """What an earlier run in this process left: it holds itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.full
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_what_an_earlier_run_left_gives_its_gpu_memory_back(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    gc.collect()
    gc.disable()
    try:
        left = weakref.ref(Model())
        train(make_job(tmp_path, corpus, "--training.steps=1"))
        assert (left() is None) == cuda, "on the CPU, a collection would take 0.3 s for little memory"
    finally:
        gc.enable()


def test_garbage_may_be_left_to_python(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted() -> None:
        raise AssertionError

    monkeypatch.setattr(gc, "collect", unwanted)
    train(make_job(tmp_path, corpus, "--training.gc_freq=0", "--training.steps=2"))


# ---- what the launcher is told


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The note of rank 0, as the launcher makes it."""
    monkeypatch.setenv(NOTES, str(tmp_path))
    (tmp_path / "rank-0").touch()
    return tmp_path / "rank-0"


def test_a_rank_that_is_done_takes_its_note_away(note: Path, corpus: Path) -> None:
    train(make_job(note.parent, corpus, "--training.steps=1", "--checkpoint.enable=false"))
    assert not note.exists()


def test_an_error_is_left_for_the_launcher(note: Path) -> None:
    with pytest.raises(ValueError, match="bad"), reporting_to_launcher(0):
        raise ValueError("bad \ud800")
    assert note.read_text() == "ValueError: bad \\ud800"


def test_a_component_that_leaves_is_noted(note: Path) -> None:
    with pytest.raises(SystemExit), reporting_to_launcher(0):
        sys.exit(0)
    assert note.read_text() == "SystemExit: 0"


def test_a_stop_is_no_error(note: Path) -> None:
    with pytest.raises(Stopped), reporting_to_launcher(0):
        raise Stopped
    assert note.read_text() == ""


def test_a_rank_that_fails_says_so_before_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path))
    Runtime.note_error(SimpleNamespace(rank=3, world_size=1), ValueError("gone"))  # type: ignore[arg-type]
    assert (tmp_path / "rank-3").read_text() == "ValueError: gone"


@pytest.mark.parametrize(("told", "waits"), [([], [2]), ([signal.SIGTERM], [])])
def test_a_rank_that_failed_waits_until_the_launcher_tells_it_to_end(
    monkeypatch: pytest.MonkeyPatch, told: list[int], waits: list[int]
) -> None:
    """It has probably lost another rank; the launcher sees that rank's end in the meantime."""
    slept: list[float] = []
    monkeypatch.setattr(process.time, "sleep", slept.append)
    monkeypatch.setattr(process.os, "_exit", sys.exit)
    monkeypatch.setattr(signals, "_told_to_end", told)
    monkeypatch.setattr(process, "world_size", lambda: 2)
    with pytest.raises(SystemExit):
        process.leave(1)
    assert slept == waits
