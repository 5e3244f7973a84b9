"""Pins the thread of a sink: a writer that hangs or raises neither delays nor stops training, and without the
thread it would."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import make_job
from tests.support.runs import history
from tests.support.trackers import FakeClient, Server, run_info
from titanlite.config import json_file
from titanlite.config.component import ConfigError
from titanlite.metrics.meter import Metrics
from titanlite.metrics.sinks.base import RunInfo, Sink, Writer
from titanlite.report.trackers import background
from titanlite.report.trackers.background import Background
from titanlite.report.trackers.mlflow import MLflow
from titanlite.report.trackers.tracker import Client, Tracker
from titanlite.report.trackers.trackio import Trackio
from titanlite.report.trackers.wandb import WandB
from titanlite.train import train

HANG_S = 0.3  # without the thread, each call takes this long


@dataclass(frozen=True, kw_only=True)
class Slow(Sink):
    """A sink whose server answers nothing within `hang_s`."""

    hang_s: float
    is_direct: bool = False

    def build(self, run: RunInfo) -> Writer:
        hang_s = self.hang_s

        class Hanging(Writer):
            def write(self, step: int, values: Any) -> None:
                threading.Event().wait(hang_s)

        return Hanging() if self.is_direct else Background("slow", Hanging)


@pytest.fixture(autouse=True)
def _choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sink, "choices", dict(Sink.choices))


def training_s(tmp_path: Path, corpus: Path, sink: type[Sink], options: str = "") -> float:
    """Train three steps with a sink called "test". Returns the seconds from the first log line to the last
    step."""

    @dataclass(frozen=True, kw_only=True)
    class Test(sink, name="test"):  # type: ignore[misc, valid-type]
        """The sink of the test."""

    plain = make_job(tmp_path, corpus, "--training.steps=3", name="plain")
    train(plain)
    job = make_job(
        tmp_path, corpus, f"--metrics.sinks=[{{name = 'test'{options}}}]", "--training.steps=3", name="sink"
    )
    began = time.monotonic()
    assert train(job) == 0
    seconds = time.monotonic() - began
    assert history(job) == history(plain)
    return seconds


def test_a_server_that_hangs_does_not_stop_training(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    no_hang: None,
) -> None:
    monkeypatch.setattr(background, "CLOSE_S", 0.05)
    training_s(tmp_path, corpus, Slow, ", hang_s = 1e6")
    assert capfd.readouterr().err.count("metric sink slow has not finished in 0.05 s") == 1


@pytest.mark.full
def test_without_the_thread_it_would_be_delayed(tmp_path: Path, corpus: Path) -> None:
    assert training_s(tmp_path, corpus, Slow, f", hang_s = {HANG_S}, is_direct = true") >= 3 * HANG_S


class Fake(Tracker):
    """A tracker without a server."""

    server = Server()
    broken = True

    def client(self, run: RunInfo) -> Client:
        client = FakeClient(self.server)
        client.broken = self.broken
        return client


def test_a_tracker_that_raises_does_not_stop_training(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training_s(tmp_path, corpus, Fake)
    said = capfd.readouterr().err
    (line,) = (line for line in said.splitlines() if "failed, training continues" in line)
    push = f"; `titanlite metrics push {tmp_path / 'sink'}` sends the steps that are missing"
    assert line.endswith(f"ConnectionError: the server is gone{push}")
    assert f" times{push}" in said


def test_a_tracker_that_works_gets_every_step(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    monkeypatch.setattr(Fake, "server", server)
    monkeypatch.setattr(Fake, "broken", False)
    training_s(tmp_path, corpus, Fake)
    (run_id,) = server.runs
    assert json_file.read_object(tmp_path / "sink/run_id.json")["run_id"] == run_id
    assert server.steps(run_id) == [1, 2, 3]
    assert server.runs[run_id].config["training"]["steps"] == 3
    assert server.ended == [(run_id, True)]
    assert "metric sink" not in capfd.readouterr().err


# ---- the queue


class Kept(Writer):
    """Keeps its calls; waits for `gate` in each."""

    def __init__(self) -> None:
        self.gate, self.calls = threading.Event(), list[Any]()
        self.gate.set()

    def write(self, step: int, values: Any) -> None:
        self.gate.wait()
        self.calls.append(step)

    def event(self, step: int, event: str, about: Any) -> None:
        self.calls.append(event)

    def close(self) -> None:
        self.calls.append("close")


def test_a_full_queue_drops_and_counts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "MAX_WAITING", 3)
    kept, entered = Kept(), threading.Event()
    kept.gate.clear()

    def opened() -> Writer:
        entered.set()
        return kept

    sink = Background("kept", opened, "; advice")
    for step in range(1, 10):
        sink.write(step, {})
    entered.wait()
    kept.gate.set()
    sink.close()
    assert kept.calls[-1] == "close"
    assert kept.calls[:-1] == sorted(kept.calls[:-1])
    assert 3 <= len(kept.calls[:-1]) <= 4  # the thread may have taken one call
    dropped = 9 - len(kept.calls[:-1])
    assert f"metric sink kept: {dropped} calls were dropped, because 3 were waiting; advice" in caplog.text
    assert caplog.text.count("is too slow, training continues") == 1


def test_a_writer_that_cannot_be_opened_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "RETRY_S", 0.0)
    kept, errors, is_open = Kept(), [OSError("gone")] * 3, threading.Event()

    def opened() -> Writer:
        if errors:
            raise errors.pop()
        is_open.set()
        return kept

    sink = Background("kept", opened)
    sink.event(0, "resumed", {})
    sink.write(1, {})
    is_open.wait()
    sink.close()
    assert kept.calls == ["resumed", 1, "close"]
    assert caplog.text.count("metric sink kept failed, training continues: ") == 1
    assert "metric sink kept failed 3 times" in caplog.text


def test_the_last_attempt_to_open_is_made_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    kept, tried = Kept(), threading.Event()

    def opened() -> Writer:
        if not tried.is_set():
            tried.set()
            raise OSError("gone")
        return kept

    sink = Background("kept", opened)
    sink.write(1, {})
    tried.wait()
    sink.close()  # wakes the thread, which would wait for RETRY_S
    assert kept.calls == [1, "close"]


def test_a_run_that_logs_nothing_opens_nothing() -> None:
    opened = list[Writer]()

    def open_writer() -> Writer:
        opened.append(Kept())
        return opened[-1]

    Background("kept", open_writer).close()
    assert not opened
    sink = Background("kept", open_writer)
    sink.event(3, "resumed", {})
    assert not opened  # the loader forks its workers after this event
    sink.close()
    assert len(opened) == 1


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sink in (WandB(), MLflow(), Trackio()):
        monkeypatch.setitem(sys.modules, sink.name, None)
        with pytest.raises(ConfigError) as e:
            Metrics(sinks=[sink]).open_sinks(run_info(tmp_path))
        assert f"pip install 'titanlite[{sink.name}]'" in str(e.value)
        assert "\n" not in str(e.value)
