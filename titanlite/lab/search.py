"""`titanlite tune CONFIG --section.key=LOW:HIGH:NUM`: train the runs of a search, and tell which did best."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from titanlite.config import toml
from titanlite.config.amount import DIVISIBLE, Amount
from titanlite.config.component import ConfigError
from titanlite.job import Job, load_job
from titanlite.lab.axes import Axis, take_axes
from titanlite.lab.halving import (
    SPREADS,
    Parabola,
    Rung,
    Trial,
    fit_parabola,
    grid,
    halve,
    neighbours,
    rungs,
    survivors,
    ties,
)
from titanlite.lab.trial_runs import Trainer, TrialRecord, TrialRun, beside_run, keys_of, stoppable
from titanlite.log import tell
from titanlite.progress import Progress
from titanlite.table import table

# Keys that decide how a step is computed or what is written, but not the loss; except INITIAL_WEIGHTS.
INITIAL_WEIGHTS = "checkpoint.initial_load_path"
SAME_LOSS = (
    "activation_checkpoint.", "checkpoint.", "comm.", "compile.", "data.cache_dir", "data.num_workers",
    "generation.", "job.", "metrics.", "parallelism.", "profiling.", "training.gc_freq",
)  # fmt: skip


class Run(NamedTuple):
    """A run: its rung, from 0, its settings, and its seed if that is not training.seed."""

    rung: int
    trial: Trial
    seed: int | None = None


@dataclass(frozen=True)
class Search:
    """A search: the job, what is tried, and where. `rest`: the overrides that all runs have. `other_seed`:
    the seed of the run that tells the noise; None for no such run. `record`: what has ended."""

    config: str
    rest: list[str]
    axes: list[Axis]
    plan: list[Rung]
    other_seed: int | None
    steps: int | Amount
    record: TrialRecord

    @property
    def folder(self) -> Path:
        return self.record.folder

    def label(self, trial: Trial) -> str:
        return " ".join(f"{axis.key}={value}" for axis, value in zip(self.axes, trial))

    def name(self, run: Run) -> str:
        """Path of the run below the folder of the search."""
        parts = [f"{axis.key.rpartition('.')[2]}={value}" for axis, value in zip(self.axes, run.trial)]
        parts += [] if run.seed is None else [f"seed={run.seed}"]
        return f"rung{run.rung + 1}/{re.sub(r'[^-+,.=0-9A-Za-z]+', '_', ','.join(parts))}"

    def overrides(self, run: Run) -> list[str]:
        """The overrides of one run."""
        words = [*self.rest, *(f"--{axis.key}={value}" for axis, value in zip(self.axes, run.trial))]
        words.append(f"--training.steps={_shorter(self.steps, self.plan[run.rung].divisor)}")
        words.append(f"--job.dump_folder={self.folder / self.name(run)}")
        return words if run.seed is None else [*words, f"--training.seed={run.seed}"]

    def to_train(self, run: Run) -> TrialRun:
        seed = "" if run.seed is None else f" training.seed={run.seed}"
        return TrialRun(self.name(run), [self.config, *self.overrides(run)], f"{self.label(run.trial)}{seed}")


def main(options: Namespace, overrides: Sequence[str]) -> int:
    """Run the search. Returns the exit code."""
    search = _open(options, *take_axes(overrides))
    sizes = ", ".join(f"{rung.num_runs} of {_shorter(search.steps, rung.divisor)}" for rung in search.plan)
    unit = "" if isinstance(search.steps, Amount) else " steps"
    tell(f"{len(grid(search.axes))} settings; runs: {sizes}{unit}; in {search.folder}")
    with stoppable() as requests:
        trainer = Trainer(search.record, options.gpus_per_trial, requests)
        losses = halve(
            grid(search.axes),
            search.plan,
            lambda i, trials: dict(zip(trials, _train(search, trainer, [Run(i, trial) for trial in trials]))),
        )
        noise = _noise(search, losses, trainer)
    if not survivors(losses[-1], 1):
        raise ConfigError("no run has a finite loss; try lower learning rates")
    last = len(losses) - 1
    page = search.record.write_report([search.name(Run(last, trial)) for trial in losses[-1]])
    print("\n".join([*_table(search, losses), *_conclusions(search, losses[-1], noise), f"report: {page}"]))
    return 0


def _open(options: Namespace, axes: list[Axis], rest: list[str]) -> Search:
    """The search of a command, with the results of an interrupted one. Checks every run's job. Raises
    ConfigError."""
    trials, plan = grid(axes), rungs(math.prod(len(axis.values) for axis in axes), options.rungs)
    first = [*rest, *(f"--{axis.key}={value}" for axis, value in zip(axes, trials[0]))]
    job = load_job(options.config, first, options.gpus_per_trial, allow_imports=True)
    try:
        _check(job, axes, len(plan))
    except ConfigError as e:
        raise toml.read(options.config, first)[1].located(e) from None
    other_seed = job.training.seed + 1 if options.seeds > 1 else None
    asked = {
        "job": keys_of(job),
        "axes": {axis.key: list(axis.values) for axis in axes},
        "rungs": [list(rung) for rung in plan],
        "other_seed": other_seed,
    }
    folder = options.output or beside_run(job, "_search")
    record = TrialRecord("search", folder, asked)
    search = Search(options.config, rest, axes, plan, other_seed, job.training.steps, record)
    with Progress(total=len(trials), desc="checking", unit="run", delay=2, leave=False) as progress:
        for trial in trials:
            overrides = search.overrides(Run(0, trial))
            load_job(options.config, overrides, options.gpus_per_trial, allow_imports=True)
            progress.update()
    if len({search.name(Run(0, trial)) for trial in trials}) < len(trials):
        raise ConfigError("command line: two of these values have the same letters and digits")
    record.read()
    return search


def _check(job: Job, axes: Sequence[Axis], num_rungs: int) -> None:
    """Raise ConfigError for a job whose runs cannot be compared."""
    if not job.validation.enable:
        raise ConfigError("a search compares validation losses; set this key to true", "validation.enable")
    for axis in axes:
        if axis.key in ("training.steps", "training.seed", "job.dump_folder"):
            raise ConfigError(f"command line, --{axis.key}: a search sets this key itself")
        is_batch = axis.key == "training.local_batch_size" and job.training.global_batch_size > 0
        if is_batch or (axis.key.startswith(SAME_LOSS) and axis.key != INITIAL_WEIGHTS):
            fixed = " with a fixed global_batch_size" * is_batch
            raise ConfigError(
                f"command line, --{axis.key}: a search compares losses, which this key does not "
                f"change{fixed}; compare speeds by --find-batch, or by runs"
            )
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


def _train(search: Search, trainer: Trainer, runs: Sequence[Run]) -> list[float]:
    """Train runs of one rung. Returns their losses; infinite for a run that diverged."""
    prefix = f"rung {runs[0].rung + 1} of {len(search.plan)}, "
    trainer.train([search.to_train(run) for run in runs], prefix)
    return [search.record.loss(search.name(run)) for run in runs]


def _noise(search: Search, losses: Sequence[dict[Trial, float]], trainer: Trainer) -> float | None:
    """The difference of losses below which two settings are equal: twice what another seed changes at the
    best setting. None without another seed."""
    best = survivors(losses[-1], 1)
    if search.other_seed is None or not best:
        return None
    (loss,) = _train(search, trainer, [Run(len(losses) - 1, best[0], search.other_seed)])
    return SPREADS * abs(loss - losses[-1][best[0]])


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
    """Lines on the best settings of the last rung."""
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
            lines.append(_best_value_line(i, axis, best, losses, noise))
    return lines


def _best_value_line(i: int, axis: Axis, best: Trial, losses: dict[Trial, float], noise: float | None) -> str:
    """Where the best value of a range lies, with the best values of all other axes."""
    if best[i] in (axis.values[0], axis.values[-1]):
        end = "low" if best[i] == axis.values[0] else "high"
        return f"{axis.key}: the best value is at the {end} end of the range; widen it"
    line = {t[i]: loss for t, loss in losses.items() if t[:i] + t[i + 1 :] == best[:i] + best[i + 1 :]}
    finite = {float(value): loss for value, loss in line.items() if math.isfinite(loss)}
    fit = fit_parabola(finite, noise)
    if fit is None:
        return f"{axis.key}: no parabola: the best value is not between two others that trained as long"
    text = f"a parabola through the best and the two beside it has its minimum at {fit.value:.3g}"
    between = _between(fit, neighbours(finite))
    return f"{axis.key}: {text}: {fit.loss:.4f}{between}"


def _between(fit: Parabola, tried: Sequence[float]) -> str:
    """The interval of an optimum, as far as it lies between the values that the parabola goes through."""
    if fit.low is None or fit.high is None:
        return ""
    low = f"{fit.low:.3g}" if fit.low >= tried[0] else f"at most {tried[0]:.3g}"
    high = f"{fit.high:.3g}" if fit.high <= tried[-1] else f"at least {tried[-1]:.3g}"
    return f", and is within the noise, of two seeds only, from {low} to {high}"
