"""Find good settings by training (docs/tuning.md).

A search trains every combination of --section.key=LOW:HIGH:NUM (NUM values at equal ratios) and
--section.key=a,b, by successive halving over whole schedules; the lowest validation loss wins. --ladder
trains models of about --sizes parameters, by default CONFIG's divided by 2.5, 2.5^2, 2.5^3 and 2.5^4, for
`titanlite plan --fit`. The same command continues a stopped search or ladder. --depth prints the settings of
a gpt of another depth. --find-batch finds the largest training.local_batch_size that fits the GPU, --measure
the machine's speed for `titanlite plan --measured`.

--coordinate-check trains CONFIG's model at several widths for a few steps on random tokens, with the width
rules (muP) or, with --standard, without (docs/optimizers.md). The last lines set what the rules need for
--target-width, by default CONFIG's dim or, if the base width is not below it, the largest width. Exit code: 1
if the change of a block's output has a slope over the width of more than 0.1, or 0.15 if the widest model
has only 4 times the width of the narrowest."""

from __future__ import annotations

import json
import os
import platform
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.paths import check_output_file
from titanlite.config.resolve import amounts
from titanlite.files import write_atomically
from titanlite.job import Job, load_job
from titanlite.lab import depth, find_batch, ladder, measure, search
from titanlite.lab import width as rules
from titanlite.lab.coordinate_check import (
    Size,
    Slopes,
    SmallRun,
    averaged,
    largest_slope,
    measured_sizes,
    random_batches,
    slopes,
)
from titanlite.lab.verbs import tune_arguments
from titanlite.log import set_up_logging
from titanlite.models.base import ModelFamily
from titanlite.progress import Progress
from titanlite.runtime.process import device_name, pick_device

MAX_BLOCKS, MAX_IDS = 4, 1024
MAX_EXPERTS, MAX_CHOSEN = 8, 2  # of a layer, and of a token
BATCH = 4, 64  # sequences, tokens


def main(argv: Sequence[str]) -> int:
    """Run the search or the check. Returns the exit code."""
    options, overrides = tune_arguments(argv)
    if options.find_batch:
        return find_batch.main(options, overrides)
    if options.depth is not None:
        return depth.main(options, overrides)
    if options.measure:
        return measure.main(options, overrides)
    if options.ladder:
        return ladder.main(options, overrides)
    if not options.coordinate_check:
        return search.main(options, overrides)
    if options.output:
        check_output_file(options.output)
    set_up_logging(rank=0, verbose=False)
    job = load_job(options.config, overrides, None, allow_imports=True)
    try:
        return coordinate_check(job, options)
    except ConfigError as e:
        raise toml.read(options.config, overrides)[1].located(e) from None


def coordinate_check(job: Job, options: Namespace) -> int:
    """Measure all widths, and print the table and the settings of the target width. Returns the exit code."""
    job = job.resolved(job.parallelism.fewest_ranks)  # the amounts of optimizer.schedules
    for key in amounts(job.optimizer):
        raise ConfigError("the check opens no data, so it cannot count epochs", f"optimizer.{key}")
    runs = {width: at_width(job, width, options) for width in options.widths}
    num_ids = next(iter(runs.values())).model.config.vocab_size
    settings = [] if options.standard else _settings(job, options)
    device, seeds = pick_device(), range(job.training.seed, job.training.seed + options.seeds)
    sizes = {width: list[Mapping[str, Size]]() for width in runs}
    total = len(runs) * options.seeds * options.steps
    with Progress(total=total, desc="coordinate check", unit="step", delay=2, leave=False) as progress:
        for seed in seeds:
            batches = random_batches(options.steps, BATCH, num_ids, seed)
            for width, small in runs.items():
                sizes[width].append(measured_sizes(SmallRun(small, batches, seed, device), progress.update))
    mean = {width: averaged(measured) for width, measured in sizes.items()}
    slopes_of = slopes(mean)
    lines = [*slopes_table(mean, slopes_of, options.steps), verdict(slopes_of, options.widths), *settings]
    print("\n".join(lines))
    if options.output:
        write_atomically(options.output, _record(job, options, mean, slopes_of))
    return int(_fails(slopes_of, options.widths))


def _small(job: Job, widths: Sequence[int]) -> ModelFamily:
    """The job's model at the smallest width, with few blocks and experts, a small vocabulary, and heads so
    small that there are enough queries for at least one key and value head."""
    config, width = job.model.config, min(widths)
    rules.check_widths(config)
    head_dim, group = config.head_dim, config.n_heads // config.n_kv_heads
    query_features = config.n_heads * config.head_dim * width / config.dim
    while query_features < group * head_dim and head_dim % 4 == 0:
        head_dim //= 2
    kv_heads = max(int(query_features / (group * head_dim)), 1)
    fields = {
        "dim": width,
        "n_layers": min(config.n_layers, MAX_BLOCKS),
        "n_heads": kv_heads * group,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": min(config.vocab_size, MAX_IDS),
        **rules.hidden_dims_at(config, width),
    }
    if job.model.num_experts:
        fields |= {
            "n_experts": min(config.n_experts, MAX_EXPERTS),
            "n_experts_per_token": min(config.n_experts_per_token, MAX_CHOSEN),
        }
    return replace(job.model, overrides=job.model.overrides | fields)


def at_width(job: Job, width: int, options: Namespace) -> Job:
    """The job with the model and the optimizer that are measured at a width."""
    small = _small(job, options.widths)
    fields: dict[str, Any] = rules.shape_at(small.config, width)
    multiple = 1.0 if options.standard else width / options.base_width
    if not options.standard:
        rules.check_supported(job.model, job.optimizer)
        fields |= rules.scales_at(small.config, multiple)
    model = replace(small, overrides=small.overrides | fields)
    groups = rules.param_groups_at(job.optimizer, model.build_on_meta(), multiple)
    return replace(job, model=model, optimizer=replace(job.optimizer, param_groups=groups))


def _settings(job: Job, options: Namespace) -> list[str]:
    """Lines on the settings of the target width: what to put into its TOML file."""
    config, base = job.model.config, options.base_width
    target = options.target_width or (config.dim if config.dim > base else max(options.widths))
    if target == base:
        return ["", f"# width {base} is the base width: the settings stay"]
    fields = rules.shape_at(config, target) | rules.scales_at(config, target / base)
    net = replace(job.model, overrides=job.model.overrides | fields).build_on_meta()
    job.optimizer.check(net)
    groups = rules.param_groups_at(job.optimizer, net, target / base)
    head = f"# settings for width {target}, carried from width {base}"
    return ["", head, *rules.toml_lines(config, fields, groups)]


def slopes_table(
    sizes: Mapping[int, Mapping[str, Size]], slopes_of: Mapping[str, Slopes], steps: int
) -> list[str]:
    """The lines of the table: the change of each output by width, and the slopes."""
    widths = "".join(f"{width:>10}" for width in sizes)
    lines = [f"RMS of the change after {steps} steps, by width; slopes of the change and of the output"]
    lines.append(f"{'':12}{widths}{'change':>10}{'output':>10}")
    for name, slope in slopes_of.items():
        changes = "".join(f"{of_width[name].change:10.4f}" for of_width in sizes.values())
        output = "" if slope.output is None else f"{slope.output:+10.2f}"
        lines.append(f"{name:12}{changes}{slope.change:+10.2f}{output}")
    return lines


def _fails(slopes_of: Mapping[str, Slopes], widths: Sequence[int]) -> bool:
    return any(slope.excess > slope.limit(widths) for slope in slopes_of.values())


def verdict(slopes_of: Mapping[str, Slopes], widths: Sequence[int]) -> str:
    if not _fails(slopes_of, widths):
        return f"passed: all slopes are within {largest_slope(widths):.2g} of zero"
    name, worst = max(slopes_of.items(), key=lambda pair: pair[1].excess - pair[1].limit(widths))
    return f"failed: a slope of {name} is {worst.excess:.2f} from zero, more than {worst.limit(widths):.2g}"


def _record(
    job: Job, options: Namespace, sizes: Mapping[int, Mapping[str, Size]], slopes_of: Mapping[str, Slopes]
) -> str:
    """The JSON of --output: options, the job, all numbers, hardware and versions."""
    record = {
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "model": toml.as_tree(job.model),
        "optimizer": toml.as_tree(job.optimizer),
        "rms": {
            width: {name: size._asdict() for name, size in of_width.items()}
            for width, of_width in sizes.items()
        },
        "slopes": {name: slope._asdict() for name, slope in slopes_of.items()},
        "passed": not _fails(slopes_of, options.widths),
        "cpu_s": round(time.process_time(), 1),
        "device": device_name(pick_device()),
        "cpus": os.cpu_count(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    return json.dumps(record, indent=1) + "\n"
