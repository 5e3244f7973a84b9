"""Where metrics and samples go: the console, metrics.jsonl, samples.txt, TensorBoard. Only rank 0 has sinks.

After a resume from step s each step is shown once: TensorBoard purges what came after s; metrics.jsonl and
samples.txt are cut there, and what is cut goes to metrics.superseded.jsonl and samples.superseded.txt.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from titanlite.config import json_file
from titanlite.log import logger
from titanlite.metrics.records import Records, cut, move_aside

Values = Mapping[str, Any]
MOST_REMAINING = 1e10  # seconds, 300 years: a run that is stopped by hand has no end to expect


class Sink:
    """`write` takes the metrics of one logged step, `sample` one generated text; `close` flushes. A full disk
    is no error of theirs."""

    def write(self, step: int, values: Values) -> None:
        """Most sinks take metrics."""

    def sample(self, step: int, text: str) -> None:
        """Few sinks take samples."""

    def close(self) -> None:
        """Not all sinks have something to flush."""


class Console(Sink):
    """One line per logged step, through the logger."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps

    def write(self, step: int, values: Values) -> None:
        logger.info(console_line(step, self.total_steps, values))


def console_line(step: int, total_steps: int, values: Values) -> str:
    """`step 10/200  loss 5.1234  ...`: the keys a person watches, those that are there."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    formats = {
        "train/loss": "loss {:.4f}",
        "eval/loss": "validation loss {:.4f}",
        "train/grad_norm": "grad_norm {:.3f}",
        "train/learning_rate": "lr {:.2e}",
        "throughput/tokens_per_second": "{:,.0f} tok/s",
        "memory/peak_reserved_gib": "mem {:.1f} GiB",
        "throughput/mfu": "mfu {:.1%}",
    }
    formats |= {"time/to_first_step_s": "started in {:.0f} s", "compile/seconds": "compiled in {:.0f} s"}
    parts += [text.format(values[key]) for key, text in formats.items() if key in values]
    if values.get("time/data_wait_pct", 0) >= 1:  # below, the loader costs nothing worth a column
        parts.append(f"waiting for data {values['time/data_wait_pct']:.0f}%")
    remaining = (total_steps - step) * values.get("time/step_s", math.inf)
    if remaining < MOST_REMAINING and "compile/seconds" not in values:  # which no later step takes
        parts.append(f"eta {timedelta(seconds=round(remaining))}")
    return "  ".join(parts)


class JsonLines(Sink):
    """metrics.jsonl: one JSON object per logged step, written at once. NaN and inf are strings."""

    def __init__(self, path: Path, from_step: int):
        self._records = Records(path, partial(cut, path, _lines, _step_of_line, b'{"step": ', from_step))

    def write(self, step: int, values: Values) -> None:
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in values.items()}
        self._records.append(json.dumps({"step": step, **finite}).encode() + b"\n")

    def close(self) -> None:
        self._records.close()


def _lines(content: bytes) -> Sequence[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", content)


def _step_of_line(line: bytes) -> int:
    values = json_file.parse(line.decode())
    json_file.expect(values, step=int)
    return values["step"]


class Samples(Sink):
    """samples.txt: each generated text under a line with its step."""

    def __init__(self, path: Path, from_step: int):
        self._records = Records(path, partial(cut, path, _samples, _step_of_sample, b"--- step ", from_step))

    def sample(self, step: int, text: str) -> None:
        self._records.append(f"--- step {step}\n{text}\n".encode(errors="replace"))

    def close(self) -> None:
        self._records.close()


def _samples(content: bytes) -> Sequence[bytes]:
    return [s for s in re.split(rb"^(?=--- step \d+$)", content, flags=re.MULTILINE) if s]


def _step_of_sample(sample: bytes) -> int:
    sample.decode()
    header = re.match(rb"--- step (\d+)$", sample, flags=re.MULTILINE)
    if header is None and b"\0" in sample:
        raise ValueError("what a file system shows of a file that it had not written")
    return int(header[1]) if header else 0  # what stands before the first sample stays


class TensorBoard(Sink):
    """Scalars in an event file under <folder>; text values are left to metrics.jsonl.

    torch's SummaryWriter is not used: the thread that writes its files ends at the first error.
    """

    def __init__(self, folder: Path, from_step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._records = Records(folder / f"events.out.tfevents.{time.time_ns()}", partial(_make, folder))
        now, start = (
            time.time(),
            SessionLog(status=SessionLog.START),
        )  # purges what other files say of later steps
        self._append(Event(wall_time=now, file_version="brain.Event:2"))
        self._append(Event(wall_time=now, step=from_step + 1, session_log=start))

    def write(self, step: int, values: Values) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._records.append(record.getvalue())

    def close(self) -> None:
        self._records.close()


def _make(folder: Path) -> None:
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
        move_aside(folder, "it is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
