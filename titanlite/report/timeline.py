"""Where the time of a run went, and how many hours it had taken at each logged step.

metrics.jsonl has no clock. The time is the sum of the times in the records; time between the end of one
process and the start of the next is not known and not counted.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np

from titanlite.report.estimates import Floats
from titanlite.report.recorded_run import Record, RecordedRun

# Causes of time that is not spent on new steps, with the metric that records them.
PAUSES = {
    "validation": "time/validation_s",
    "tasks": "time/tasks_s",
    "samples": "time/generation_s",
    "probes": "time/probe_s",
    "digests": "time/digest_s",
    "saves": "checkpoint/stall_s",
    "profiles": "time/profiling_s",
    "rewinds": "time/rewind_s",
}
FIRST_STEP, STEP, COMPILE, WAIT = (
    "time/to_first_step_s",
    "time/step_s",
    "compile/seconds",
    "time/data_wait_pct",
)


@dataclass(frozen=True)
class Timeline:
    """Seconds of a run by cause, `training` included, and the hours up to each record. Empty if the records
    have no time/step_s."""

    seconds: dict[str, float]
    hours: Floats

    @property
    def total_s(self) -> float:
        """All seconds of the run that the records have."""
        return sum(self.seconds.values())


@cache
def timeline(run: RecordedRun) -> Timeline:
    """Return the timeline of a run."""
    step_times = run.series(STEP).finite().values
    if not len(step_times):
        return Timeline({}, np.zeros(0))
    typical_s = float(np.median(step_times))
    causes = Counter[str]()
    again = sorted(_superseded(run, typical_s, causes).items(), reverse=True)
    hours, total, before = [], 0.0, 0
    for record in run.records:
        seconds = _seconds(record, record["step"] - before, typical_s)
        causes.update(seconds)
        while again and again[-1][0] <= record["step"]:
            total += again.pop()[1]
        total += sum(seconds.values())
        hours.append(total / 3600)
        before = record["step"]
    order = ["training", "data wait", "compilation", "start", *PAUSES, "steps trained again"]
    return Timeline({cause: causes[cause] for cause in order if causes[cause] > 0}, np.array(hours))


def gpu_hours(run: RecordedRun) -> float | None:
    """Return the hours of all GPUs together, by the number of ranks in each record; None for a run without
    metrics of a GPU's memory or without times."""
    hours = timeline(run).hours
    if "memory/peak_reserved_gib" not in run.keys or not len(hours):
        return None
    ranks = np.array([_num_ranks(record) for record in run.records])
    known = ranks[ranks > 0]
    if not len(known):
        return None
    return float(np.sum(np.diff(hours, prepend=0.0) * np.where(ranks > 0, ranks, np.median(known))))


def _num_ranks(record: Record) -> int:
    """The number of ranks that took the steps of a record; 0 if it is not known."""
    one = _possible(record, "throughput/tokens_per_second_per_device")
    return round(_possible(record, "throughput/tokens_per_second") / one) if one > 1e-9 else 0


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _superseded(run: RecordedRun, typical_s: float, causes: Counter[str]) -> dict[int, float]:
    """Add the time of the steps that were trained again, and return it by the first step of each such range
    of steps. Starts, saves and other pauses in these steps keep their cause."""
    steps, parts = [record["step"] for record in run.records], dict[int, float]()
    first = before = sys.maxsize
    for record in run.superseded:
        step = record["step"]
        at = bisect_left(steps, step)
        logged_before = steps[at - 1] if at else 0
        if step <= before or logged_before > before:  # the next part
            first, before = step, logged_before
        seconds = _seconds(record, step - before, typical_s)
        seconds["steps trained again"] = sum(seconds.pop(k, 0.0) for k in ("training", "data wait"))
        causes.update(seconds)
        parts[first] = parts.get(first, 0.0) + sum(seconds.values())
        before = step
    return parts


def _seconds(record: Record, num_steps: int, typical_s: float) -> dict[str, float]:
    """The time of one record by cause."""
    seconds = {cause: _possible(record, key) for cause, key in PAUSES.items()}
    compile_s = _possible(record, COMPILE)
    if FIRST_STEP in record:
        num_steps = 1  # the first step of a process; those since the record before were another process's
        step_s = min(typical_s, _possible(record, STEP))
        seconds["start"] = max(_possible(record, FIRST_STEP) - step_s - compile_s, 0.0)
    else:
        step_s = max(_possible(record, STEP) * max(num_steps, 1) - compile_s, 0.0)
    wait_s = step_s * min(_possible(record, WAIT) / 100, 1.0)
    return {**seconds, "compilation": compile_s, "data wait": wait_s, "training": step_s - wait_s}


def _possible(record: Record, key: str) -> float:
    """A number of a record; 0 if it is missing or no possible time or speed."""
    value = record.get(key)
    return value if isinstance(value, float) and 0 <= value < 1e12 else 0.0
