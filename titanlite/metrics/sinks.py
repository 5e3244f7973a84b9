"""Where metrics go: the console, metrics.jsonl, TensorBoard. All get the same keys; only rank 0 has sinks.

After a resume from step s both files show each step once: TensorBoard purges what came after s, and
metrics.jsonl is cut there, the cut lines kept in metrics.superseded.jsonl.
"""

from __future__ import annotations

import json
import math
import os
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
    parts += [text.format(values[key]) for key, text in formats.items() if key in values]
    if "throughput/tokens_per_second" in values:
        mfu = values.get("throughput/mfu")
        parts.append("mfu n/a" if mfu is None else f"mfu {100 * mfu:.1f}%")
        parts.append(f"eta {timedelta(seconds=round((total_steps - step) * values['time/step_s']))}")
    return "  ".join(parts)


class JsonLines:
    """metrics.jsonl: one JSON object a logged step, flushed at once. NaN and inf are strings."""

    def __init__(self, path: Path, from_step: int):
        self.path = path
        keep: list[str] = []
        cut: list[str] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            (keep if _step_of(line) <= from_step else cut).append(line)
        text = "".join(f"{line}\n" for line in keep)
        if cut:
            with open(path.with_name("metrics.superseded.jsonl"), "a") as f:
                f.writelines(f"{line}\n" for line in cut)
        if path.exists() and path.read_text() != text:  # cut, or a last line without its end
            partial = path.with_suffix(".partial")
            partial.write_text(text)
            os.replace(partial, path)
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
