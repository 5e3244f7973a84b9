"""The sink events.jsonl: one JSON object per event."""

from __future__ import annotations

from pathlib import PurePath

from titanlite.metrics.records import append, end_last_line, utc_now
from titanlite.metrics.sinks.base import Event, Values, Writer
from titanlite.metrics.sinks.jsonl import json_line


class EventLog(Writer):
    """One JSON object per event, written at once, with the time in UTC. The file is a history: no resume and
    no rewind removes a line. A run that begins at its first step writes the event `started`."""

    def __init__(self, path: PurePath, from_step: int):
        self._path = path
        end_last_line(path)
        if from_step == 0:
            self._append(0, "started", {})

    def event(self, step: int, event: Event, about: Values) -> None:
        self._append(step, event, about)

    def _append(self, step: int, event: str, about: Values) -> None:
        append(self._path, json_line({"step": step, "event": event, "time": utc_now(), **about}))
