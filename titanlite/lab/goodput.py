"""Goodput under failures: the share of the wall-clock time that a run spends in steps that count.

Failures of a node come at a constant rate, independently of each other, so that a job of n nodes has a
failure every M = (mean time between failures of a node) / n seconds on average. Training of t seconds lies
between two saves. A save holds up training for d seconds and is complete w seconds later, meanwhile training
goes on. After a failure a restart takes r seconds, and starts again if there is a failure in it. Training
continues from the newest complete checkpoint; copies in memory, if there are any, take the place of saves.
Then on average

    time per failure of training      M exp(r / M)
    complete saves in it              N = exp(-w / M) / (exp((t + d) / M) - 1)
    share of training that counts     N t / (M exp(r / M))

which is the model of Daly (2006, A higher order estimate of the optimum checkpoint interval for restart
dumps, doi 10.1016/j.future.2004.11.016) with a save that is complete later. The best t is, to first order,
sqrt(2 d M) (Young 1974, A first order approximation to the optimum checkpoint interval, doi
10.1145/361147.361115); Daly gives two more terms. w and r do not change it."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from titanlite.checkpoint.checkpointer import PAUSE_PER_COPY
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.lab.cards import Cluster
from titanlite.lab.lost_time import Size, Times, assumed_times, measured_times, with_copies
from titanlite.report.recorded_run import RecordedRun
from titanlite.report.timeline import AGAIN, TRAINING, duration
from titanlite.table import table

NEVER = 700.0  # exp() of more overflows
CAUSES = (TRAINING, "pauses", "saves", AGAIN, "restarts", "start")
UNITS = {"pauses": "s of validation, waits for data and the like per s of training"}
BEST = "about sqrt(2 x save x time between failures) (Young 1974, Daly 2006)"
LIMITED = "the shortest possible: a save is complete before the next one begins"
ASSUMPTIONS = (
    "assumed: failures are independent, at a constant rate, each ends the job, and a restart finds as many "
    "nodes as before"
)


@dataclass(frozen=True)
class Goodput:
    """A prediction. `shares`: of the wall-clock time by cause; they add up to 1. `hours`: of the whole run.
    `repeated`: mean number of steps that are trained again after a failure."""

    interval: int
    shares: dict[str, float]
    hours: float
    repeated: float

    @property
    def share(self) -> float:
        """The share of steps that count."""
        return self.shares[TRAINING]


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between saves with the highest goodput, by Daly (2006). `mtbf_s`: mean
    time between failures of the job."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def best_interval(times: Times, mtbf_s: float) -> int:
    """Return the steps between saves with the highest goodput, but not fewer than take the time until a save
    is complete: only one save is in flight."""
    step_s = times.step * (1 + times.pauses)
    return max(math.ceil(times.write / step_s), round(best_interval_s(times.save, mtbf_s) / step_s), 1)


def predict(times: Times, mtbf_s: float, interval: int, num_steps: int) -> Goodput:
    """Return the goodput of a run of `num_steps` steps that saves every `interval` steps. `mtbf_s`: mean time
    between failures of the job, in seconds. If no save is ever complete, the hours are infinite."""
    step_s = times.step * (1 + times.pauses)
    work_s = interval * step_s
    saves = math.exp(-times.write / mtbf_s) / math.expm1(min((work_s + times.save) / mtbf_s, NEVER))
    cycle_s = mtbf_s * math.exp(min(times.restart / mtbf_s, NEVER))
    counted_s, save_s = saves * work_s, saves * times.save
    lost_s = max(mtbf_s - counted_s - save_s, 0.0)
    busy_s = num_steps * step_s / (counted_s / cycle_s) if counted_s > 0 else math.inf
    total_s = times.start + busy_s
    seconds = {
        TRAINING: counted_s / (1 + times.pauses),
        "pauses": counted_s * times.pauses / (1 + times.pauses),
        "saves": save_s,
        AGAIN: lost_s,
        "restarts": cycle_s - mtbf_s,
    }
    busy = 1.0 if math.isinf(total_s) else busy_s / total_s
    shares = {cause: value / cycle_s * busy for cause, value in seconds.items()}
    return Goodput(interval, {**shares, "start": 1 - busy}, total_s / 3600, lost_s / step_s)


# ---- the prediction as a part of a plan


def section(
    job: Job,
    options: Namespace,
    cluster: Cluster,
    run: RecordedRun | None,
    step_s: float | None,
    num_steps: int,
    size: Size,
) -> dict[str, Any] | None:
    """Return the prediction for a plan; None if there is no step time, because the job does not fit. `job`:
    resolved. `run`: of --measured-run. `step_s`: planned. `size`: of the planned checkpoints. Raises
    ConfigError for a job without checkpoints and a run without times."""
    if not job.checkpoint.enable:
        raise ConfigError("no goodput can be predicted: the job saves no checkpoints", "checkpoint.enable")
    times = assumed_times(step_s or math.nan, size, is_async=job.checkpoint.async_mode == "async")
    if run is not None:
        other = size if options.gpus is not None else None
        times = measured_times(run, times, other, cluster.gpus_per_node)
    if options.restart is not None:
        sources = times.sources | {"restart": "--restart"}
        times = replace(times, restart=options.restart, sources=sources)
    if math.isnan(times.step):
        return None
    nodes = math.ceil(cluster.gpus / cluster.gpus_per_node)
    mtbf_s = 3600 * options.mtbf / nodes
    key, configured = "checkpoint.interval", job.checkpoint.interval
    if job.checkpoint.memory_interval:
        key, configured = "checkpoint.memory_interval", job.checkpoint.memory_interval
        times = with_copies(times, size, job.checkpoint.interval)
        if configured == -1:
            configured = math.ceil((1 + PAUSE_PER_COPY) * (times.save + times.write) / times.step)
    intervals = {"configured": configured, "recommended": best_interval(times, mtbf_s)}
    return {
        "key": key,
        "mtbf_hours_of_node": options.mtbf,
        "nodes": nodes,
        "mtbf_hours_of_job": mtbf_s / 3600,
        "times_s": {name: getattr(times, name) for name in times.sources},
        "sources": times.sources,
        **{name: _as_json(predict(times, mtbf_s, n, num_steps)) for name, n in intervals.items()},
    }


def _as_json(goodput: Goodput) -> dict[str, Any]:
    hours = None if math.isinf(goodput.hours) else goodput.hours
    return {"goodput": goodput.share, **vars(goodput), "hours": hours}


def text(plan: Mapping[str, Any] | None) -> str:
    """Return a prediction as text."""
    if plan is None:
        return "no goodput, because this layout does not fit"
    columns = [plan["configured"], plan["recommended"]]
    times, sources = plan["times_s"], plan["sources"]
    rows = [[plan["key"], *(f"{column['interval']:,}" for column in columns)]]
    rows += [[cause, *(f"{column['shares'][cause]:.2%}" for column in columns)] for cause in CAUSES]
    rows.append(["steps again per failure", *(f"{column['repeated']:,.1f}" for column in columns)])
    hours = [column["hours"] for column in columns]
    rows.append(["time with failures", *("endless" if n is None else _hours(n) for n in hours)])
    step_s = times["step"] * (1 + times["pauses"])
    is_limited = columns[1]["interval"] == max(math.ceil(times["write"] / step_s), 1)
    return "\n".join(
        [
            f"goodput {columns[0]['goodput']:.2%}, or {columns[1]['goodput']:.2%} with --{plan['key']}="
            f"{columns[1]['interval']}; a failure every {_hours(plan['mtbf_hours_of_job'])} (--mtbf: every "
            f"{_hours(plan['mtbf_hours_of_node'])} per node; nodes: {plan['nodes']:,})",
            table(rows, num_texts=1),
            "the second interval is " + (LIMITED if is_limited else BEST),
            *(f"{name}: {times[name]:.3g} {UNITS.get(name, 's')} ({sources[name]})" for name in times),
            ASSUMPTIONS,
        ]
    )


def _hours(hours: float) -> str:
    """Such as `6,334 h`, `6.33 h` or `5.2 min`."""
    if hours < 1:
        return duration(3600 * hours)
    return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"
