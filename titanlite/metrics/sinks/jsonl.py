"""The sink metrics.jsonl: one JSON object per logged step; and the sink of tables, with such a file per kind.
At a resume after step s and a rewind to it, the lines of later steps move to metrics.superseded.jsonl."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, get_args

from titanlite.config import json_file
from titanlite.metrics.records import append, cut
from titanlite.metrics.sinks.base import Event, Table, Values, Writer


class JsonLines(Writer):
    """One JSON object per step, written at once.

    `superseded`: the latest step after `from_step` that an earlier process of the run had written, if any."""

    def __init__(self, path: PurePath, from_step: int):
        self._path = path
        self.superseded = cut(path, _lines, _step_of_line, from_step)

    def write(self, step: int, values: Values) -> None:
        append(self._path, json_line({"step": step, **values}))

    def event(self, step: int, event: Event, about: Values) -> None:
        if event == "rewound":
            cut(self._path, _lines, _step_of_line, step)


class Tables(Writer):
    """A file of JSON lines per kind of table: `<kind>.jsonl` in the run folder, made with its first table."""

    def __init__(self, folder: PurePath, from_step: int):
        # Opened for all kinds: the run may have tables of later steps from before a resume.
        self._files = {kind: JsonLines(folder / f"{kind}.jsonl", from_step) for kind in get_args(Table)}

    def table(self, step: int, kind: Table, values: Values) -> None:
        self._files[kind].write(step, values)

    def event(self, step: int, event: Event, about: Values) -> None:
        for file in self._files.values():
            file.event(step, event, about)


def json_line(record: Values) -> bytes:
    """A record as a line of JSON. NaN and infinity are strings."""
    return json.dumps(_finite(record)).encode() + b"\n"


def _finite(value: Any) -> Any:
    """`value`, which may be nested, with strings for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _lines(content: bytes) -> Sequence[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", content)


def _step_of_line(line: bytes) -> int:
    values = json_file.parse(line.decode())
    json_file.expect(values, step=int)
    return values["step"]
