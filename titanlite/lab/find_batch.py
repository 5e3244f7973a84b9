"""`titanlite tune CONFIG --find-batch`: find the largest micro-batch that fits, by runs of three steps.

Each size is trained in new processes, because an out-of-memory error leaves the allocator and NCCL
unusable. The first size is the largest that fits by the plan (lab/memory.py); what a run has measured
corrects the plan for the next one. docs/tuning.md says what the runs leave out."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import time
from argparse import Namespace
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from titanlite.config.component import ConfigError
from titanlite.files import make_folder
from titanlite.job import Job, load_job
from titanlite.lab.cards import GIB, Card, Cluster
from titanlite.lab.memory import rank_memory
from titanlite.lab.planned import PlannedRun, planned_run
from titanlite.lab.trial_runs import (
    LOOK_S,
    RunFailed,
    end_runs,
    groups_of_gpus,
    last_line,
    start_run,
    stoppable,
)
from titanlite.log import tell
from titanlite.metrics.memory import REMEDIES, OutOfMemory
from titanlite.report.recorded_run import Record, read_run
from titanlite.runtime.signals import Stopped, StopRequests
from titanlite.runtime.training import BatchLayout
from titanlite.table import table

STEPS = 3  # of each run; the first compiles
STEPS_WITH_GRAPHS = 8  # then a CUDA graph is recorded, and a step with a detailed report follows it
MAX_SHARE = 0.95  # of a GPU's memory that torch may reserve: CUDA and NCCL need memory, too
MAX_STARTS = 8  # two to four are usual
END_S = 60.0  # seconds that a run has to end after its third step, before it is killed
LEFT_OUT = [  # what the runs leave out: it takes no memory of a step, or writes files that nobody wants
    "--checkpoint.enable=false",
    "--guard.on_spike=log",  # "rewind" needs checkpoints
    "--validation.enable=false",
    "--generation.prompts=[]",
    "--profiling.enable_profiling=false",
    "--profiling.enable_memory_snapshot=false",
    "--metrics.sinks=[]",
    "--metrics.log_freq=1",
]


@dataclass(frozen=True)
class BatchTrial:
    """Measurements of a run with micro-batches of `size` sequences. GiB: the peak of its steps, on the GPU
    with most. `tokens_per_second`: of its last step, per GPU. `out_of_memory`: where the run ran out of
    memory, which leaves the numbers unknown."""

    size: int
    allocated_gib: float = math.nan
    reserved_gib: float = math.nan
    tokens_per_second: float = math.nan
    out_of_memory: str = ""

    def fits(self, card_gib: float) -> bool:
        return self.reserved_gib <= MAX_SHARE * card_gib  # false if unknown

    def result(self, card_gib: float) -> str:
        if self.out_of_memory:
            return self.out_of_memory
        return "fits" if self.fits(card_gib) else f"reserves more than {MAX_SHARE:.0%}"


def find(
    sizes: Sequence[int],
    planned_gib: Callable[[int], float],
    card_gib: float,
    train: Callable[[int], BatchTrial],
) -> list[BatchTrial]:
    """Train some of the ascending `sizes`, until the largest that fits and the next one, which does not fit,
    are known, or after MAX_STARTS runs of which one fits. If only one fits, one smaller size is trained as
    well, to compare their speed. Returns the trials by size."""
    trials = dict[int, BatchTrial]()
    low, high = -1, len(sizes)  # sizes[low] fits, sizes[high] does not
    limit, scale, misses = MAX_SHARE * card_gib, 1.0, 0  # scale: what is reserved / planned
    trusts_plan = True
    while high - low > 1 and (len(trials) < MAX_STARTS or low < 0):
        below = bisect_right(sizes, limit, low + 1, high, key=lambda size: scale * planned_gib(size))
        i = max(below - 1, low + 1) if trusts_plan else (low + high) // 2
        trial = trials[sizes[i]] = train(sizes[i])
        low, high = (i, high) if trial.fits(card_gib) else (low, i)
        if not trial.out_of_memory:
            scale = trial.reserved_gib / planned_gib(sizes[i])
        else:  # how much it needs is unknown: each time a larger step down
            scale = max(scale, limit / planned_gib(sizes[i])) * (1 + 0.1 * 2**misses)
            misses += 1
            trusts_plan = low < 0  # with a corrected plan no run should run out of memory
    if low > 0 and len(trials) < MAX_STARTS and not any(size < sizes[low] for size in trials):
        trials[sizes[low - 1]] = train(sizes[low - 1])
    return [trials[size] for size in sorted(trials)]


def micro_batches(job: Job, ranks: int) -> Iterator[int]:
    """The values of training.local_batch_size that a job may have with its global batch, in ascending order.
    If that is -1 and follows from them, they are at most 1/8 apart: 1 to 16, 18, 20, ..., 32, 36, ..."""
    given = job.training.local_batch_size
    whole = job.training.global_batch_size // job.parallelism.degrees(ranks).data_parallel
    follows = job.training.global_batch_size == -1
    largest = ((1 << 31) - 1) // job.training.seq_len
    for size in range(1, 1 + (largest if follows else min(largest, whole))):
        is_round = size % (1 << max(size.bit_length() - 4, 0)) == 0
        if not (is_round or size == given if follows else whole % size == 0):
            continue
        with suppress(ConfigError):
            _with_size(job, size).check(ranks)
            yield size


def _with_size(job: Job, size: int) -> Job:
    return replace(job, training=replace(job.training, local_batch_size=size))


class BatchTrainer:
    """Trains a job with one size of micro-batches after another, in runs of three steps."""

    def __init__(self, options: Namespace, overrides: Sequence[str], requests: StopRequests, folder: Path):
        self.config, self.overrides, self.ranks = options.config, overrides, options.gpus_per_trial
        self.job = load_job(self.config, overrides, self.ranks, allow_imports=True)
        self.card = gpu()
        self._slot = groups_of_gpus(self.ranks)[0]
        self._requests, self._folder = requests, folder
        self._run = planned_run(self.job, Cluster(self.card, self.ranks))

    def planned(self, size: int) -> PlannedRun:
        """The job with micro-batches of `size` sequences."""
        job = _with_size(self.job, size)
        batch = BatchLayout.from_training(job.training, self._run.degrees.data_parallel)
        return replace(self._run, job=job, global_batch=max(job.batch_sizes(batch.global_size).values()))

    def planned_gib(self, size: int) -> float:
        return max(rank.peak.total for rank in rank_memory(self.planned(size))) / GIB

    def sizes(self) -> list[int]:
        """The sizes to choose from, up to the first that is planned to take twice the memory of a GPU."""
        sizes = list[int]()
        for size in micro_batches(self.job, self.ranks):
            sizes.append(size)
            if self.planned_gib(size) > 2 * self.card.memory_gib:
                break
        return sizes

    def __call__(self, size: int) -> BatchTrial:
        """Train three steps. Raises Stopped and RunFailed."""
        name = f"local_batch_size={size}"
        tell(f"{name}: training {self.num_steps} steps; planned {self.planned_gib(size):.1f} GiB")
        folder, log = self._folder / name, self._folder / f"{name}.log"
        words = [*self.overrides, *self.own_overrides(size), f"--job.dump_folder={folder}"]
        process = start_run([self.config, *words], self.ranks, self._slot, log)
        try:
            while process.poll() is None and not self._requests.stop and not _records(folder, self.num_steps):
                time.sleep(LOOK_S)
        finally:
            end_runs([process], END_S)
        if self._requests.stop:
            raise Stopped("stopped; the runs have ended, and nothing is left of them")
        if process.returncode == OutOfMemory.exit_code:  # perhaps after its third step
            trial = _out_of_memory(size, log)
        elif records := _records(
            folder, 1 if process.returncode == 0 else self.num_steps
        ):  # a job may have fewer
            trial = _measured(size, records)
        else:
            raise RunFailed(self._failure(size, process.returncode, log))
        shutil.rmtree(folder, ignore_errors=True)
        tell(f"{name}: {_line(trial, self.card.memory_gib)}")
        return trial

    def own_overrides(self, size: int) -> list[str]:
        """The overrides of a run. More than two micro-batches per step take no more memory, except in a
        pipeline; stages end after numbers of sequences, which fewer per step might not reach."""
        run = self.planned(size)
        batch = BatchLayout.from_training(run.job.training, run.degrees.data_parallel).global_size
        if not self.has_whole_steps(size):
            batch = 2 * size * run.degrees.data_parallel
        own = [f"--training.local_batch_size={size}", f"--training.global_batch_size={batch}"]
        own += ["--training.batch_ramp=[]", "--training.batch_ramp_lr=none"]
        if self.job.metrics.detail_freq > 0:  # the report of step 1 leaves out what needs two steps
            own.append("--metrics.detail_freq=2")
        return [*own, *LEFT_OUT]

    @property
    def num_steps(self) -> int:
        """The number of steps of a run."""
        return STEPS_WITH_GRAPHS if self.job.compile.cuda_graphs else STEPS

    def has_whole_steps(self, size: int) -> bool:
        """Whether a step of a run has all micro-batches of the job's step."""
        run = self.planned(size)
        return run.degrees.pp > 1 or bool(self.job.stages) or run.num_micro_batches <= 2

    def _failure(self, size: int, code: int, log: Path) -> str:
        """The line on a run that has failed for another reason than memory. Keeps its log."""
        run = self.job.folder
        kept = (run if isinstance(run, Path) else Path(run.name)).with_name(f"{run.name}_find_batch.log")
        make_folder(kept.parent)
        shutil.copyfile(log, kept)
        ended = f"the run with training.local_batch_size={size} ended with exit code {code}"
        return f"{ended}{last_line(log)}; log: {kept}"


def gpu() -> Card:
    """The first GPU of this machine; its speeds are not read. Raises ConfigError if there is none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "command line, --find-batch: it measures the memory of a GPU, and there is none here"
        )
    about = torch.cuda.get_device_properties(0)
    return Card(about.name, about.total_memory / GIB, math.nan, math.nan)


def _records(folder: Path, step: int) -> list[Record]:
    """The records of a run, if the newest is of `step` or a later one; else none."""
    with suppress(ConfigError):  # there are no metrics yet
        records = read_run(folder, folder.name).records
        return records if records[-1]["step"] >= step else []
    return []


def _measured(size: int, records: Sequence[Record]) -> BatchTrial:
    def peak(kind: str) -> float:
        keys = f"memory/max_{kind}_gib", f"memory/peak_{kind}_gib"  # the first with several GPUs only
        return max(record[keys[0] if keys[0] in record else keys[1]] for record in records)

    speed = records[-1]["throughput/tokens_per_second_per_device"]
    return BatchTrial(size, peak("allocated"), peak("reserved"), speed)


def _out_of_memory(size: int, log: Path) -> BatchTrial:
    where = re.search(r"out of memory (in step \d+, [^(.:]+|before the first step)", _text(log))
    return BatchTrial(size, out_of_memory=where[0].strip() if where else "out of memory")


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def main(options: Namespace, overrides: Sequence[str]) -> int:
    """Find the largest micro-batch and print it. Returns the exit code."""
    with stoppable() as requests, tempfile.TemporaryDirectory(prefix="titanlite-find-batch-") as folder:
        trainer = BatchTrainer(options, overrides, requests, Path(folder))
        sizes, card = trainer.sizes(), trainer.card
        tell(
            f"{card.name}: {card.memory_gib:.1f} GiB, of which torch may reserve {MAX_SHARE:.0%}; "
            "the runs leave out validation, samples, checkpoints and exports"
        )
        trials = find(sizes, trainer.planned_gib, card.memory_gib, trainer)
    fitting = [trial for trial in trials if trial.fits(card.memory_gib)]
    lines = [_table(trials, trainer), *(_answer(fitting, trials, sizes, trainer) if fitting else [])]
    print("\n".join(lines))
    if not fitting:
        text = f"even training.local_batch_size={sizes[0]} does not fit. Settings that need less memory:"
        raise OutOfMemory(f"{text}{REMEDIES}")
    return 0


def _line(trial: BatchTrial, card_gib: float) -> str:
    if trial.out_of_memory:
        return trial.out_of_memory
    memory = f"{trial.allocated_gib:.1f} GiB allocated, {trial.reserved_gib:.1f} reserved"
    return f"{trial.result(card_gib)}: {memory}, {trial.tokens_per_second:,.0f} tokens/s per GPU"


def _table(trials: Sequence[BatchTrial], trainer: BatchTrainer) -> str:
    rows = [["result", "local_batch_size", "planned GiB", "allocated", "reserved", "tokens/s per GPU"]]
    for trial in trials:
        numbers = [trial.allocated_gib, trial.reserved_gib]
        measured = [f"{gib:.1f}" for gib in numbers] + [f"{trial.tokens_per_second:,.0f}"]
        cells = ["", "", ""] if trial.out_of_memory else measured
        planned = f"{trainer.planned_gib(trial.size):.1f}"
        rows.append([trial.result(trainer.card.memory_gib), str(trial.size), planned, *cells])
    return table(rows, num_texts=1)


def _answer(
    fitting: Sequence[BatchTrial], trials: Sequence[BatchTrial], sizes: Sequence[int], trainer: BatchTrainer
) -> list[str]:
    """The largest size that fits, and the fastest. A run with fewer micro-batches per step than the job has
    takes the optimizer's step more often, which makes small sizes look slow: it can show that a smaller
    size is faster, but not that the largest is the fastest."""
    largest = fitting[-1]
    fastest = max(fitting, key=lambda trial: trial.tokens_per_second)
    run = trainer.planned(largest.size)
    num, gpus = run.num_micro_batches, trainer.ranks
    step = f"a step of {run.global_batch:,} sequences on {gpus} GPU{'s' * (gpus > 1)}"
    num_text = f"{num:,} micro-batch{'es' * (num > 1)}"
    lines = [f"largest that fits: --training.local_batch_size={largest.size}; {step} takes {num_text}"]
    above = [trial.size for trial in trials if trial.size > largest.size]
    between = [size for size in sizes if largest.size < size < min(above, default=math.inf)]
    if between:
        lines.append(f"not tried after {len(trials)} runs: {', '.join(map(str, between))}")
    elif not above:
        lines.append(f"no larger size divides a step of {run.global_batch:,} sequences, or is planned to fit")
    if fastest is not largest:
        gain = fastest.tokens_per_second / largest.tokens_per_second - 1
        text = f"--training.local_batch_size={fastest.size}, {gain:.1%} faster than the largest"
        lines.append(f"fastest that fits: {text}")
    elif len(fitting) > 1 and all(trainer.has_whole_steps(trial.size) for trial in fitting):
        lines.append("it is also the fastest of those that fit")
    elif len(fitting) > 1:
        lines.append(
            "whether it is also the fastest is not known: the runs have at most two micro-batches per step, "
            "and with small sizes the job has more"
        )
    return lines
