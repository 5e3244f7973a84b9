"""Where metrics go: the console, metrics.jsonl, TensorBoard. All get the same keys; only rank 0 has sinks.

After a resume from step s each step is shown once: TensorBoard purges what came after s; metrics.jsonl and
samples.txt are cut there, and what is cut goes to metrics.superseded.jsonl and samples.superseded.txt.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from titanlite.log import logger

Values = Mapping[str, Any]


class Sink(Protocol):
    """`write` takes one step's metrics; `close` flushes."""

    def write(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class Console:
    """One line a step, through the logger."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps

    def write(self, step: int, values: Values) -> None:
        logger.info(console_line(step, self.total_steps, values))

    def close(self) -> None:
        pass


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
        "time/data_wait_pct": "data {:.1f}%",
    }
    formats |= {"time/to_first_step_s": "started in {:.0f} s", "compile/seconds": "compiled in {:.0f} s"}
    parts += [text.format(values[key]) for key, text in formats.items() if key in values]
    if "throughput/tokens_per_second" in values:
        mfu = values.get("throughput/mfu")
        parts.append("mfu n/a" if mfu is None else f"mfu {100 * mfu:.1f}%")
    if "time/step_s" in values and "compile/seconds" not in values:  # which no later step takes
        parts.append(f"eta {timedelta(seconds=round((total_steps - step) * values['time/step_s']))}")
    return "  ".join(parts)


class JsonLines:
    """metrics.jsonl: one JSON object a logged step, flushed at once. NaN and inf are strings."""

    def __init__(self, path: Path, from_step: int):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        _cut(path, [(_step_of(line), f"{line}\n") for line in lines], from_step)
        self._file = open(path, "a")  # noqa: SIM115 -- open for the whole run

    def write(self, step: int, values: Values) -> None:
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # torn by a kill: its step is written again


def write_sample(path: Path, step: int, text: str) -> None:
    """Append one to samples.txt."""
    with open(path, "a", encoding="utf-8") as f:
        f.write(f"--- step {step}\n{text}\n")


def cut_samples(path: Path, from_step: int) -> None:
    """After a resume samples.txt has one sample a step and prompt, too."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    samples = re.split(r"^(?=--- step \d+$)", text, flags=re.MULTILINE)
    headed = (s.startswith("--- step ") for s in samples)  # what stands before the first one stays
    _cut(
        path, [(int(s.split()[2]) if is_sample else 0, s) for s, is_sample in zip(samples, headed)], from_step
    )


def _cut(path: Path, entries: list[tuple[float, str]], from_step: int) -> None:
    """Leave the entries (step, text) up to `from_step`; append the others to `<name>.superseded.<ending>`."""
    kept, later = ("".join(t for step, t in entries if (step > from_step) == cut) for cut in (False, True))
    if later:
        with open(path.with_suffix(f".superseded{path.suffix}"), "a", encoding="utf-8") as f:
            f.write(later)
    if path.exists() and path.read_text(encoding="utf-8") != kept:  # cut, or a last line without its end
        aside = path.with_suffix(".partial")
        aside.write_text(kept, encoding="utf-8")
        os.replace(aside, path)


class TensorBoard:
    """Scalars under <folder>; text values are left to metrics.jsonl."""

    def __init__(self, folder: Path, from_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=from_step + 1)

    def write(self, step: int, values: Values) -> None:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()
