"""`titanlite tune CONFIG --section.key=LOW:HIGH:NUM`: train the runs of a search, and tell which did best.

Each run is an ordinary run in a folder of its own, started as `titanlite launch` with one or more GPUs to
itself. What has ended is recorded in search.json: the same command continues after any stop."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.run_identity import differences
from titanlite.config import toml
from titanlite.config.amount import DIVISIBLE, Amount
from titanlite.config.axes import Axis, take_axes
from titanlite.config.component import ConfigError
from titanlite.files import make_folder, write_atomically
from titanlite.job import Job, load_job
from titanlite.log import tell
from titanlite.planning.search import (
    SPREADS,
    Rung,
    Trial,
    grid,
    halve,
    optimum,
    rungs,
    survivors,
    ties,
)
from titanlite.progress import Progress
from titanlite.report.page import report
from titanlite.report.recorded_run import read_run
from titanlite.report.terminal import table
from titanlite.report.timeline import duration
from titanlite.runtime.environment import visible_gpus, with_gpus
from titanlite.runtime.signals import Stopped, stop_requests

LOSS = "eval/loss"
DIVERGED = 4  # exit code of a run
LOOK_S = 0.2  # seconds between two looks at the processes
STATUS_S = 60.0  # seconds between two lines on runs under way


class RunFailed(RuntimeError):
    """A run of the search crashed or was refused."""

    exit_code = 1


class Run(NamedTuple):
    """A run: its rung, from 0, its settings, and its seed if that is not training.seed."""

    rung: int
    trial: Trial
    seed: int | None = None


class Running(NamedTuple):
    """A run under way. `slot`: the ids of its GPUs; empty on a CPU. `started`: time.monotonic()."""

    process: subprocess.Popen[bytes]
    slot: str
    started: float


@dataclass(frozen=True)
class Search:
    """A search: the job, what is tried, and where. `rest`: the overrides that all runs have. `job`: the keys
    of the first run. `other_seed`: the seed of the run that tells the noise; None for no such run. `results`:
    what has ended, by run."""

    config: str
    rest: list[str]
    axes: list[Axis]
    plan: list[Rung]
    folder: Path
    num_gpus: int
    job: dict[str, Any]
    other_seed: int | None
    steps: int | Amount
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def label(self, trial: Trial) -> str:
        return " ".join(f"{axis.key}={value}" for axis, value in zip(self.axes, trial))

    def name(self, run: Run) -> str:
        """The run's folder, below that of the search."""
        parts = [f"{axis.key.rpartition('.')[2]}={value}" for axis, value in zip(self.axes, run.trial)]
        parts += [] if run.seed is None else [f"seed={run.seed}"]
        return f"rung{run.rung + 1}/{re.sub(r'[^-+,.=0-9A-Za-z]+', '_', ','.join(parts))}"

    def overrides(self, run: Run) -> list[str]:
        """The overrides of one run."""
        words = [*self.rest, *(f"--{axis.key}={value}" for axis, value in zip(self.axes, run.trial))]
        words.append(f"--training.steps={_shorter(self.steps, self.plan[run.rung].divisor)}")
        words.append(f"--job.dump_folder={self.folder / self.name(run)}")
        return words if run.seed is None else [*words, f"--training.seed={run.seed}"]

    def loss(self, run: Run) -> float:
        """The recorded loss of a run; infinite if it diverged."""
        loss = self.results[self.name(run)]["loss"]
        return math.inf if loss is None else float(loss)

    @property
    def record(self) -> dict[str, Any]:
        """What a command must have in common with the one that it continues."""
        return {
            "job": self.job,
            "axes": {axis.key: list(axis.values) for axis in self.axes},
            "rungs": [list(rung) for rung in self.plan],
            "other_seed": self.other_seed,
        }


def main(options: Namespace, overrides: Sequence[str]) -> int:
    """Run the search. Returns the exit code."""
    search = _open(options, *take_axes(overrides))
    sizes = ", ".join(f"{rung.num_runs} of {_shorter(search.steps, rung.divisor)}" for rung in search.plan)
    unit = "" if isinstance(search.steps, Amount) else " steps"
    tell(f"{len(grid(search.axes))} settings; runs: {sizes}{unit}; in {search.folder}")
    with stop_requests() as requests:
        requests.begin(stop_file=None)
        train = _Trainer(search, requests)
        losses = halve(grid(search.axes), search.plan, train)
        noise = _noise(search, losses, train)
    if not survivors(losses[-1], 1):
        raise ConfigError("no run has a finite loss; try lower learning rates")
    last = len(losses) - 1
    folders = [search.folder / search.name(Run(last, trial)) for trial in losses[-1]]
    page = search.folder / "report.html"
    write_atomically(page, report([read_run(folder, folder.name) for folder in folders]))
    print("\n".join([*_table(search, losses), *_conclusions(search, losses[-1], noise), f"report: {page}"]))
    return 0


def _open(options: Namespace, axes: list[Axis], rest: list[str]) -> Search:
    """The search of a command, with the results of an interrupted one. Checks every run's job. Raises
    ConfigError."""
    trials, plan = grid(axes), rungs(math.prod(len(axis.values) for axis in axes), options.rungs)
    first = [*rest, *(f"--{axis.key}={value}" for axis, value in zip(axes, trials[0]))]
    job = load_job(options.config, first, options.gpus_per_trial, allow_imports=True)
    _check(job, axes, len(plan))
    search = Search(
        config=options.config,
        rest=rest,
        axes=axes,
        plan=plan,
        folder=options.output or Path(f"{job.job.dump_folder}_search"),
        num_gpus=options.gpus_per_trial,
        job=_keys(job),
        other_seed=job.training.seed + 1 if options.seeds > 1 else None,
        steps=job.training.steps,
    )
    with Progress(total=len(trials), desc="checking", unit="run", delay=2, leave=False) as progress:
        for trial in trials:
            overrides = search.overrides(Run(0, trial))
            load_job(options.config, overrides, options.gpus_per_trial, allow_imports=True)
            progress.update()
    if len({search.name(Run(0, trial)) for trial in trials}) < len(trials):
        raise ConfigError("command line: two of these values have the same letters and digits")
    _read_results(search)
    return search


def _keys(job: Job) -> dict[str, Any]:
    """All keys of a job but its run folder, as JSON values."""
    tree = json.loads(json.dumps(toml.as_tree(job), default=str))
    del tree["job"]["dump_folder"]
    return dict(tree)


def _check(job: Job, axes: Sequence[Axis], num_rungs: int) -> None:
    """Raise ConfigError for a job whose runs cannot be compared."""
    if not job.validation.enable:
        raise ConfigError("a search compares validation losses: set it to true", "validation.enable")
    for axis in axes:
        if axis.key in ("training.steps", "training.seed", "job.dump_folder"):
            raise ConfigError(f"command line, --{axis.key}: a search sets this key itself")
    if num_rungs == 1:
        return
    advice = "; --rungs=1 trains every run whole"
    if getattr(job.lr_scheduler, "total_steps", 0):
        text = f"the schedule of each run must end with the run: leave it out{advice}"
        raise ConfigError(text, "lr_scheduler.total_steps")
    for key, given in (("stages", job.stages), ("training.batch_ramp", job.training.batch_ramp)):
        if given:
            raise ConfigError(f"shorter runs would have other parts of it{advice}", key)


def _shorter(steps: int | Amount, divisor: int) -> int | Amount:
    """A part of training.steps."""
    if isinstance(steps, Amount):
        value = steps.value / divisor
        return Amount(value if steps.unit in DIVISIBLE else Fraction(int(value)), steps.unit)
    return max(1, steps // divisor)


def _read_results(search: Search) -> None:
    """Take over the results of an interrupted search with the same command."""
    path = search.folder / "search.json"
    if not path.exists():
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        results = recorded.pop("results")
    except (ValueError, KeyError) as e:
        raise ConfigError(f"{path}: damaged ({e}); name another folder with --output") from None
    if changed := [key for key, _, _ in differences(recorded, search.record)]:
        raise ConfigError(
            f"{search.folder} holds another search, with another {', '.join(changed)}; name another folder "
            "with --output"
        )
    search.results.update(results)


def groups_of_gpus(size: int) -> list[str]:
    """The ids of the GPUs that each run under way has to itself; one empty text on a CPU. Raises ConfigError
    if there are fewer than `size` GPUs."""
    ids = visible_gpus(torch.cuda.device_count())
    if ids and size > len(ids):
        raise ConfigError(f"command line, --gpus-per-trial: {size}, but there are {len(ids)} GPUs")
    return [",".join(ids[i : i + size]) for i in range(0, len(ids) - size + 1, size)] or [""]


class _Trainer:
    """Trains runs, as many at a time as there are groups of GPUs; on a CPU one."""

    def __init__(self, search: Search, requests: Any):
        self._search, self._requests = search, requests
        self._free = groups_of_gpus(search.num_gpus)
        self._running = dict[str, Running]()
        self._told_at = time.monotonic()

    def __call__(self, rung: int, trials: list[Trial]) -> dict[Trial, float]:
        """The losses of the trials after rung `rung`; infinite for a run that diverged."""
        self.train([Run(rung, trial) for trial in trials])
        return {trial: self._search.loss(Run(rung, trial)) for trial in trials}

    def train(self, runs: Sequence[Run]) -> None:
        """Train the runs that have no result yet. Raises Stopped and RunFailed."""
        search, failed = self._search, list[str]()
        waiting = [run for run in runs if search.name(run) not in search.results]
        total = len(waiting)
        try:
            while waiting or self._running:
                while waiting and self._free and not self._requests.stop:
                    self._start(waiting.pop(0), f"{total - len(waiting)} of {total}")
                failed += [text for text in map(self._ended, list(self._running)) if text]
                if self._requests.stop:
                    break
                if time.monotonic() - self._told_at >= STATUS_S:
                    self._tell_status()
                time.sleep(LOOK_S)
        finally:  # after an error, too, no run is left without its parent
            self._stop()
        if self._requests.stop:
            raise Stopped(f"stopped; the same command continues the search in {search.folder}")
        if failed:
            raise RunFailed(f"{'; '.join(failed)}; the same command trains what is left")

    def _start(self, run: Run, number: str) -> None:
        search, slot = self._search, self._free.pop(0)
        name = search.name(run)
        log = search.folder / f"{name}.log"
        make_folder(log.parent)
        self._record()
        command = [sys.executable, "-m", "titanlite.cli", "launch", f"--nproc-per-node={search.num_gpus}"]
        command += [search.config, *search.overrides(run)]
        with log.open("ab") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=with_gpus(slot))
        self._running[name] = Running(process, slot, time.monotonic())
        text = f"{search.label(run.trial)}{'' if run.seed is None else f' training.seed={run.seed}'}"
        tell(f"rung {run.rung + 1} of {len(search.plan)}, run {number}: {text}; log: {log}")

    def _ended(self, name: str) -> str | None:
        """Record the result of a run that has ended. Returns what was wrong with it."""
        code = self._running[name].process.poll()
        if code is None:
            return None
        running, folder = self._running.pop(name), self._search.folder / name
        self._free.append(running.slot)
        if code == Stopped.exit_code and self._requests.stop:
            return None
        if code not in (0, DIVERGED):
            return f"{name} ended with exit code {code}, see {folder}.log"
        seconds = time.monotonic() - running.started
        loss = read_run(folder, name).last(LOSS) if code == 0 else None
        self._search.results[name] = {"loss": loss, "seconds": round(seconds, 1)}
        self._record()
        tell(f"{name}: {'diverged' if loss is None else f'{loss:.4f}'} after {duration(seconds)}")
        return None

    def _tell_status(self) -> None:
        self._told_at = time.monotonic()
        for name in self._running:
            with suppress(ConfigError):  # there are no metrics yet
                record = read_run(self._search.folder / name, name).records[-1]
                tell(f"{name}: step {record['step']}, loss {record.get('train/loss', math.nan):.4f}")

    def _stop(self) -> None:
        """Stop the runs under way, which save, and wait for them."""
        for running in self._running.values():
            running.process.send_signal(signal.SIGTERM)
        for name, running in list(self._running.items()):
            running.process.wait()
            self._ended(name)

    def _record(self) -> None:
        content = self._search.record | {"results": self._search.results}
        write_atomically(self._search.folder / "search.json", json.dumps(content, indent=1) + "\n")


def _noise(search: Search, losses: Sequence[dict[Trial, float]], train: _Trainer) -> float | None:
    """The difference of losses below which two settings are equal: twice what another seed changes at the
    best setting. None without another seed."""
    best = survivors(losses[-1], 1)
    if search.other_seed is None or not best:
        return None
    run = Run(len(losses) - 1, best[0], search.other_seed)
    train.train([run])
    return SPREADS * abs(search.loss(run) - losses[-1][best[0]])


def _table(search: Search, losses: Sequence[dict[Trial, float]]) -> list[str]:
    """The losses of all runs by rung; the longest trained first, best first."""
    ranked = {
        trial: None for of_rung in reversed(losses) for trial in sorted(of_rung, key=of_rung.__getitem__)
    }
    head = [f"loss after {_shorter(search.steps, rung.divisor)}" for rung in search.plan[: len(losses)]]
    rows = [[*(axis.key for axis in search.axes), *head]]
    for trial in ranked:
        cells = [f"{of_rung[trial]:.4f}" if trial in of_rung else "" for of_rung in losses]
        rows.append([*trial, *cells])
    return table(rows, num_texts=0).splitlines()


def _conclusions(search: Search, losses: dict[Trial, float], noise: float | None) -> list[str]:
    """What the last rung says."""
    (best,) = survivors(losses, 1)
    settings = " ".join(f"--{axis.key}={value}" for axis, value in zip(search.axes, best))
    lines = [f"best: {settings} with {losses[best]:.4f}"]
    if noise == math.inf:
        lines.append("with another seed the best setting diverges: choose a safer one")
    elif noise is not None:
        equal = ties(losses, noise)
        names = "; ".join(f"{search.label(trial)} ({losses[trial]:.4f})" for trial in equal)
        lines.append(f"noise: {noise:.4f}, twice the change by another seed at the best")
        lines += [f"not to be told from the best: {names}"] if equal else []
    for i, axis in enumerate(search.axes):
        if axis.is_range:
            lines.append(_optimum_line(i, axis, best, losses, noise))
    return lines


def _optimum_line(i: int, axis: Axis, best: Trial, losses: dict[Trial, float], noise: float | None) -> str:
    """Where the best value of a range lies, with the best values of all other axes."""
    if best[i] in (axis.values[0], axis.values[-1]):
        end = "low" if best[i] == axis.values[0] else "high"
        return f"{axis.key}: the best value is at the {end} end of the range; widen it"
    line = {t[i]: loss for t, loss in losses.items() if t[:i] + t[i + 1 :] == best[:i] + best[i + 1 :]}
    finite = {float(value): loss for value, loss in line.items() if math.isfinite(loss)}
    fit = optimum(list(finite), list(finite.values()), noise)
    if fit is None:
        return (
            f"{axis.key}: no parabola through the {len(finite)} runs that trained longest has a minimum there"
        )
    between = (
        "" if fit.low is None else f", and is within the noise of it from {fit.low:.3g} to {fit.high:.3g}"
    )
    text = f"a parabola through {len(finite)} losses has its minimum at {fit.value:.3g}: {fit.loss:.4f}"
    return f"{axis.key}: {text}{between}"
