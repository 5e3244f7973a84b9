"""`titanlite checkpoint average`: the average of several checkpoints of a run, as a new checkpoint. Its help
is in tools/checkpoint.py. Runs on the CPU and needs about five times the memory of the largest chunk."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from titanlite.checkpoint import commit
from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.find import checkpoints_below
from titanlite.checkpoint.state import listed, read_train
from titanlite.config.component import ConfigError
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.fetch import check_target, local_copy, new_target
from titanlite.interop.average import COEFFICIENTS, check_one_model, coefficients, write_average
from titanlite.interop.dcp import check_hashes, open_titanlite
from titanlite.interop.weights import Weights, check_own, skeleton
from titanlite.job import Job, load_recorded_job
from titanlite.log import set_up_logging
from titanlite.metrics.decisions import StepSequences
from titanlite.object_store import location
from titanlite.options import Options
from titanlite.progress import Progress

MAX_CHANGE = 1.1  # of the learning rate: the largest divided by the smallest
MAX_LISTED = 20  # steps named in an error message


def main(argv: Sequence[str]) -> int:
    """Write the average and print its path."""
    options = _options().read(argv)
    set_up_logging(rank=0, verbose=False)
    target: PurePath = options.output
    check_target(target, "--output")
    if re.fullmatch(r"step-\d+", target.name):
        raise ConfigError(f"{target}: runs name their own checkpoints step-N; choose another name")
    chosen = _chosen(options.path, options.last, options.steps)
    checkpoints = [open_titanlite(path) for _, path in chosen]
    check_one_model(checkpoints)
    jobs = [load_recorded_job(path, options.allow_imports) for _, path in chosen]
    if not options.allow_decayed:
        _check_learning_rates(jobs, [read_train(path) for _, path in chosen])
    parameters = _parameters(checkpoints[-1], jobs[-1])
    weights = coefficients(options.weights, len(chosen))
    total = sum(_file_bytes(checkpoint) + checkpoint.num_bytes for checkpoint in checkpoints)
    with Progress(total=total, desc="averaging", unit="B", unit_scale=True, delay=2) as bar:
        for checkpoint in checkpoints:
            check_hashes(checkpoint.path)
            bar.update(_file_bytes(checkpoint))
        with new_target(target) as folder:
            size = write_average(checkpoints, weights, parameters, folder, bar.update)
    steps = ", ".join(str(step) for step, _ in chosen)
    print(f"{target}: steps {steps} of {chosen[-1][1].parent}, {options.weights} weights, {gib(size)}")
    return 0


def _options() -> Options:
    options = Options(prog="titanlite checkpoint average")
    add = options.add
    add("path", type=location)
    add("--last", type=int)
    add("--steps", type=_steps)
    add("--weights", choices=list(COEFFICIENTS), default="uniform")
    add("-o", "--output", type=location, required=True)
    add("--allow-decayed", action="store_true")
    add(ALLOW_IMPORTS, action="store_true")
    return options


def _steps(text: str) -> list[int]:
    """`100,200,300` as numbers, in ascending order. Raises ArgumentTypeError."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of steps such as 100,200,300")
    return sorted({int(step) for step in text.split(",")})


def _chosen(path: PurePath, last: int | None, steps: list[int] | None) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints to average, oldest first: the `last` newest of a run, or the
    checkpoints of `steps`. Raises ConfigError unless these are at least two that exist."""
    if (last is None) == (steps is None):
        raise ConfigError("give --last=N, or --steps=A,B,...; see `titanlite checkpoint --help`")
    checkpoints = dict(checkpoints_below(path))
    has = f"{path} has {listed([str(step) for step in checkpoints], MAX_LISTED)}"
    if last is not None:
        if last > len(checkpoints):
            raise ConfigError(f"--last={last}, but there are {len(checkpoints)} checkpoints: {has}")
        steps = list(checkpoints)[-last:] if last > 0 else []
    assert steps is not None
    if missing := [step for step in steps if step not in checkpoints]:
        raise ConfigError(f"no checkpoint of step {missing[0]}: {has}")
    if len(steps) < 2:
        raise ConfigError("an average needs at least two checkpoints")
    return [(step, local_copy(checkpoints[step])) for step in steps]


def _check_learning_rates(jobs: Sequence[Job], trains: Sequence[dict[str, Any]]) -> None:
    """Raise ConfigError if the learning rate changes by more than a tenth among the checkpoints. The weights
    of a decayed step are an average of earlier ones already. `trains`: their train.json."""
    rates = {}
    for job, train in zip(jobs, trains):
        step, sequences = train["step"], StepSequences()
        sequences.load_state_dict(train["guard"]["sequences"])
        first_sequence, _ = sequences.between(step, step)
        stages = job.open_stages(train["global_batch_size"])
        rates[step] = job.learning_rate(stages, step, first_sequence)
    high, low = max(rates, key=lambda step: rates[step]), min(rates, key=lambda step: rates[step])
    if rates[high] > MAX_CHANGE * rates[low]:
        raise ConfigError(
            f"the learning rate is {rates[high]:.4g} at step {high} and {rates[low]:.4g} at step {low}: an "
            "average needs checkpoints of one learning rate. Choose other --steps, or pass --allow-decayed"
        )


def _parameters(weights: Weights, job: Job) -> set[str]:
    """The names of the parameters in a checkpoint. Raises CheckpointError if it is not one of its job."""
    net = job.build_on_meta() if job.lora.enable else skeleton(weights, job.model)
    check_own(weights, net)
    return {name for name, p in net.named_parameters() if p.requires_grad}


def _file_bytes(checkpoint: Weights) -> int:
    """The size of all files of a checkpoint."""
    return commit.total_size(commit.read_manifest(checkpoint.path))
