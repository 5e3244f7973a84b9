"""Job: the schema of a TOML file. Each section and its rules are defined in the module that uses the section.

Importing this module registers the components in the folders of titanlite; `[job] imports` adds components of
other packages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import torch

import titanlite.object_store  # noqa: F401  (registers its storages)
from titanlite.attention.auto import Auto
from titanlite.attention.base import AttentionBackend
from titanlite.checkpoint.commit import MANIFEST
from titanlite.checkpoint.section import Checkpoint
from titanlite.config import toml
from titanlite.config.amount import Amount, Conversion
from titanlite.config.component import ConfigError
from titanlite.config.imports import import_components, import_folders
from titanlite.config.paths import UrlText, check_name, check_writable
from titanlite.config.resolve import amounts, resolve
from titanlite.data.dataset import Data
from titanlite.data.sources import short_names
from titanlite.data.step_sizes import StepSizes
from titanlite.data.stream_sequences import check_streamed_run
from titanlite.evaluate import Validation
from titanlite.generate import Generation
from titanlite.log import tell
from titanlite.losses import ChunkedCrossEntropy, Loss
from titanlite.metrics.guard import Guard
from titanlite.metrics.meter import Metrics
from titanlite.metrics.profiling import Profiling
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.load_balance import LoadBalance
from titanlite.models.lora import LoRA
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import Optimizer
from titanlite.optim.ema import EMA
from titanlite.optim.schedule import LRScheduler
from titanlite.optim.warmup_stable_decay import WarmupStableDecay
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint
from titanlite.parallel.compile import Compile
from titanlite.parallel.expert_parallel import check_expert_parallel
from titanlite.parallel.float8 import Float8
from titanlite.parallel.pipeline_parallel import check_pipeline_parallel
from titanlite.parallel.reshard import StepMemory
from titanlite.parallel.same_bits import check_same_bits
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Parallelism, check_data_parallel_only
from titanlite.runtime import environment
from titanlite.runtime.process_group import Comm
from titanlite.runtime.training import BatchLayout, Training
from titanlite.stages import (
    Stage,
    Stages,
    check_sources_are_read,
    check_stages,
    count_ends,
    settings_of,
    uncounted_ends,
)
from titanlite.storage import parse_path, storage_of
from titanlite.tokenizers.base import Tokenizer, TokenizerConfig
from titanlite.tokenizers.tiktoken import Tiktoken

import_folders("attention", "data", "models", "optim", "tokenizers")

TOKENIZER = "tokenizer"  # folder of a run folder, with a copy of the tokenizer's files


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """Run folder, description, and modules to import."""

    dump_folder: UrlText = "outputs"
    """The run folder, for metrics, samples and checkpoints: one per run."""
    description: str = ""
    """Free text, which titanlite does not use."""
    imports: list[str] = field(default_factory=list)
    """Python modules that register components from outside the package, looked up in the current directory
    first. `train`, `launch`, `prepare`, `tune` and `verify-resume` import them; other commands need
    `--allow-imports`."""

    def __post_init__(self) -> None:
        if not self.dump_folder:
            raise ConfigError("empty; name a folder for this run", "dump_folder")
        check_name(self.dump_folder, "dump_folder")
        parse_path(self.dump_folder, "dump_folder")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job. Modules receive their own sections; only programs such as train.py see the whole
    job."""

    job: JobInfo = field(default_factory=JobInfo)
    model: ModelFamily
    moe: LoadBalance = field(default_factory=LoadBalance)
    lora: LoRA = field(default_factory=LoRA)
    tokenizer: TokenizerConfig = field(default_factory=Tiktoken)
    data: Data
    training: Training = field(default_factory=Training)
    stages: list[Stage] = field(default_factory=list)
    loss: Loss = field(default_factory=ChunkedCrossEntropy)
    optimizer: Optimizer = field(default_factory=AdamW)
    lr_scheduler: LRScheduler = field(default_factory=WarmupStableDecay)
    ema: EMA = field(default_factory=EMA)
    parallelism: Parallelism = field(default_factory=Parallelism)
    attention: AttentionBackend = field(default_factory=Auto)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    generation: Generation = field(default_factory=Generation)
    guard: Guard = field(default_factory=Guard)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)

    @property
    def folder(self) -> PurePath:
        """The run folder; a Path if it is on a local disk."""
        return parse_path(self.job.dump_folder)

    def check(self, world_size: int) -> None:
        """Check the rules that span sections, before any process group or file exists. Each rule is in the
        module of one of its sections. Raises ConfigError."""
        training, parallelism = self.training, self.parallelism
        degrees = parallelism.degrees(world_size)
        batch = BatchLayout.from_training(training, degrees.data_parallel)
        self.model.check_tensor_parallel(degrees.tp)
        self.model.check_pipeline_parallel(degrees.pp)
        check_expert_parallel(parallelism, degrees, self.model)
        sources = dict(zip(short_names(self.data.sources), (source.weight for source in self.data.sources)))
        check_stages(self.stages, training, list(sources))
        check_sources_are_read(self.stages, sources)
        for key, seq_len in self.sequence_lengths().items():
            parallelism.check(seq_len, key)
        batch_sizes = self.batch_sizes(batch.global_size)
        for key, size in batch_sizes.items():
            batch.num_micro_batches(size, key)
        check_pipeline_parallel(
            parallelism,
            num_blocks=self.model.config.n_layers,
            batch_sizes=batch_sizes,
            micro_batch_sequences=batch.micro_batch_size * batch.num_ranks,
            reduce_dtype=training.mixed_precision_reduce,
            separates_weight_backward=not self.compile.enable and self.activation_checkpoint.mode == "none",
        )
        self.activation_checkpoint.check(
            self.compile,
            tensor_parallel=degrees.tp > 1,
            has_expert_axes=bool(self.model.num_experts) and parallelism.has_expert_axes,
        )
        self.compile.check(
            world_size,
            has_experts=bool(self.model.num_experts),
            masks_documents=self.data.mask_documents,
            cpu_offload=training.enable_cpu_offload,
        )
        parallelism.check_compiler(self.compile.loss_backend)
        self.float8.check(
            compiled=self.compile.enable,
            micro_batch_tokens=training.local_batch_size * training.seq_len // degrees.cp,
            cpu_offload=training.enable_cpu_offload,
        )
        if training.same_bits_on_any_ranks:
            check_same_bits(
                degrees,
                parallelism.expert_parallel_degree,
                {
                    "float8.enable = true": self.float8.enable,
                    "training.enable_cpu_offload = true": training.enable_cpu_offload,
                    "compile.cuda_graphs = true": bool(self.compile.cuda_graphs),
                    "training.mixed_precision_reduce = bfloat16": training.mixed_precision_reduce
                    != "float32",
                },
            )
        self.moe.check(self.model.num_experts, trains_adapters=self.lora.enable)
        self.lora.check(self.checkpoint.initial_load_path, self.float8.enable)
        if training.enable_cpu_offload:
            self.optimizer.check_cpu_offload()
        self.guard.check(self.checkpoint.enable, training.is_deterministic)
        if self.guard.fault_check_freq:
            check_data_parallel_only(
                "guard.fault_check_freq",
                degrees,
                parallelism.expert_parallel_degree,
                {
                    "training.enable_cpu_offload = true": training.enable_cpu_offload,
                    "compile.cuda_graphs = true": bool(self.compile.cuda_graphs),
                },
            )
        self.metrics.check(degrees)
        if self.data.stream is not None:
            weighted = [i for i, stage in enumerate(self.stages) if stage.weights is not None]
            check_streamed_run(weighted, self.amounts(), self.guard.on_spike == "rewind")
        self.validation.check(bool(self.data.holdout_sequences or self.data.validation_sources))
        self.model.check_length(training.seq_len)
        self.resolved(world_size)

    def build_on_meta(self) -> Decoder:
        """Build the whole model, with its adapters if there are any, without memory for its weights. Raises
        ConfigError if the loss does not support the model's logits."""
        net = self.model.build_on_meta()
        self.loss.check_softcap(net.logit_softcap)
        self.lora.apply(net, self.parallelism.pipeline_parallel_degree > 1)
        return net

    def parallel_settings(self, param_dtype: torch.dtype) -> ParallelSettings:
        """The settings that decide how the model is sharded and run. Their attention is not built yet."""
        return ParallelSettings(
            parallelism=self.parallelism,
            attention=self.attention,
            activation_checkpoint=self.activation_checkpoint,
            compile=self.compile,
            float8=self.float8,
            moe=self.moe,
            param_dtype=param_dtype,
            reduce_dtype=getattr(torch, self.training.mixed_precision_reduce),
            cpu_offload=self.training.enable_cpu_offload,
            same_bits=self.training.same_bits_on_any_ranks,
        )

    def step_memory(self, net: Decoder, num_ranks: int, param_dtype: torch.dtype) -> StepMemory:
        """The settings that decide the memory of a step on `num_ranks` ranks. `net`: the whole model."""
        degrees, training = self.parallelism.degrees(num_ranks), self.training
        batch = BatchLayout.from_training(training, degrees.data_parallel)
        largest = max(self.batch_sizes(batch.global_size).values())
        return StepMemory(
            net=net,
            optimizer=self.optimizer,
            loss=self.loss,
            settings=self.parallel_settings(param_dtype),
            degrees=degrees,
            has_average=self.ema.enable,
            tokens=training.local_batch_size * training.seq_len // degrees.cp,
            accumulates=batch.num_micro_batches(largest) > 1,
        )

    def amounts(self) -> dict[str, Amount]:
        """The amounts of training, such as "4B tokens", that are not numbers of steps or sequences yet, by
        their keys."""
        return {**amounts(self), **uncounted_ends(self.stages, self.training)}

    def resolved(self, world_size: int, epoch_sequences: int | None = None) -> Job:
        """This job with its amounts of training as numbers of steps on `world_size` ranks, and the ends of
        stages as numbers of sequences. Epochs remain if `epoch_sequences`, the training sequences of all
        sources together, is None; so do all amounts of a job with stages that end after epochs. Raises
        ConfigError for amounts of less than one step and, once all are known, for numbers of steps that do
        not fit together."""
        batch = BatchLayout.from_training(self.training, self.parallelism.degrees(world_size).data_parallel)
        units = {amount.unit for amount in self.amounts().values()}
        net = self.model.build_on_meta() if "tokens/parameter" in units else None
        conversion = Conversion(
            seq_len=self.training.seq_len,
            global_batch_size=batch.global_size,
            step_sizes=StepSizes.constant(batch.global_size),
            num_parameters=sum(p.numel() for p in net.parameters()) if net is not None else 0,
            epoch_sequences=epoch_sequences,
        )
        ends = uncounted_ends(self.stages, self.training)
        if not all(conversion.converts(end) for end in ends.values()):
            return self
        training, stages = count_ends(self.training, self.stages, conversion)
        job = replace(self, training=training, stages=stages)
        opened = job.open_stages(batch.global_size)
        if stages:
            job = replace(job, stages=opened.count_schedules(conversion))
        job = resolve(job, replace(conversion, step_sizes=opened.step_sizes))
        if not job.amounts():
            job.check_steps(batch.global_size)
        return job

    def open_stages(self, batch_size: int) -> Stages:
        """The stages by position in the data order, once their ends are numbers of sequences. `batch_size`:
        training.global_batch_size, with -1 resolved."""
        return Stages(self.stages, self.training, self.lr_scheduler, batch_size)

    def learning_rate(self, stages: Stages, step: int, first_sequence: int) -> float:
        """The learning rate in a step that begins with sequence `first_sequence`, without the multipliers of
        parameter groups. `stages`: of `open_stages`."""
        return self.optimizer.lr * stages.lr_factor(step, first_sequence)

    def check_steps(self, batch_size: int) -> None:
        """Raises ConfigError for numbers of steps that do not fit together."""
        steps, stages = self.training.steps, self.open_stages(batch_size)
        if stages.step_sizes.position_after(steps) * self.training.seq_len >= 1 << 63:
            raise ConfigError(
                f"{steps} steps of {batch_size} x {self.training.seq_len} tokens are 2^63 tokens or more, "
                "which cannot be counted",
                "training.steps",
            )
        self.lr_scheduler.check(steps)
        self.lr_scheduler.check_factors(steps)
        stages.check_schedules()

    def batch_sizes(self, batch_size: int) -> dict[str, int]:
        """The sequences per step by the keys that set them. `batch_size`: training.global_batch_size, with -1
        resolved."""
        ramp = enumerate(self.training.batch_ramp)
        return {
            "training.global_batch_size": batch_size,
            **{f"training.batch_ramp.{i}.global_batch_size": entry.global_batch_size for i, entry in ramp},
            **{
                f"stages.{i}.global_batch_size": stage.global_batch_size
                for i, stage in enumerate(self.stages)
                if stage.global_batch_size is not None
            },
        }

    def sequence_lengths(self) -> dict[str, int]:
        """The lengths of the sequences that the model is trained on, by the keys that set them."""
        lengths = enumerate(stage.seq_len for stage in self.stages)
        return {
            "training.seq_len": self.training.seq_len,
            **{f"stages.{i}.seq_len": length for i, length in lengths if length is not None},
        }

    def check_folders(self) -> None:
        """Raises ConfigError unless the folders that a run writes to exist or can be made. Makes nothing. A
        cache that exists may be complete, so that nothing is written to it; whatever writes to it checks
        it."""
        storage_of(self.folder).check_writable(self.folder, "job.dump_folder")
        if self.data.uses_cache and not os.path.isdir(self.data.cache_dir):
            check_writable(Path(self.data.cache_dir), "data.cache_dir")

    def identity(self, data: dict[str, Any], sources: dict[str, str]) -> dict[str, Any]:
        """The run identity, which a run that resumes this one must share: architecture fields, loss and data,
        under the names of their keys. `data`: SequenceDataset.identity. `sources`: SequenceDataset.names,
        which messages about differences use."""
        training = {key: data[key] for key in ("seed", "seq_len") if key in data}
        places = data.get("stages", [])
        data = {key: value for key, value in data.items() if key not in (*training, "stages")}
        model = {"name": self.model.name, **toml.as_tree(self.model.config)}
        names = {"tokenizer": self.tokenizer.label, "sources": sources}
        identity = {"model": model, "loss": self.loss.objective, "training": training, "data": data}
        stages = [place | settings_of(stage) for place, stage in zip(places, self.stages)]
        if self.model.num_experts:
            identity["moe"] = self.moe.identity()
        if self.lora.enable:
            identity["lora"] = self.lora.identity(self.model.build_on_meta())
        return identity | ({"stages": stages} if stages else {}) | {"names": names}


def load_job(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    world_size: int | None = 1,
    allow_imports: bool = False,
) -> Job:
    """The job of a TOML file and command-line overrides, checked for `world_size` ranks. Raises ConfigError,
    which names file and line.

    `world_size`: None skips the rules that span sections, for uses other than training. `allow_imports`:
    import the modules in `[job] imports`; otherwise a job that names modules is refused."""
    tree, locator = toml.read(path, overrides)
    section = tree.get("job", {})
    folder = run_folder(Path(path), tree) if path is not None else None
    if folder is not None and isinstance(section, dict) and "job.dump_folder" not in locator.overridden:
        tree["job"] = {**section, "dump_folder": str(folder)}
    import_components(tree, locator, allow_imports)
    job = toml.build(Job, tree, locator)
    # The launcher tells it for its ranks.
    if environment.launcher_pid() is None and environment.place().rank == 0:
        for line in locator.left_out:
            _tell_once(line)
    try:
        if world_size is not None:
            job.check(world_size)
            job.check_folders()
    except ConfigError as e:
        raise locator.located(e) from None
    return job


@cache
def _tell_once(line: str) -> None:
    """Tell a line. A search loads the job of each of its runs, which would say the same."""
    tell(line)


def run_folder(path: Path, tree: dict[str, Any]) -> Path | None:
    """The run folder that a recorded job.toml is in, directly or in a checkpoint; None for any other file. It
    follows from the path of the file and not from its dump_folder, because the run folder may have been moved
    and a relative dump_folder depends on the current directory."""
    folder = path.absolute().parent
    if path.name != "job.toml":
        return None
    if (folder / "run_identity.json").exists():
        return folder
    section = tree.get("checkpoint", {})
    parts = Path(str(section.get("folder", ""))).parts if isinstance(section, dict) else ()
    inside = bool(parts) and (folder / MANIFEST).exists() and folder.parts[-len(parts) - 1 : -1] == parts
    return folder.parents[len(parts)] if inside else None


def build_tokenizer(job: Job, source: str | Path = "") -> Tokenizer:
    """The tokenizer of a job. Raises ConfigError, which names the copy that the run has in its folder, or the
    run of the weights at `source`, by default checkpoint.initial_load_path."""
    try:
        return job.tokenizer.build()
    except ConfigError as e:
        if Path(getattr(job.tokenizer, "path", "")).exists():
            raise  # the files are there: another tokenizer is no remedy
        source = Path(source or job.checkpoint.initial_load_path or job.job.dump_folder)
        # a run, its checkpoints, or one of these
        for folder in (Path(job.job.dump_folder), source, *source.parents[:2]):
            copy = getattr(job.tokenizer.in_folder(folder / TOKENIZER), "path", "")
            if copy and Path(copy).exists():
                raise ConfigError(f"{e}; a run has a copy: --tokenizer.path={copy}", e.key) from None
        raise


def open_recorded_tokenizer(job: Job, checkpoint: Path, fingerprint: str) -> Tokenizer:
    """The tokenizer of a checkpoint with the recorded job `job`: the one at the job's path or, if its files
    are missing or have changed, the copy in the run folder. `fingerprint`: recorded in the checkpoint; "" is
    not compared. Raises ConfigError that names both."""
    copy, faults = job.tokenizer.in_folder(Path(job.job.dump_folder, TOKENIZER)), list[str]()
    for config in [job.tokenizer] if copy == job.tokenizer else [job.tokenizer, copy]:
        try:
            if missing := [file for file in config.files().values() if not file.exists()]:
                raise ConfigError(f"there is no {missing[0]}")
            tokenizer = config.build()
            if fingerprint in ("", tokenizer.fingerprint):
                return tokenizer
            raise ConfigError(f"{config.label} is another one")
        except ConfigError as e:
            faults.append(str(e))
    raise ConfigError(
        f"the tokenizer of {checkpoint} is missing: {', and '.join(faults)}. A run keeps a copy in its "
        "folder, which a checkpoint needs on another machine. If the tokenizer is somewhere else, run "
        f"`titanlite import {checkpoint} DIR CONFIG.toml --tokenizer.path=...` with the run's CONFIG.toml"
    )


def load_recorded_job(checkpoint: Path, allow_imports: bool) -> Job:
    """The recorded job of a verified checkpoint. Raises ConfigError if the job names modules to import and
    `allow_imports` is false."""
    return load_job(checkpoint / "job.toml", world_size=None, allow_imports=allow_imports)
