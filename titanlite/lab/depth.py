"""`titanlite tune CONFIG --depth=N`: the settings of a model of the family gpt at another depth, from those
of CONFIG, as nanochat derives them from the settings that it tuned at depth 12.

With P the parameters that tokens are multiplied with, D the tokens of the run, B the tokens per step, and '
for the new depth:

    flavor             dN, from which all sizes follow
    tokens             D' = D P' / P
    tokens per step    B' = B (D' / D)^0.383, as the nearest power of two (arXiv 2505.13738), in whole
                       sequences
    learning rate      multiplied by r = sqrt(B' / B), and of embeddings and head also by sqrt(dim / dim');
                       smear and backout keep theirs
    weight decay       optimizer.weight_decay is multiplied by sqrt(B' / B) D / D', so that a step's share of
                       the run stays in proportion to it (arXiv 2405.13698)
    steps of schedules keep their share of the run, from the decay of the learning rate on; earlier ones stay,
                       as lr_scheduler.warmup_steps does
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from titanlite.config import toml
from titanlite.config.amount import Amount
from titanlite.config.component import ConfigError
from titanlite.config.paths import check_new, check_output_file
from titanlite.files import write_atomically
from titanlite.job import Job, load_job
from titanlite.models.base import Decoder
from titanlite.models.gpt import Gpt
from titanlite.optim.base import ParamGroup
from titanlite.optim.hyperparameters import HyperparameterSchedule
from titanlite.optim.muon import Muon
from titanlite.optim.points import Points
from titanlite.optim.warmup_stable_decay import WarmupStableDecay
from titanlite.start_log import job_toml_text

BATCH_EXPONENT = 0.383
SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim")


def main(options: Namespace, overrides: Sequence[str]) -> int:
    """Print the job at the new depth as TOML, or write it to --output. Returns the exit code."""
    if options.output:
        check_output_file(options.output)
        check_new(options.output, "--output")
    job = load_job(options.config, overrides, options.gpus_per_trial, allow_imports=True)
    try:
        other = at_depth(job, options.depth)
        other.check(options.gpus_per_trial)
    except ConfigError as e:
        raise toml.read(options.config, overrides)[1].located(e) from None
    text = job_toml_text(other, [f"from {options.config} by titanlite tune --depth={options.depth}"])
    if options.output:
        write_atomically(options.output, text)
        print(f"{options.output}: {other.model.title}")
    else:
        print(text, end="")
    return 0


def at_depth(job: Job, depth: int) -> Job:
    """The job with the model of this depth and the settings that follow. Raises ConfigError."""
    model, training, optimizer = job.model, job.training, job.optimizer
    _check(job)
    assert isinstance(training.steps, int)
    assert isinstance(optimizer, Muon)
    assert isinstance(job.lr_scheduler, WarmupStableDecay)
    if (flavor := f"d{depth}") not in model.flavors:
        known = ", ".join(name[1:] for name in model.flavors if name[1:].isdecimal())
        raise ConfigError(f"command line, --depth: {depth} is not one of {known}")
    other = replace(model, flavor=flavor)
    nets = model.build_on_meta(), other.build_on_meta()
    token_ratio = nets[1].num_matmul_parameters() / nets[0].num_matmul_parameters()
    batch = training.global_batch_size * training.seq_len
    new_tokens = 2 ** round(math.log2(batch * token_ratio**BATCH_EXPONENT))
    num_sequences = max(round(new_tokens / training.seq_len), 1)
    new_batch = num_sequences * training.seq_len
    steps = int(training.steps * batch * token_ratio) // new_batch
    rate, step_ratio = math.sqrt(new_batch / batch), steps / training.steps
    width = math.sqrt(model.config.dim / other.config.dim)
    decay = round(training.steps * (1 - job.lr_scheduler.decay_ratio))
    scaled = replace(
        optimizer,
        lr=rounded(optimizer.lr * rate),
        weight_decay=rounded(optimizer.weight_decay * rate / token_ratio),
        adamw_lr_multiplier=rounded(optimizer.adamw_lr_multiplier * width),
        param_groups=_regrouped(optimizer, nets[0], rate, width),
        schedules=[_stretched(schedule, step_ratio, decay) for schedule in optimizer.schedules],
    )
    return replace(
        job,
        model=other,
        optimizer=scaled,
        training=replace(training, steps=steps, global_batch_size=num_sequences),
        job=replace(job.job, dump_folder=f"{job.job.dump_folder.removesuffix(f'_{model.flavor}')}_{flavor}"),
    )


def _check(job: Job) -> None:
    """Raises ConfigError for settings that no rule scales."""
    if not isinstance(job.model, Gpt):
        raise ConfigError(f"--depth is for the model gpt; this one is {job.model.name}", "model.name")
    if sizes := [name for name in SIZES if name in job.model.overrides]:
        raise ConfigError(f"--depth sets {sizes[0]} itself", f"model.overrides.{sizes[0]}")
    if isinstance(job.training.steps, Amount) or job.stages or job.training.batch_ramp:
        raise ConfigError(
            "--depth needs training.steps as a number, without [[stages]] and batch_ramp", "training.steps"
        )
    if job.training.global_batch_size < 1:
        raise ConfigError("--depth needs the number of sequences per step", "training.global_batch_size")
    if not isinstance(job.optimizer, Muon):
        raise ConfigError("the rates of another depth are known for muon only", "optimizer.name")
    scheduler = job.lr_scheduler
    if not isinstance(scheduler, WarmupStableDecay):
        raise ConfigError("--depth is for warmup_stable_decay only", "lr_scheduler.name")
    for key, unset in (("total_steps", 0), ("decay_start", -1)):
        if getattr(scheduler, key) != unset:
            raise ConfigError(f"--depth does not scale {key}; use decay_ratio", f"lr_scheduler.{key}")


def _regrouped(optimizer: Muon, net: Decoder, rate: float, width: float) -> list[ParamGroup]:
    """The parameter groups, of which those of single numbers do without the factor of the width, and those of
    smear and backout without any. Raises ConfigError for a group that needs several factors."""
    factors = {"residual_mix": 1 / width, "smear": 1 / (rate * width), "backout": 1 / (rate * width)}
    groups = list(optimizer.param_groups)
    names_of = dict[int | None, list[str]]()
    for settings, names in optimizer.grouped(net).items():
        names_of.setdefault(settings.entry, []).extend(names)
    for entry, names in names_of.items():
        wanted = {factors.get(name.split(".")[-2], 1.0) for name in names}
        if len(wanted) > 1 or (entry is None and wanted != {1.0}):
            raise ConfigError(
                f"--depth needs groups of their own for {', '.join(factors)}", "optimizer.param_groups"
            )
        if entry is not None:
            multiplier = rounded(groups[entry].lr_multiplier * wanted.pop())
            groups[entry] = replace(groups[entry], lr_multiplier=multiplier)
    return groups


def rounded(value: float) -> float:
    """The value with four digits, which a file can show."""
    return float(f"{value:.4g}")


def _stretched(schedule: HyperparameterSchedule, step_ratio: float, decay: int) -> HyperparameterSchedule:
    """The schedule over another number of steps. `decay`: the step at which the learning rate begins to
    decay. Earlier steps stay, unless the decay then comes before them. Raises ConfigError for amounts."""

    def scaled(points: Points) -> Points:
        if any(isinstance(step, Amount) for step, _ in points):
            raise ConfigError("--depth needs numbers of steps in schedules", "optimizer.schedules")
        early = [step for step, _ in points if step < decay]
        stays = not early or early[-1] < decay * step_ratio
        return [
            [float(step if stays and step < decay else round(step * step_ratio)), number]
            for step, number in points
        ]

    return replace(schedule, factors=scaled(schedule.factors), values=scaled(schedule.values))
