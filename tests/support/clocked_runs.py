"""Run folders with the records of processes that were killed, stopped and resumed, on a clock of the test's.

The real sinks write the files, so that they cut and move records as in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from titanlite.metrics.sinks import events
from titanlite.metrics.sinks.events import EventLog
from titanlite.metrics.sinks.jsonl import JsonLines

BEGAN = datetime(2026, 11, 28, 7, tzinfo=timezone.utc)


@dataclass
class ClockedRun:
    """A run whose steps take `step_s` seconds and are logged every `log_freq` steps."""

    folder: Path
    patch: pytest.MonkeyPatch
    step_s: float = 2.0
    log_freq: int = 10
    now: float = 0.0
    _step: int = 0
    _pauses: dict[str, float] = field(default_factory=dict)
    _files: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.patch.setattr(events, "utc_now", self.utc)

    def utc(self) -> str:
        return (BEGAN + timedelta(seconds=self.now)).isoformat(timespec="milliseconds")

    def start(self, step: int, set_up_s: float, values: Mapping[str, float] = {}) -> None:
        """Start a process that resumes after `step`, and take its first step. `values`: its pauses."""
        self.now += set_up_s
        metrics, log = (
            JsonLines(self.folder / "metrics.jsonl", step),
            EventLog(self.folder / "events.jsonl", step),
        )
        self._files, self._step, self._pauses = [metrics, log], step, dict(values)
        if step:
            log.event(step, "resumed", {})
        self._take()
        self.now += sum(values.values())
        self._report({"time/to_first_step_s": set_up_s + self.step_s + sum(values.values())})

    def steps(self, until: int) -> None:
        """Take steps."""
        while self._step < until:
            self._take()
            if self._step % self.log_freq == 0:
                self._report({})

    def pause(self, key: str, seconds: float) -> None:
        """Spend time in a pause."""
        self.now += seconds
        self._pauses[key] = self._pauses.get(key, 0.0) + seconds

    def event(self, step: int, event: Any, about: Mapping[str, Any] = {}) -> None:
        """Write an event."""
        for file in self._files:
            file.event(step, event, about)

    def rewind(self, step: int, seconds: float) -> None:
        """Go back to a step."""
        self.pause("time/rewind_s", seconds)
        self.event(step, "rewound", {"from_step": self._step})
        self._step = step

    def end(self, seconds: float, reason: str) -> None:
        """End the process, after a last save."""
        self.now += seconds
        self.event(self._step, "ended", {"reason": reason})

    def wait(self, seconds: float) -> None:
        """Let time pass without a process."""
        self.now += seconds

    def _take(self) -> None:
        self._step += 1
        self.now += self.step_s

    def _report(self, values: dict[str, float]) -> None:
        self._files[0].write(
            self._step,
            {
                "progress/total_tokens": 100 * self._step,
                "time/step_s": self.step_s,
                "time/data_wait_pct": 0.0,
                "time/utc": self.utc(),
                **self._pauses,
                **values,
            },
        )
        self._pauses = {}
