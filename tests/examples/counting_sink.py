"""A metric sink from outside the package, which counts what it gets and writes the counts at the end of the
run. To use it, put this file where Python finds it, for example beside the TOML file, and write

    [job]
    imports = ["counting_sink"]

    [[metrics.sinks]]
    name = "counting"
    file = "counts.json"
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from titanlite.metrics.sinks.base import Event, RunInfo, Sink, Values, Writer


@dataclass(frozen=True, kw_only=True)
class Counting(Sink, name="counting"):
    """Counts of steps, samples and events."""

    file: str = "counts.json"
    """File in the run folder that gets the counts."""

    def build(self, run: RunInfo) -> Writer:
        return CountingWriter(self, run)


class CountingWriter(Writer):
    """Keeps the counts in memory and writes them when the run ends."""

    def __init__(self, config: Counting, run: RunInfo):
        self.path, self.run_id = run.folder / config.file, run.run_id
        self.counts = Counter[str]()

    def write(self, step: int, values: Values) -> None:
        self.counts["steps"] += 1

    def sample(self, step: int, text: str) -> None:
        self.counts["samples"] += 1

    def event(self, step: int, event: Event) -> None:
        self.counts[event] += 1

    def close(self) -> None:
        self.path.write_text(json.dumps({"run_id": self.run_id, **self.counts}))
