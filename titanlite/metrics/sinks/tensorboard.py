"""The TensorBoard sink."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from titanlite.metrics.records import append
from titanlite.metrics.sinks import base as sinks
from titanlite.metrics.sinks.base import RunInfo, Sink, Values, Writer
from titanlite.storage import storage_of

MAX_BYTES = 256 << 10  # of a file that is written again for each report


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Sink, name="tensorboard"):
    """TensorBoard files in <dump_folder>/tb, on unless `[[metrics.sinks]]` or `sinks = []` replaces it. After
    a resume or rewind, TensorBoard hides the steps that are trained again."""

    def build(self, run: RunInfo) -> Writer:
        return EventFile(run.folder / "tb", run.resumed_step)


class EventFile(Writer):
    """Scalars in an event file in `folder`; text values are left to metrics.jsonl.

    A storage without appends gets further event files of up to MAX_BYTES, of which the last is replaced:
    TensorBoard reads all files of a folder in the order of their names.

    torch's SummaryWriter is not used: the thread that writes its files ends at the first error.
    """

    def __init__(self, folder: PurePath, from_step: int):
        from tensorboard.compat.proto.event_pb2 import Event

        storage_of(folder).make_folder(folder)
        self._folder, self._name = folder, f"events.out.tfevents.{time.time_ns()}"
        self._path, self._number, self._data = folder / self._name, 0, b""
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._hide_after(from_step)

    def write(self, step: int, values: Values) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def event(self, step: int, event: sinks.Event, about: Values) -> None:
        if event == "rewound":
            self._hide_after(step)

    def _hide_after(self, step: int) -> None:
        """Hide what this file and earlier ones have of steps after `step`."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        if isinstance(self._path, Path):
            append(self._path, record.getvalue())
            return
        if len(self._data) >= MAX_BYTES:
            self._number, self._data = self._number + 1, b""
            self._path = self._folder / f"{self._name}.{self._number:06}"
        self._data += record.getvalue()
        storage_of(self._path).put_record(self._path, self._data)
