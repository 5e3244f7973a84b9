"""Job: the whole TOML schema, composed of the sections that each module owns, and the rules that span
sections.

Importing this module registers every choice that ships with titanlite; `[job] imports` adds those of other
packages.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Importing these modules registers the components that ship with titanlite.
import titanlite.models.llama3
import titanlite.models.qwen3
import titanlite.prepare.sources
import titanlite.tokenizers.bytes
import titanlite.tokenizers.huggingface  # noqa: F401
from titanlite.attention.auto import Auto
from titanlite.attention.base import AttentionBackend
from titanlite.checkpoint.commit import MANIFEST
from titanlite.checkpoint.section import Checkpoint
from titanlite.commands import ALLOW_IMPORTS
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.overrides import listed, plain
from titanlite.config.places import Locator
from titanlite.config.shipped import PACKAGE
from titanlite.data.loader import Data
from titanlite.evaluate import Validation
from titanlite.generate import Generation
from titanlite.losses import ChunkedCrossEntropy, Loss
from titanlite.mesh import Parallelism
from titanlite.metrics.guard import Guard
from titanlite.metrics.meter import Metrics
from titanlite.metrics.profiling import Profiling
from titanlite.models.base import ModelFamily
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import Optimizer
from titanlite.optim.schedule import LRScheduler
from titanlite.optim.warmup_stable_decay import WarmupStableDecay
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint
from titanlite.parallel.compile import BACKENDS_WITH_MEMORY_BUDGET, Compile
from titanlite.parallel.float8 import MULTIPLE, Float8
from titanlite.parallel.pipeline_parallel import ZERO_BUBBLE, split_into_stages
from titanlite.runtime.process_group import Comm
from titanlite.runtime.training import StepPlan, Training
from titanlite.tokenizers.base import TokenizerConfig
from titanlite.tokenizers.tiktoken import Tiktoken


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """The run itself."""

    dump_folder: str = "outputs"
    """The run folder: metrics, samples and checkpoints of this run and no other."""
    description: str = ""
    """For people; not used."""
    imports: list[str] = field(default_factory=list)
    """Python modules to import first, which register components of their own; modules in the current
    directory are found. `train` and `launch` run them; other verbs need `--allow-imports`."""

    def __post_init__(self) -> None:
        if not self.dump_folder:
            raise ConfigError("empty; name a folder for this run", "dump_folder")
        check_name(self.dump_folder, "dump_folder")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job. Every part of titanlite is handed its own section; only programs see the whole."""

    job: JobInfo = field(default_factory=JobInfo)
    model: ModelFamily
    tokenizer: TokenizerConfig = field(default_factory=Tiktoken)
    data: Data
    training: Training = field(default_factory=Training)
    loss: Loss = field(default_factory=ChunkedCrossEntropy)
    optimizer: Optimizer = field(default_factory=AdamW)
    lr_scheduler: LRScheduler = field(default_factory=WarmupStableDecay)
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
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.job.dump_folder)

    def check(self, world_size: int) -> None:
        """Rules that span sections, before any process group or file exists. Raises ConfigError."""
        StepPlan.of(self.training, self.parallelism.degrees(world_size).data_parallel)
        context, tensor = self.parallelism.context_parallel_degree, self.parallelism.tensor_parallel_degree
        if context > 1 and self.training.seq_len % (2 * context * tensor):
            raise ConfigError(
                f"training.seq_len = {self.training.seq_len} is no multiple of 2 x context_parallel_degree "
                f"{context} x tensor_parallel_degree {tensor}: each rank has two equal pieces of a row",
                "parallelism.context_parallel_degree",
            )
        self._check_tensor_parallel()
        self._check_pipeline_parallel(world_size)
        if self.validation.enable and not (self.data.holdout_sequences or self.data.validation_sources):
            raise ConfigError(
                "there are no sequences to validate on: set data.holdout_sequences, for example to 256, or "
                "give [[data.validation_sources]]",
                "validation.enable",
            )
        if self.activation_checkpoint.mode == "memory_budget":
            if not self.compile.enable:
                raise ConfigError(
                    "memory_budget is the compiler's: set compile.enable, or another mode",
                    "activation_checkpoint.mode",
                )
            if self.compile.backend not in BACKENDS_WITH_MEMORY_BUDGET:
                raise ConfigError(
                    f"memory_budget needs the backend {' or '.join(BACKENDS_WITH_MEMORY_BUDGET)}; "
                    f"{self.compile.backend!r} ignores the budget",
                    "compile.backend",
                )
        if self.float8.enable and not (self.compile.enable or self.float8.emulate):
            raise ConfigError(
                "without the compiler float8 is slower than bfloat16: set compile.enable", "float8.enable"
            )
        tokens = self.training.local_batch_size * self.training.seq_len // context
        if self.float8.enable and self.float8.recipe != "rowwise_with_gw_hp" and tokens % MULTIPLE:
            raise ConfigError(
                f"float8 needs a multiple of {MULTIPLE} tokens of a micro-batch; local_batch_size x seq_len"
                f"{' / context_parallel_degree' if context > 1 else ''} is {tokens}",
                "training.local_batch_size",
            )
        if self.training.enable_cpu_offload and self.float8.gathers_float8:
            raise ConfigError(
                "weights in the host's memory are not gathered in float8: set "
                "float8.enable_fsdp_float8_all_gather = false",
                "training.enable_cpu_offload",
            )
        self.model.check_length(self.training.seq_len)
        self.lr_scheduler.check(self.training.steps)

    def check_folders(self) -> None:
        """Raises ConfigError unless the folders that a run writes into can be made; makes nothing."""
        check_writable(self.folder, "job.dump_folder")
        check_writable(Path(self.data.cache_dir), "data.cache_dir")

    def _check_pipeline_parallel(self, world_size: int) -> None:
        """Whether the blocks and the micro-batches go through the pipeline that is asked for."""
        p, c, where = self.parallelism, self.model.config, "parallelism.pipeline_parallel_degree"
        if p.pipeline_parallel_degree == 1:
            return
        schedule, stages = (
            p.pipeline_parallel_schedule,
            len(split_into_stages(p, [str(i) for i in range(c.n_layers)])),
        )
        if getattr(c, "tie_word_embeddings", False):
            raise ConfigError(
                "the embedding and the head are one weight, but on different stages; "
                "model.overrides.tie_word_embeddings = false makes two of it, for a new model",
                where,
            )
        plan = StepPlan.of(self.training, p.degrees(world_size).data_parallel)
        least = 1 if schedule == "GPipe" else stages if schedule == "1F1B" else p.pipeline_parallel_degree
        rounds = max(plan.micro_batches // p.pipeline_parallel_degree, 1)
        uneven = schedule.startswith("Interleaved") and plan.micro_batches % rounds
        if plan.micro_batches < least or uneven:
            one = plan.rows // plan.micro_batches
            legal = [n * one for n in (least, 2 * least, 4 * least)]
            raise ConfigError(
                f"{plan.micro_batches} micro-batches do not fill {schedule} over {stages} stages; {least} or "
                f"a multiple do: training.global_batch_size = {', '.join(map(str, legal))}",
                where,
            )
        if p.fsdp_reduce == "micro_batch" or self.training.mixed_precision_reduce != "float32":
            key = "fsdp_reduce" if p.fsdp_reduce == "micro_batch" else "mixed_precision_reduce"
            raise ConfigError(f"a pipeline reduces gradients once a step, in float32: unset {key}", where)
        if schedule in ZERO_BUBBLE and p.fsdp_reshard_after_forward == "always":
            raise ConfigError(
                f"{schedule} finds the gradients of weights that are gathered: default or never",
                "parallelism.fsdp_reshard_after_forward",
            )
        apart = schedule in ZERO_BUBBLE and (self.compile.enable or self.activation_checkpoint.mode != "none")
        if apart:
            raise ConfigError(
                f"{schedule} takes a block's backward apart, which is one piece under compile.enable and is "
                "run once under activation_checkpoint; 1F1B and Interleaved1F1B work with both",
                "parallelism.pipeline_parallel_schedule",
            )

    def _check_tensor_parallel(self) -> None:
        """Whether the model and the rows can be divided as parallelism.tensor_parallel_degree says."""
        degree, c = self.parallelism.tensor_parallel_degree, self.model.config
        if degree == 1:
            return
        where = "parallelism.tensor_parallel_degree"
        for what, number, why in (
            ("n_heads", c.n_heads, ""),
            ("n_kv_heads", c.n_kv_heads, ": each rank needs key and value heads of its own"),
            ("hidden_dim", c.hidden_dim, ""),
            ("vocab_size", c.vocab_size, ": the loss is divided over the vocabulary"),
            ("training.seq_len", self.training.seq_len, ": the norms are divided over the tokens"),
        ):
            if number % degree:
                legal = [n for n in range(2, number + 1) if number % n == 0][:4]
                raise ConfigError(
                    f"{what} = {number} cannot be divided by {degree}{why}; it can be by {legal}", where
                )
        ac = self.activation_checkpoint
        if self.compile.enable and ac.mode == "selective" and not ac.selective_ac_option.isdecimal():
            raise ConfigError(
                f"{ac.selective_ac_option!r}, parts of a block, cannot be run again with tensor parallel and "
                "compile.enable; whole blocks can (mode full, or a number here), and so can memory_budget",
                "activation_checkpoint.selective_ac_option",
            )

    def recipe(self, data: dict[str, Any], sources: dict[str, str]) -> dict[str, Any]:
        """What a run that continues this one must share, under the names of the keys that set it: the model's
        shape, the loss, and `data`, SequenceDataset.identity. `sources`: SequenceDataset.names, for what is
        said of a difference."""
        training = {key: data[key] for key in ("seed", "seq_len")}
        data = {key: value for key, value in data.items() if key not in training}
        model = {"name": self.model.name, **toml.as_tree(self.model.config)}
        names = {"tokenizer": self.tokenizer.label, "sources": sources}
        recipe = {"model": model, "loss": self.loss.objective, "training": training, "data": data}
        return recipe | {"names": names}


def check_name(path: str, key: str) -> None:
    """Raises ConfigError for a path that cannot be recorded or made."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path!r} is not UTF-8, so no TOML file can record it", key) from None
    if "\0" in path:
        raise ConfigError(f"{path!r} has a NUL in it, which no path may have", key)


def check_writable(folder: Path, key: str) -> None:
    """Raises ConfigError unless the folder can be made and written; makes nothing."""
    whole = folder.absolute()
    try:
        there = next(p for p in (whole, *whole.parents) if p.exists() or p.is_symlink())
    except OSError as e:  # a name that is too long, say
        raise ConfigError(f"{folder} cannot be made: {e.strerror}", key) from None
    if not there.exists():
        raise ConfigError(f"{folder} cannot be made: {there} is a link that leads nowhere", key)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} cannot be written: {there} is no writable directory", key)


def check_new(path: Path, key: str) -> None:
    """Raises ConfigError unless `path`, which is about to be worked for, is free and can be made."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists; choose another, or delete it", key)
    check_writable(path.parent, key)


def load_job(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    world_size: int | None = 1,
    allow_imports: bool = False,
) -> Job:
    """The checked job of a TOML file and command-line overrides; without `world_size`, for use other than
    training, unchecked across sections. Raises ConfigError, which says where.

    `allow_imports`: run the modules that `[job] imports` names; otherwise a job that names any is refused.
    """
    tree, locator = toml.read(path, overrides)
    section = tree.get("job", {})
    imports = section.get("imports", []) if isinstance(section, dict) else []
    here = run_folder(Path(path), tree) if path is not None else None
    if here is not None and isinstance(section, dict) and "job.dump_folder" not in locator.overridden:
        tree["job"] = {**section, "dump_folder": str(here)}
    import_components(imports, "job.imports", locator, allow_imports)
    job = toml.build(Job, tree, locator)
    try:
        if world_size is not None:
            job.check(world_size)
            job.check_folders()
    except ConfigError as e:
        raise locator.located(e) from None
    return job


def run_folder(path: Path, tree: dict[str, Any]) -> Path | None:
    """The run folder that a job.toml recorded by titanlite lies in, itself or in a checkpoint; None for any
    other file. A recorded job is of the run where it lies: that may have been moved, or be named from another
    directory than the one that its relative dump_folder started at."""
    here = path.absolute().parent
    if path.name != "job.toml":
        return None
    if (here / "recipe.json").exists():
        return here
    section = tree.get("checkpoint", {})
    parts = Path(str(section.get("folder", ""))).parts if isinstance(section, dict) else ()
    inside = bool(parts) and (here / MANIFEST).exists() and here.parts[-len(parts) - 1 : -1] == parts
    return here.parents[len(parts)] if inside else None


def load_recorded_job(checkpoint: Path, allow_imports: bool) -> Job:
    """The job of a checkpoint, which has been verified. Raises ConfigError if that would run code that has
    not been allowed."""
    return load_job(checkpoint / "job.toml", world_size=None, allow_imports=allow_imports)


def import_components(modules: Any, key: str, locator: Locator, allowed: bool) -> None:
    """Import the modules a configuration lists under `key`, before it is read: they register components.
    Modules in the current directory are found, as by `python -m`. Raises ConfigError if there are some and
    they are not `allowed`."""
    modules = listed(plain(modules))
    if not modules or not isinstance(modules, list):
        return
    names = ", ".join(map(str, modules))
    if not allowed:
        raise locator.located(
            ConfigError(f"this would run the code of {names}; if you trust it, add {ALLOW_IMPORTS}", key)
        )
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)  # last, so that no file here takes the place of an installed package
    for module in modules:
        try:
            importlib.import_module(str(module))
        except Exception as e:
            place = _place_of(e)
            is_told = not place or isinstance(e, SyntaxError)
            more = "" if is_told else f'; for the traceback: python -c "import {module}"'
            if isinstance(e, ModuleNotFoundError):
                more = f" (looked in {here}, PYTHONPATH and the installed packages)"
            text = f"cannot import {module!r}: {place}{_summary(e)}{more}"
            raise locator.located(ConfigError(text, key)) from None


def _place_of(error: Exception) -> str:
    """The file and line at which the import of a module failed, in neither titanlite nor Python's importlib;
    "" if the module did not begin to run."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    others = (f"{PACKAGE}{os.sep}", importlib.import_module.__code__.co_filename, "<frozen importlib")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _summary(error: Exception) -> str:
    """The error on one line, with its type unless the text says it."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    if isinstance(error, (ImportError, ConfigError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
