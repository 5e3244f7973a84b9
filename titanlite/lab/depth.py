"""`titanlite tune CONFIG --depth=N`: the settings of a model of the family gpt at another depth, from those
of CONFIG, as nanochat derives them from the settings that it tuned at depth 12.

With P the parameters that tokens are multiplied with, D the tokens of the run, B the tokens per step, and '
for the new depth:

    flavor             dN, from which all sizes follow
    tokens             D' = D P' / P
    tokens per step    B' = B (D' / D)^0.383, as the nearest power of two (arXiv 2505.13738)
    learning rate      multiplied by r = sqrt(B' / B), and under AdamW's rule also by sqrt(dim / dim')
    weight decay       optimizer.weight_decay is multiplied by sqrt(B' / B) D / D', so that a step's share of
                       the run stays in proportion to it (arXiv 2405.13698)
    steps of schedules keep their share of the run
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from titanlite.config import toml
from titanlite.config.amount import Amount
from titanlite.config.component import ConfigError
from titanlite.files import write_atomically
from titanlite.job import Job, load_job
from titanlite.models.gpt import Gpt
from titanlite.optim.hyperparameters import HyperparameterSchedule
from titanlite.optim.muon import Muon
from titanlite.optim.points import Points
from titanlite.start_log import job_toml_text

BATCH_EXPONENT = 0.383


def main(options: Namespace, overrides: Sequence[str]) -> int:
    """Print the job at the new depth as TOML, or write it to --output. Returns the exit code."""
    job = load_job(options.config, overrides, options.gpus_per_trial, allow_imports=True)
    try:
        other = at_depth(job, options.depth)
        other.check(options.gpus_per_trial)
    except ConfigError as e:
        raise toml.read(options.config, overrides)[1].located(e) from None
    text = job_toml_text(other, [f"from {options.config} by titanlite tune --depth={options.depth}"])
    if options.output:
        write_atomically(options.output, text)
    else:
        print(text, end="")
    return 0


def at_depth(job: Job, depth: int) -> Job:
    """The job with the model of this depth and the settings that follow. Raises ConfigError."""
    model, training, optimizer = job.model, job.training, job.optimizer
    if not isinstance(model, Gpt) or (flavor := f"d{depth}") not in model.flavors:
        known = ", ".join(name for name in Gpt.flavors if name.startswith("d") and name != "debug")
        raise ConfigError(f"--depth is for the model gpt, whose depths are {known}", "model.name")
    if isinstance(training.steps, Amount) or job.stages or training.batch_ramp:
        raise ConfigError("--depth needs a number of steps of one size, without stages", "training.steps")
    if not isinstance(optimizer, Muon):
        raise ConfigError("the rates of another depth are known for muon only", "optimizer.name")
    other = replace(model, flavor=flavor)
    sizes = [net.num_matmul_parameters() for net in (model.build_on_meta(), other.build_on_meta())]
    length = sizes[1] / sizes[0]
    batch = training.global_batch_size * training.seq_len
    new_batch = 2 ** round(math.log2(batch * length**BATCH_EXPONENT))
    steps = int(training.steps * batch * length) // new_batch
    rate, share = math.sqrt(new_batch / batch), steps / training.steps
    width = math.sqrt(model.config.dim / other.config.dim)
    scaled = replace(
        optimizer,
        lr=rounded(optimizer.lr * rate),
        weight_decay=rounded(optimizer.weight_decay * rate / length),
        adamw_lr_multiplier=rounded(optimizer.adamw_lr_multiplier * width),
        schedules=[_stretched(schedule, share) for schedule in optimizer.schedules],
    )
    return replace(
        job,
        model=other,
        optimizer=scaled,
        training=replace(training, steps=steps, global_batch_size=new_batch // training.seq_len),
        job=replace(job.job, dump_folder=f"{job.job.dump_folder.removesuffix(f'_{model.flavor}')}_{flavor}"),
    )


def rounded(value: float) -> float:
    """The value with four digits, which a file can show."""
    return float(f"{value:.4g}")


def _stretched(schedule: HyperparameterSchedule, share: float) -> HyperparameterSchedule:
    """The schedule over another number of steps. Raises ConfigError for amounts, which keep their length."""

    def at_share(points: Points) -> Points:
        if any(isinstance(step, Amount) for step, _ in points):
            raise ConfigError("--depth needs numbers of steps in schedules", "optimizer.schedules")
        return [[float(round(step * share)), number] for step, number in points]

    return replace(schedule, factors=at_share(schedule.factors), values=at_share(schedule.values))
