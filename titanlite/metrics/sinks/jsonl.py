"""The sink metrics.jsonl: one JSON object per logged step. At a resume after step s and a rewind to it,
the lines of later steps move to metrics.superseded.jsonl."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from titanlite.config import json_file
from titanlite.metrics.records import Records, cut
from titanlite.metrics.sinks.base import Event, Values, Writer


class JsonLines(Writer):
    """One JSON object per logged step, written at once."""

    def __init__(self, path: Path, from_step: int):
        self._cut = partial(cut, path, _lines, _step_of_line)
        self._records = Records(path, partial(self._cut, from_step))

    def write(self, step: int, values: Values) -> None:
        self._records.append(json_line({"step": step, **values}))

    def event(self, step: int, event: Event, about: Values) -> None:
        if event == "rewound":
            self._records.prepare(partial(self._cut, step))

    def close(self) -> None:
        self._records.close()


def json_line(record: Values) -> bytes:
    """A record as a line of JSON. NaN and infinity are strings."""
    finite = {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in record.items()}
    return json.dumps(finite).encode() + b"\n"


def _lines(content: bytes) -> Sequence[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", content)


def _step_of_line(line: bytes) -> int:
    values = json_file.parse(line.decode())
    json_file.expect(values, step=int)
    return values["step"]
