"""A metric sink from outside the package, which counts samples and events and appends the counts of each
logged step to a file. To use it, put this file into the current directory or install it, and write

    [job]
    imports = ["counting_sink"]

    [[metrics.sinks]]
    name = "counting"
    file = "counts.jsonl"
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from titanlite.metrics.sinks.base import Event, RunInfo, Sink, Values, Writer


@dataclass(frozen=True, kw_only=True)
class Counting(Sink, name="counting"):
    """Counts of steps, samples and events."""

    file: str = "counts.jsonl"
    """File in the run folder that gets the counts."""

    def build(self, run: RunInfo) -> Writer:
        return CountingWriter(run.folder / self.file, run.resumed_step)


class CountingWriter(Writer):
    """One line per logged step, with the counts since the line before."""

    def __init__(self, path: Path, resumed_step: int):
        self.path, self.counts = path, Counter[str]()
        self._drop_after(resumed_step)

    def _drop_after(self, step: int) -> None:
        """Drop the lines of later steps, which the run trains again."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self.path.write_text("".join(f"{line}\n" for line in kept))

    def write(self, step: int, values: Values) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": values["train/loss"], **self.counts}) + "\n")
        self.counts.clear()

    def sample(self, step: int, text: str) -> None:
        self.counts["samples"] += 1

    def event(self, step: int, event: Event, about: Values) -> None:
        if event == "rewound":
            self._drop_after(step)
        self.counts[event] += 1
