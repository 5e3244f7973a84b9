"""Pins the contract of sinks: what a run opens, what naming one twice says, what a sink is told of its run,
and that a sink which raises harms neither the run nor the other sinks."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from tests.support.jobs import make_job
from tests.support.non_finite import bad_steps
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.metrics.meter import Metrics
from titanlite.metrics.sinks.base import ALL_DONE, RunInfo, Sink, Sinks, Writer
from titanlite.train import train

LOSS = {"train/loss": 2.0}


class Kept(Writer):
    """Keeps all that it is sent; raises `error` each time, if it has one."""

    def __init__(self, run: RunInfo | None = None, error: Exception | None = None):
        self.run, self.error = run, error
        self.calls: list[tuple[Any, ...]] = []

    def _take(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def write(self, step: int, values: Any) -> None:
        self._take("write", step)

    def sample(self, step: int, text: str) -> None:
        self._take("sample", step, text)

    def event(self, step: int, event: str, about: Any) -> None:
        self._take(event, step, *([dict(about)] if about else []))

    def close(self) -> None:
        self._take("close")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    """What sinks of the name "kept" have opened. `error`: what all calls raise; "at once": build does."""
    writers: list[Kept] = []
    monkeypatch.setattr(Sink, "choices", dict(Sink.choices))

    @dataclass(frozen=True, kw_only=True)
    class Keep(Sink, name="kept"):
        """Keeps all."""

        error: str = ""
        """Text of the error that each call raises."""

        def build(self, run: RunInfo) -> Writer:
            if self.error == "at once":
                raise RuntimeError(self.error)
            writers.append(Kept(run, RuntimeError(self.error) if self.error else None))
            return writers[-1]

    return writers


KEEP = "--metrics.sinks=[{name = 'kept'}]"


def info(folder: Path) -> RunInfo:
    return RunInfo(folder=folder, run_id="0" * 32, job={}, resumed_step=0, total_steps=10)


@pytest.mark.parametrize("tensorboard", [True, False])
def test_what_a_run_opens(tmp_path: Path, tensorboard: bool) -> None:
    metrics = Metrics() if tensorboard else Metrics(sinks=[])
    sinks = metrics.open_sinks(info(tmp_path))
    always = ["console", "metrics.jsonl", "tables", "events.jsonl", "samples.txt"]
    assert [*sinks.writers] == always + ["tensorboard"] * tensorboard
    sinks.write(1, LOSS)
    sinks.sample(1, "once")
    sinks.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/loss": 2.0}\n'
    assert (tmp_path / "samples.txt").read_text() == "--- step 1\nonce\n"
    assert (tmp_path / "tb").exists() == tensorboard


def test_naming_a_sink_twice_is_an_error(tmp_path: Path, corpus: Path) -> None:
    twice = "--metrics.sinks=[{name = 'tensorboard'}, {name = 'tensorboard'}]"
    with pytest.raises(ConfigError, match=r"sinks\.1\.name: 'tensorboard' is named twice"):
        make_job(tmp_path, corpus, twice)


SYNCHRONOUS = "--checkpoint.async_mode=disabled"


def run_to(folder: Path, corpus: Path, steps: int, *overrides: str) -> Job:
    job = make_job(folder, corpus, KEEP, f"--training.steps={steps}", *overrides)
    assert train(job) == 0
    return job


@pytest.mark.full
def test_a_sink_is_told_of_its_run_and_of_what_happens(
    tmp_path: Path, corpus: Path, opened: list[Kept]
) -> None:
    sampled = ["--generation.prompts=['a']", "--generation.freq=0", "--generation.max_new_tokens=1"]
    job = run_to(tmp_path, corpus, 3, "--checkpoint.interval=2", SYNCHRONOUS, *sampled)
    with bad_steps({4}):
        again = run_to(tmp_path, corpus, 5, SYNCHRONOUS)
    first, second = opened
    assert first.run is not None
    assert second.run is not None
    assert (first.run.folder, first.run.resumed_step, first.run.total_steps) == (job.folder, 0, 3)
    assert (second.run.resumed_step, second.run.total_steps) == (3, 5)
    assert first.run.run_id == second.run.run_id != ""
    assert second.run.job == toml.as_tree(again)
    json.dumps(second.run.job)
    text = next(call[2] for call in first.calls if call[0] == "sample")
    assert first.calls == [
        ("write", 1), ("write", 2), ("saved", 2), ("sample", 3, text), ("write", 3), ("saved", 3),
        ("ended", 3, {"reason": ALL_DONE}), ("close",),
    ]  # fmt: skip
    assert second.calls == [
        ("resumed", 3, {"changed": "training.steps 3 -> 5"}),
        ("write", 4), ("skipped", 4, ANY), ("write", 5), ("saved", 5),
        ("ended", 5, {"reason": ALL_DONE}), ("close",),
    ]  # fmt: skip


def test_a_run_that_begins_again_has_a_new_id(tmp_path: Path, corpus: Path, opened: list[Kept]) -> None:
    for _ in range(2):
        run_to(tmp_path, corpus, 1, "--checkpoint.enable=false")
    ids = [kept.run.run_id for kept in opened if kept.run]
    assert len(set(ids)) == 2


@pytest.mark.full
@pytest.mark.parametrize("damage", ["", "x", "\xff", "link", "folder"])
def test_an_id_that_cannot_be_read_is_made_again(
    tmp_path: Path, corpus: Path, opened: list[Kept], damage: str
) -> None:
    file = run_to(tmp_path, corpus, 1).folder / "run_id.json"
    file.unlink()
    if damage == "link":
        os.symlink(tmp_path / "elsewhere", file)
    elif damage != "folder":
        file.write_text(damage, encoding="latin-1")
    run_to(tmp_path, corpus, 2)
    assert opened[1].run is not None
    assert json.loads(file.read_text())["run_id"] == opened[1].run.run_id
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("error", ["each time", "at once"])
def test_a_sink_that_raises_does_not_end_the_run(
    tmp_path: Path, corpus: Path, opened: list[Kept], capfd: pytest.CaptureFixture[str], error: str
) -> None:
    job = make_job(
        tmp_path, corpus, f"--metrics.sinks=[{{name = 'kept', error = '{error}'}}]", "--training.steps=3"
    )
    assert train(job) == 0
    assert len((job.folder / "metrics.jsonl").read_text().splitlines()) == 3
    said = capfd.readouterr().err
    if error == "at once":
        assert said.count(f"kept cannot be opened, training continues: {__file__}:") == 1
    else:
        (line,) = (line for line in said.splitlines() if "metric sink kept failed, " in line)
        assert f"failed, training continues: {__file__}:" in line
        assert line.endswith(": RuntimeError: each time")
        assert said.count("metric sink kept failed 6 times") == 1
        assert opened[0].calls[-1] == ("close",)


def test_the_other_sinks_get_what_one_refuses() -> None:
    before, bad, after = Kept(), Kept(error=OSError()), Kept()
    sinks = Sinks({"before": before, "bad": bad, "after": after})
    sinks.write(1, LOSS)
    sinks.sample(1, "once")
    sinks.event(1, "saved")
    sinks.event(2, "spike", {"loss": 9.0})
    sinks.close()
    assert before.calls == after.calls == bad.calls
    assert ("spike", 2, {"loss": 9.0}) in after.calls


def test_a_package_that_is_missing_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sink, "choices", dict(Sink.choices))

    @dataclass(frozen=True, kw_only=True)
    class Absent(Sink, name="absent"):
        """Needs what there is not."""

        def build(self, run: RunInfo) -> Writer:
            import no_such_package  # noqa: F401

            return Writer()

    with pytest.raises(ConfigError, match="absent needs a package that is not installed: No module named"):
        Metrics(sinks=[Absent()]).open_sinks(info(tmp_path))
