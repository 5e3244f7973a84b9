"""Where the wall-clock time of a run went by cause, and how many hours it had taken at each logged step.

Records have the times of steps and pauses. The clock (`time/utc` of the records, `time` of the events) adds
the time between processes, and tells which steps were trained again after a resume or a rewind. Goodput is
the share of the wall-clock time that was spent in steps that count: not in steps that were trained again, nor
in waiting, pauses, starts and restarts."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from titanlite.metrics.sinks.base import ALL_DONE, STOPPED
from titanlite.report.estimates import Floats
from titanlite.report.events import RESTARTS, RunEvent
from titanlite.report.recorded_run import Record, RecordedRun

# Causes of time that is not spent on new steps, with the metric that records them.
PAUSES = {
    "validation": "time/validation_s",
    "tasks": "time/tasks_s",
    "samples": "time/generation_s",
    "probes": "time/probe_s",
    "digests": "time/digest_s",
    "fault checks": "time/fault_check_s",
    "saves": "checkpoint/stall_s",
    "copies to memory": "checkpoint/copy_s",
    "profiles": "time/profiling_s",
    "rewinds": "time/rewind_s",
}
FIRST_STEP, STEP, COMPILE, WAIT, CLOCK = (
    "time/to_first_step_s",
    "time/step_s",
    "compile/seconds",
    "time/data_wait_pct",
    "time/utc",
)
TRAINING, AGAIN = "training", "steps trained again"
ORDER = [TRAINING, "data wait", "compilation", "start", "restarts", *PAUSES, AGAIN, "ends", "other"]
MIN_OTHER = 0.005  # share of the total, below which time without a cause is that of writing records


class Restart(NamedTuple):
    """A restart. `seconds`: from the last sign of life of the process before to the first step, without that
    step but with compilation. `set_up_s`: the part of them since the set-up began. `has_failed`: the process
    before was killed or ended with an error, and its steps after its last record are in `seconds`."""

    seconds: float
    set_up_s: float
    has_failed: bool


@dataclass(frozen=True)
class Timeline:
    """Seconds of a run by cause, `training` included, and the hours up to each record, without the time
    between processes. Empty if the records have no time/step_s. `notes`: what is estimated or not
    recorded."""

    seconds: dict[str, float]
    hours: Floats
    restarts: list[Restart]
    notes: list[str]

    @property
    def total_s(self) -> float:
        """All seconds of the run that are recorded."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Share of the time that was spent in steps that count; None if no times are recorded."""
        return self.seconds.get(TRAINING, 0.0) / self.total_s if self.seconds else None


class _Window(NamedTuple):
    """A record, and the steps that its process had taken since its record before. `counted`: those of them
    that were not trained again later. `is_kept`: the record is in metrics.jsonl. `unlogged`: steps that count
    and have no record, before the first record of a process. `end`: the event of the end of the process,
    after its last record, if it was no error."""

    record: Record
    taken: int
    counted: int
    is_kept: bool
    unlogged: int = 0
    end: RunEvent | None = None

    @property
    def is_done(self) -> bool:
        """Whether the process ended after it with all steps done: the run did not wait for a next start."""
        return self.end is not None and self.end.about.get("reason") == ALL_DONE


@cache
def timeline(run: RecordedRun) -> Timeline:
    """Return the timeline of a run."""
    step_times = run.series(STEP).finite().values
    if not len(step_times):
        return Timeline({}, np.zeros(0), [], [])
    typical_s = float(np.median(step_times))
    events = _events(run)
    has_clock = _has_clock(run, events)
    windows = list(_by_clock(run, events) if has_clock else _without_clock(run))
    causes = dict.fromkeys(ORDER, 0.0)
    hours, total, restarts = list[float](), 0.0, list[Restart]()
    last: _Window | None = None
    for window in windows:
        record, seconds = window.record, _seconds(window, typical_s)
        total += sum(seconds.values())
        if FIRST_STEP in record and last is not None and not last.is_done:
            between_s = _between(last, record) if has_clock else 0.0
            unlogged_s = min(window.unlogged * typical_s, between_s)
            start_s, between_s = seconds.pop("start"), between_s - unlogged_s
            set_up_s = start_s + seconds["compilation"]
            restarts.append(Restart(set_up_s + between_s, set_up_s, last.end is None))
            causes["restarts"] += start_s + between_s
            causes[TRAINING] += unlogged_s
            total += unlogged_s
        elif has_clock and FIRST_STEP not in record and last is not None:
            causes["other"] += record_time(record) - record_time(last.record) - sum(seconds.values())
        if window.end is not None:
            causes["ends"] += max(event_time(window.end) - record_time(record), 0.0)
        for cause, value in seconds.items():
            causes[cause] += value
        if window.is_kept:
            hours.append(total / 3600)
        last = window
    if causes["other"] < max(MIN_OTHER * sum(causes.values()), 1.0):
        del causes["other"]
    spent = {cause: value for cause, value in causes.items() if value > 0}
    return Timeline(spent, np.array(hours), restarts, _notes(run, windows, has_clock))


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


def goodput_text(run: RecordedRun) -> str:
    """Return the goodput of a run in one line; empty if no times are recorded."""
    spent = timeline(run)
    if spent.goodput is None:
        return ""
    times = f"{duration(spent.seconds.get(TRAINING, 0.0))} of {duration(spent.total_s)} in steps that count"
    num = len(spent.restarts)
    return f"{spent.goodput:.1%}: {times}" + (f"; {num} restart{'s' * (num > 1)}" if num else "")


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _num_ranks(record: Record) -> int:
    """The number of ranks that took the steps of a record; 0 if it is not known."""
    one = _possible(record, "throughput/tokens_per_second_per_device")
    return round(_possible(record, "throughput/tokens_per_second") / one) if one > 1e-9 else 0


def _events(run: RecordedRun) -> list[RunEvent]:
    """The events of the run: those before its last `started` were of another run in the folder."""
    starts = [i for i, event in enumerate(run.events) if event.kind == "started"]
    return run.events[starts[-1] :] if starts else run.events


def _has_clock(run: RecordedRun, events: list[RunEvent]) -> bool:
    """Whether all records and events have times, which go forward."""
    kept, happened = [record_time(r) for r in run.records], [event_time(event) for event in events]
    times = [*kept, *happened, *(record_time(record) for record in run.superseded)]
    return bool(events) and min(times) > 0 and kept == sorted(kept) and happened == sorted(happened)


def _by_clock(run: RecordedRun, events: list[RunEvent]) -> Iterator[_Window]:
    """The windows in the order of their times. `events`: with times, since the run began."""
    began = event_time(events[0])
    kept = {id(record) for record in run.records}
    records = [r for r in [*run.records, *run.superseded] if id(r) in kept or record_time(r) >= began]
    records.sort(key=record_time)
    moments = [record_time(record) for record in records]
    after = [list[RunEvent]() for _ in range(len(records) + 1)]  # the events before each record, and the last
    for event in events:
        after[bisect_right(moments, event_time(event))].append(event)
    # Steps above `limit` were trained again after a later event.
    limits, limit = list[float](), float("inf")
    for happened in after[:0:-1]:
        limit = min([limit, *(event.step for event in happened if event.kind in RESTARTS)])
        limits.append(limit)
    limits.reverse()
    before, counted_until = 0, 0
    for i, record in enumerate(records):
        step, limit = record["step"], limits[i]
        rewinds = [event for event in after[i] if event.kind == "rewound"]
        if FIRST_STEP in record:  # the first step of a process, which reports alone
            unlogged = max(int(min(step - 1, limit)) - counted_until, 0) if i else 0
            taken, floor = 1, step - 1
        else:
            unlogged = 0
            taken = step - before + sum(_from_step(event) - event.step for event in rewinds)
            floor = min([before, *(event.step for event in rewinds)])
        counted = max(int(min(step, limit)) - floor, 0)
        following = [event for event in after[i + 1] if event.kind in ("ended", "resumed", "started")]
        end = following[0] if following and following[0].about.get("reason") in (ALL_DONE, STOPPED) else None
        yield _Window(record, max(taken, counted, 1), counted, id(record) in kept, unlogged, end)
        before, counted_until = step, int(min(step, limit))


def _without_clock(run: RecordedRun) -> Iterator[_Window]:
    """The windows without times: each range of superseded steps comes before the steps that replaced it, and
    none of its steps count."""
    steps, parts = [record["step"] for record in run.records], dict[int, list[_Window]]()
    first = before = sys.maxsize
    for record in run.superseded:
        step = record["step"]
        at = bisect_left(steps, step)
        logged_before = steps[at - 1] if at else 0
        if step <= before or logged_before > before:  # the next range
            first, before = step, logged_before
        taken = 1 if FIRST_STEP in record else step - before
        parts.setdefault(first, []).append(_Window(record, max(taken, 1), 0, is_kept=False))
        before = step
    again, before = sorted(parts.items(), reverse=True), 0
    for record in run.records:
        while again and again[-1][0] <= record["step"]:
            yield from again.pop()[1]
        # Steps between the record before and the first step of a process were another process's.
        taken = 1 if FIRST_STEP in record else max(record["step"] - before, 1)
        yield _Window(record, taken, taken, is_kept=True)
        before = record["step"]
    for _, windows in reversed(again):
        yield from windows


def _between(last: _Window, first: Record) -> float:
    """Seconds from the last sign of life of a process to the start of the set-up of the next process, whose
    first record is `first`."""
    sign_of_life = record_time(last.record) if last.end is None else event_time(last.end)
    return max(record_time(first) - _possible(first, FIRST_STEP) - sign_of_life, 0.0)


def _seconds(window: _Window, typical_s: float) -> dict[str, float]:
    """The time of one record by cause."""
    record = window.record
    seconds = {cause: _possible(record, key) for cause, key in PAUSES.items()}
    compile_s, step_s = _possible(record, COMPILE), _possible(record, STEP)
    if FIRST_STEP in record:
        active_s = min(typical_s, step_s)  # its time/step_s includes compilation
        whole_s = _possible(record, FIRST_STEP) - sum(seconds.values())
        seconds["start"] = max(whole_s - active_s - compile_s, 0.0)
    else:
        active_s = max(step_s * window.taken - compile_s, 0.0)
    share = window.counted / window.taken
    wait_s = share * active_s * min(_possible(record, WAIT) / 100, 1.0)
    seconds |= {"compilation": compile_s, "data wait": wait_s, TRAINING: share * active_s - wait_s}
    return {**seconds, AGAIN: (1 - share) * active_s}


def _notes(run: RecordedRun, windows: list[_Window], has_clock: bool) -> list[str]:
    """Sentences on what the table of times does not have, or estimates."""
    notes = list[str]()
    if not has_clock:
        return [
            "The time between processes, and after their last records, is not known: metrics.jsonl and "
            "events.jsonl have no times, or times that go back."
        ]
    earlier = sum(event.kind == "started" for event in run.events) - 1
    if earlier > 0:
        notes.append(f"Earlier starts at step 1 in this folder, {earlier}, are not counted.")
    before = [last for last, first in pairwise(windows) if FIRST_STEP in first.record and not last.is_done]
    if failed := sum(window.end is None for window in before):
        notes.append(
            f"Of {len(before)} restarts, {failed} followed a process that was killed or failed: its time "
            "after its last record counts as restart."
        )
    if unlogged := sum(window.unlogged for window in windows):
        notes.append(f"Steps that count but have no record, {unlogged:,}, are taken at the median step time.")
    if any(window.is_done for window in windows[:-1]):
        notes.append("The time between the end of all steps and a later start with more is not counted.")
    if windows[-1].end is None:
        notes.append("The newest process has not ended, or has failed: nothing after its last record counts.")
    return notes


def record_time(record: Record) -> float:
    """Return when a record was made, in seconds since 1970; 0 if it does not say so."""
    return _moment(str(record.get(CLOCK)))


def event_time(event: RunEvent) -> float:
    """Return when an event happened, in seconds since 1970; 0 if it does not say so."""
    return _moment(event.time)


@cache
def _moment(text: str) -> float:
    """A time as text in seconds since 1970; 0 if it is not a time with a time zone."""
    try:
        time = datetime.fromisoformat(text)
        return time.timestamp() if time.tzinfo is not None else 0.0
    except (ValueError, OverflowError):
        return 0.0


def _from_step(rewind: RunEvent) -> int:
    """The step that a rewind went back from."""
    step = rewind.about.get("from_step")
    return step if type(step) is int and step >= rewind.step else rewind.step


def _possible(record: Record, key: str) -> float:
    """A number of a record; 0 if it is missing or no possible time or speed."""
    value = record.get(key)
    return value if isinstance(value, float) and 0 <= value < 1e12 else 0.0
