"""Experiment trackers for tests: a client that remembers what it is sent, and the real libraries."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from titanlite.metrics.sinks.base import RunInfo
from titanlite.report.trackers.tracker import Client, Delivery, TrackerRun

RUN_ID = "0123456789abcdef" * 2


def real(name: str) -> Any:
    """A tracker's library. Without it the test is skipped; CI installs the extra `trackers`."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[trackers]'")


@dataclass
class Server:
    """What the runs of a tracker have: lists of (step, numbers) and of (step, index, text)."""

    metrics: dict[str, list[tuple[int, dict[str, float]]]] = field(default_factory=dict)
    samples: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    runs: dict[str, TrackerRun] = field(default_factory=dict)
    ended: list[tuple[str, bool]] = field(default_factory=list)

    def steps(self, run_id: str = RUN_ID) -> list[int]:
        """The steps of a run's metrics."""
        return [step for step, numbers in self.metrics[run_id] if "train/loss" in numbers]


class FakeClient(Client):
    """Sends to a Server. While `broken` is set, log raises. `hang`: calls of log wait for it."""

    def __init__(self, server: Server, target: str = "fake"):
        self.server, self.target = server, target
        self.broken = False
        self.hang: threading.Event | None = None
        self.id = ""

    def begin(self, run: TrackerRun) -> str:
        self.id = run.id
        self.server.runs[run.id] = run
        self.server.metrics.setdefault(run.id, [])
        self.server.samples.setdefault(run.id, [])
        return self.target

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.hang is not None:
            self.hang.wait()
        if self.broken:
            raise ConnectionError("the server is gone")
        self.server.metrics[self.id].append((step, dict(numbers)))

    def sample(self, step: int, index: int, text: str) -> None:
        self.server.samples[self.id].append((step, index, text))

    def end(self, is_complete: bool) -> None:
        self.server.ended.append((self.id, is_complete))


def run_info(folder: Path, resumed_step: int = 0, **checkpoint: Any) -> RunInfo:
    """The identity of a run of ten steps in a folder, resumed after a step."""
    job = {"training": {"steps": 10}, "checkpoint": checkpoint, "metrics": {"sinks": [{"name": "secret"}]}}
    return RunInfo(folder=folder, run_id=RUN_ID, job=job, resumed_step=resumed_step, total_steps=10)


def deliver(folder: Path, client: Client, resumed_step: int = 0, **checkpoint: Any) -> Delivery:
    """Open a run of ten steps in a tracker."""
    return Delivery(client, run_info(folder, resumed_step, **checkpoint), "", folder / "trackers/fake.jsonl")


def values(step: int, data: str = "a", lr: float = 0.1, loss: float = 10.0) -> dict[str, Any]:
    """The metrics of a step that was trained on `data`, with a loss that falls from `loss`."""
    return {"train/loss": loss - step, "data/batch_sha": f"{data}{step}", "train/learning_rate": lr}
