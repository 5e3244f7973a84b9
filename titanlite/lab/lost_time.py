"""The times that goodput depends on: of a run, or of the benchmarks where no run was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.lab.cards import GIB
from titanlite.report.recorded_run import RecordedRun
from titanlite.report.timeline import FIRST_STEP, PAUSES, STEP, TRAINING, event_time, record_time, timeline

STALL = PAUSES["saves"]
# Saves of 16.7 GiB by one H200: checkpoint_h200_save_async.json and checkpoint_h200_save_disabled.json. Start
# of Llama 8B on four H200, cold and with warm compile caches: start_8b_h200x4_before.json. Load from the disk
# with verification: checkpoint_h200_load.json.
SAVED_GIB = 16.7
SAVE_S, WRITE_S, WRITE_ALONE_S, START_S, WARM_START_S, LOAD_S = 0.4, 12.7, 15.5, 29.1, 21.1, 10.5


@dataclass(frozen=True)
class Times:
    """The times that goodput depends on, in seconds. `save`: for which a save holds up training; `write`:
    until it is complete after that; `start`: of the first process until its first step; `restart`: from a
    failure to the first step, without that step. `pauses`: seconds of validation, samples, waits for data
    and the like per second of training. `sources`: where each number comes from."""

    step: float
    save: float
    write: float
    start: float
    restart: float
    pauses: float
    sources: dict[str, str]


class Size(NamedTuple):
    """GiB of a checkpoint on each of the GPUs that share it, and on each node."""

    per_gpu: float
    per_node: float


def assumed_times(step_s: float, size: Size, *, is_async: bool) -> Times:
    """Return the times of the benchmarks on H200, which are taken if no run was measured. `size`: of the
    planned checkpoints; larger ones than the benchmarks' take longer."""
    by_gpu, by_node = _growth(size, Size(SAVED_GIB, SAVED_GIB))
    save_s = SAVE_S * by_gpu if is_async else WRITE_ALONE_S * by_node
    saved, started = "assumed, as on one H200 and its disk", "assumed, as of Llama 8B on four H200"
    return Times(
        step=step_s,
        save=save_s,
        write=WRITE_S * by_node if is_async else 0.0,
        start=START_S,
        restart=WARM_START_S + LOAD_S * by_node,
        pauses=0.0,
        sources={
            "step": "planned",
            "save": saved,
            "write": saved,
            "start": started,
            "restart": f"{started}, with a load; no time to notice the failure",
            "pauses": "not counted",
        },
    )


def measured_times(run: RecordedRun, assumed: Times, size: Size | None, gpus_per_node: int) -> Times:
    """Return the times of a run; those that it does not have are `assumed`. `size`: of the planned
    checkpoints, if the plan is of other GPUs than the run's: its step time is planned, and larger checkpoints
    than the run's take longer. Raises ConfigError for a run without times of steps."""
    spent = timeline(run)
    if not spent.seconds.get(TRAINING):
        raise ConfigError(f"command line, --measured-run: {run.folder} has no times of steps")
    step_s = float(np.median(run.series(STEP).finite().values))
    others = [*(cause for cause in PAUSES if cause not in ("saves", "copies to memory")), "data wait"]
    found = {"pauses": sum(spent.seconds.get(cause, 0.0) for cause in others) / spent.seconds[TRAINING]}
    if size is None:
        found["step"] = step_s
    first_s = run.records[0].get(FIRST_STEP)
    if isinstance(first_s, float):
        found["start"] = found["restart"] = max(first_s - step_s, 0.0)
    if spent.restarts:
        steps = [record["step"] for record in run.records]
        window_s = step_s * float(np.median(np.diff(steps))) if len(steps) > 1 else 0.0
        # A process fails in the middle between two records, on average. Its steps since the last record are
        # among the steps that are trained again, and must not count twice.
        seconds = [max(r.seconds - r.has_failed * window_s / 2, r.set_up_s) for r in spent.restarts]
        found["restart"] = float(np.median(seconds))
    by_gpu, by_node = 1.0, 1.0
    if size is not None and (recorded := _recorded_size(run, gpus_per_node)):
        by_gpu, by_node = _growth(size, recorded)
    if stalls := _stalls(run):
        found["save"] = float(np.median(stalls))
        if writes := _writes(run):
            found["write"] = max(float(np.median(writes)) - found["save"], 0.0) * by_node
        found["save"] *= by_gpu
    sources = assumed.sources | dict.fromkeys(found, f"measured in {run.name}")
    if not spent.restarts and "restart" in found:
        sources["restart"] = f"assumed as long as the start: {run.name} had no restart"
    return replace(assumed, **found, sources=sources)


def with_copies(times: Times, size: Size, save_interval: int) -> Times:
    """Return the times of a job that goes back to copies in memory, with a copy in place of a save; its saves
    to the disk count as pauses. A copy is taken to need the time of an asynchronous save to the disk."""
    copy = assumed_times(times.step, size, is_async=True)
    pauses = times.pauses + times.save / (save_interval * times.step)
    sources = times.sources | {
        "save": f"of a copy in memory: {copy.sources['save']}",
        "write": f"of a copy in memory: {copy.sources['write']}",
        "pauses": f"{times.sources['pauses']}; and saves to the disk every {save_interval} steps",
    }
    return replace(times, save=copy.save, write=copy.write, pauses=pauses, sources=sources)


def _growth(size: Size, measured: Size) -> tuple[float, float]:
    """How much larger checkpoints are per GPU and per node than those that were measured. Smaller ones are
    taken to need the same time, in which latency and synchronisation may dominate."""
    return max(size.per_gpu / measured.per_gpu, 1.0), max(size.per_node / measured.per_node, 1.0)


def _recorded_size(run: RecordedRun, gpus_per_node: int) -> Size | None:
    """The size of the newest checkpoint of a run; None if there is none."""
    saved = [saved for saved in run.checkpoints if saved.size_bytes and saved.num_ranks]
    if not saved:
        return None
    gib, num_ranks = saved[-1].size_bytes / GIB, saved[-1].num_ranks
    return Size(gib / num_ranks, gib / math.ceil(num_ranks / gpus_per_node))


def _stalls(run: RecordedRun) -> list[float]:
    """Seconds for which each save of a run held up training. The report that follows a save has them."""
    interval, before, stalls = run.setting("checkpoint.interval", int) or 1, 0, list[float]()
    for record in run.records:
        step, stall_s = record["step"], record.get(STALL)
        if isinstance(stall_s, float) and 0 <= stall_s < 1e9:
            num = max((step - 1) // interval - max(before - 1, 0) // interval, 1)
            stalls += [stall_s / num] * num
        before = step
    return stalls


def _writes(run: RecordedRun) -> list[float]:
    """Seconds from the report of a saved step until the save was seen to be complete, which is up to a step
    later than it was; of saved steps with a report."""
    made = dict[int, list[float]]()
    for record in [*run.records, *run.superseded]:
        made.setdefault(record["step"], []).append(record_time(record))
    writes = list[float]()
    for saved in run.events:
        times = made.get(saved.step, []) if saved.kind == "saved" else []
        if ages := [event_time(saved) - time for time in times if 0 < time <= event_time(saved)]:
            writes.append(min(ages))
    return writes
