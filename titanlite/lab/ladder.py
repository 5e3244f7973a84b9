"""`titanlite tune CONFIG --ladder`: train smaller models of a job, each with several numbers of tokens per
parameter, as the runs that a scaling law is fitted to."""

from __future__ import annotations

import math
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.config import toml
from titanlite.config.amount import Amount
from titanlite.config.component import ConfigError
from titanlite.files import write_atomically
from titanlite.job import Job, load_job
from titanlite.lab import width as rules
from titanlite.lab.cards import Cluster, known_card
from titanlite.lab.fit import MIN_RUNS, check_from_scratch
from titanlite.lab.layouts import DOES_NOT_FIT, assess
from titanlite.lab.planned import planned_run
from titanlite.lab.shapes import Shape, candidates, count, default_sizes, nearest
from titanlite.lab.trial_runs import LOSS, Trainer, TrialRecord, TrialRun, beside_run, keys_of, stoppable
from titanlite.log import tell
from titanlite.report.charts import short
from titanlite.runtime.process import device_name
from titanlite.runtime.training import BatchLayout
from titanlite.start_log import job_toml_text
from titanlite.table import table

FEW_STEPS = 1000  # a note asks for a smaller batch below


class Length(NamedTuple):
    """How long a job trains. `flops`: model FLOPs."""

    steps: int
    tokens: int
    flops: float


class LadderRun(NamedTuple):
    """A run of the ladder. `size`: the parameters, as on the command line. `ratio`: tokens per parameter."""

    size: str
    ratio: str
    job: Job
    shape: Shape
    length: Length

    @property
    def name(self) -> str:
        """Path of the run below the folder of the ladder."""
        return self.job.folder.name

    @property
    def about(self) -> str:
        parameters = f"{self.shape.parameters:,} parameters"
        return f"{parameters}, {self.ratio} tokens per parameter, {self.length.steps:,} steps"

    def to_train(self) -> TrialRun:
        return TrialRun(self.name, [f"{self.job.folder}.toml"], self.about)


def main(options: Namespace, overrides: Sequence[str]) -> int:
    """Write the runs and, without --write-only, train them. Returns the exit code."""
    job = load_job(options.config, overrides, options.gpus_per_trial, allow_imports=True)
    try:
        _check(job)
        runs = _runs(job, options)
    except ConfigError as e:
        raise toml.read(options.config, overrides)[1].located(e) from None
    # Sizes and ratios may differ, so that a command can add runs to the ladder of an earlier command.
    record = TrialRecord("ladder", _folder(job, options), {"job": keys_of(job), "standard": options.standard})
    record.read()
    texts = {Path(f"{run.job.folder}.toml"): job_toml_text(run.job, [run.about]) for run in runs}
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{path} differs from what this command writes; remove it, or name another folder "
                "with --output"
            )
    print("\n".join(_plan(job, runs, options)), flush=True)
    record.write()
    for path, text in texts.items():
        write_atomically(path, text)
    if options.write_only:
        print(f"written to {record.folder}: one TOML file for each run, to train with `titanlite launch`")
        return 0
    with stoppable() as requests:
        Trainer(record, options.gpus_per_trial, requests).train([run.to_train() for run in runs])
    page = record.write_report([run.name for run in runs])
    finite = [name for name in record.results if math.isfinite(record.loss(name))]
    if not finite:
        raise ConfigError("no run has a finite loss; try lower learning rates")
    whole = len(finite) == len(record.results)
    folders = [record.folder] if whole else [record.folder / name for name in finite]
    command = shlex.join(["titanlite", "plan", options.config, *overrides, "--fit", *map(str, folders)])
    print("\n".join([_losses(runs, record), f"report: {page}", f"next, the law: {command}"]))
    return 0


def _folder(job: Job, options: Namespace) -> Path:
    return options.output or beside_run(job, "_ladder")


def _check(job: Job) -> None:
    """Raise ConfigError for a job whose smaller models cannot be compared with it."""
    if not job.validation.enable:
        raise ConfigError("a ladder compares validation losses; set this key to true", "validation.enable")
    for key in ("total_steps", "decay_start"):
        if getattr(job.lr_scheduler, key, 0) not in (0, -1):
            raise ConfigError(
                "the schedule of each run must end with the run: leave it out", f"lr_scheduler.{key}"
            )
    for key, given in (("stages", job.stages), ("training.batch_ramp", job.training.batch_ramp)):
        if given:
            raise ConfigError(f"shorter runs would have other parts of it; --{key}=[] leaves it out", key)
    check_from_scratch(job, "the smaller models of a ladder start from random weights")


def _runs(job: Job, options: Namespace) -> list[LadderRun]:
    """The runs, the smallest models first. Raises ConfigError."""
    num_ranks, folder = options.gpus_per_trial, _folder(job, options)
    batch = BatchLayout.from_training(
        job.training, job.parallelism.degrees(num_ranks).data_parallel
    ).global_size
    runs = list[LadderRun]()
    for size, shape in _shapes(job, options).items():
        smaller = _smaller(job, shape, options.standard)
        for ratio in options.ratios:
            steps = Amount(Fraction(ratio), "tokens/parameter")
            training = replace(job.training, steps=steps, global_batch_size=batch)  # type: ignore[arg-type]
            place = replace(job.job, dump_folder=str(folder / f"size={size},ratio={ratio}"))
            trained = replace(smaller, training=training, job=place)
            trained.check_folders()
            try:
                trained.check(num_ranks)
                length = _length(trained, num_ranks)
            except ConfigError as e:
                if e.key != "training.steps":
                    raise
                raise ConfigError(f"command line, --ratios: with {size} parameters, {e}") from None
            runs.append(LadderRun(size, ratio, trained, shape, length))
    return runs


def _shapes(job: Job, options: Namespace) -> dict[str, Shape]:
    """The models by their sizes, as on the command line. Sizes that the command line does not name are left
    out if they have no model. Raises ConfigError."""
    candidate_shapes, whole = candidates(job.model), count(job.model, {})
    sizes = options.sizes or {short(size): size for size in default_sizes(whole)}
    shapes = dict[str, Shape]()
    for text, size in sizes.items():
        if size >= whole:
            raise ConfigError(f"command line, --sizes: {text} is not below the job's {whole:,} parameters")
        if shape := nearest(candidate_shapes, size):
            if shape.parameters >= whole:
                raise ConfigError(f"command line, --sizes: {text} is the job's own model")
            if shape in shapes.values():
                raise ConfigError(f"command line, --sizes: {text} is the same model as the size before")
            shapes[text] = shape
            continue
        near = min(
            (other.parameters for other in candidate_shapes), key=lambda other: abs(math.log(other / size))
        )
        missing = f"no smaller model of this kind has {text} parameters; the nearest has {near:,}"
        if options.sizes:
            raise ConfigError(f"command line, --sizes: {missing}")
        tell(f"left out: {missing}")
    if not shapes:
        raise ConfigError("command line, --ladder: none of the default sizes has a model; name --sizes")
    return shapes


def _smaller(job: Job, shape: Shape, standard: bool) -> Job:
    """The job with a smaller model. Its settings are carried from the job's width by the width rules, unless
    `standard`. Raises ConfigError."""
    config = job.model.config
    multiple = 1.0 if standard else shape.fields["dim"] / config.dim
    fields: dict[str, Any] = dict(shape.fields)
    if not standard:
        try:
            rules.check_supported(job.model, job.optimizer)
        except ConfigError as e:
            raise ConfigError(f"{e}; --standard keeps the settings of CONFIG at every size", e.key) from None
        fields |= rules.scales_at(config, multiple)
    model = replace(job.model, overrides=job.model.overrides | fields)
    net = model.build_on_meta()
    optimizer = replace(job.optimizer, param_groups=rules.param_groups_at(job.optimizer, net, multiple))
    optimizer.check(net, job.parallelism.tensor_parallel_degree)
    return replace(job, model=model, optimizer=optimizer)


def _length(job: Job, num_ranks: int) -> Length:
    """How long a job without stages trains on `num_ranks` ranks; its steps must be known."""
    training = job.resolved(num_ranks).training
    batch = BatchLayout.from_training(training, job.parallelism.degrees(num_ranks).data_parallel)
    tokens = training.steps * batch.global_size * training.seq_len
    return Length(training.steps, tokens, tokens * job.build_on_meta().flops_per_token(training.seq_len))


# ---- what is printed


def _plan(job: Job, runs: Sequence[LadderRun], options: Namespace) -> list[str]:
    """The models, the runs, and what they cost."""
    shapes, num_gpus = {run.size: run.shape for run in runs}, options.gpus_per_trial
    keys = ["dim", "n_layers", "n_heads", "n_kv_heads", *rules.hidden_dims(job.model.config)]
    models = [["size", "parameters", *keys]]
    for size, shape in shapes.items():
        models.append([size, f"{shape.parameters:,}", *(str(shape.fields[key]) for key in keys)])
    # pick_device would make a CUDA context, whose memory the runs need.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = known_card(device_name(device))
    rows = [["size", "tokens/parameter", "tokens", "steps", "FLOPs", *(["GPU hours"] if card else [])]]
    for run in runs:
        steps, tokens, flops = run.length
        rows.append([run.size, run.ratio, f"{tokens:,}", f"{steps:,}", f"{flops:.3g}"])
        rows[-1] += [_gpu_hours(run, Cluster(card, num_gpus, num_gpus))] if card else []
    base, total = job.model.config.dim, sum(run.length.flops for run in runs)
    rule = "as in CONFIG" if options.standard else f"carried from width {base} by the width rules (muP)"
    lines = [table(models, num_texts=1), "", table(rows, num_texts=1), "", f"settings {rule}"]
    lines.append(f"{len(runs)} runs of {total:.3g} FLOPs together")
    if isinstance(job.resolved(num_gpus).training.steps, int):
        lines[-1] += f", {total / _length(job, num_gpus).flops:.2g} times those of CONFIG"
    if card:
        lines.append(f"GPU hours of {card.name}, as `titanlite plan` computes them; small models take longer")
    if len(runs) < MIN_RUNS:
        lines.append(
            f"note: `titanlite plan --fit` needs {MIN_RUNS} runs or more; the same command with other "
            "--sizes or --ratios adds some"
        )
    if few := sum(run.length.steps < FEW_STEPS for run in runs):
        lines.append(
            f"note: {few} of {len(runs)} runs have fewer than {FEW_STEPS:,} steps; a smaller "
            "training.global_batch_size gives them more"
        )
    return lines


def _gpu_hours(run: LadderRun, cluster: Cluster) -> str:
    """The GPU hours of a run, by the plan's step time, or that it does not fit."""
    layout = assess(planned_run(run.job, cluster), cluster)
    hours = run.length.tokens / layout.time.tokens_per_second / 3600 * cluster.gpus
    return DOES_NOT_FIT if layout.verdict == DOES_NOT_FIT else f"{hours:.3g}"


def _losses(runs: Sequence[LadderRun], record: TrialRecord) -> str:
    """The final losses of the runs."""
    rows = [["size", "tokens/parameter", "parameters", "tokens", LOSS]]
    for run in runs:
        loss = record.loss(run.name)
        sizes = short(run.shape.parameters), short(run.length.tokens)
        rows.append([run.size, run.ratio, *sizes, f"{loss:.4f}" if math.isfinite(loss) else "diverged"])
    return table(rows, num_texts=1)
