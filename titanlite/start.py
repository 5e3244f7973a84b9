"""The start of a run. `decide_start` chooses between a new run, a resumed one and a restart, and `assemble`
opens and checks the inputs of the run. Neither writes into the run folder, so that `titanlite config
--ranks` can call them without a run. Their results are passed on: nothing is asked again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.attention.base import AttentionBackend, AttentionNeeds, kernels
from titanlite.attention.linear import build_attention
from titanlite.checkpoint.checkpointer import Checkpointer, KeptForFaults, RunRecord
from titanlite.checkpoint.lock import FolderLock
from titanlite.checkpoint.memory import NodeMemory, Place
from titanlite.checkpoint.resume import Candidate
from titanlite.checkpoint.run_identity import check_same_on_all_ranks
from titanlite.checkpoint.start import Start, check_labels, check_run_identity, decide
from titanlite.checkpoint.state import BaseModel, TrainState, listed
from titanlite.config import toml
from titanlite.config.component import ConfigError, Unreadable, keys_in
from titanlite.data.dataset import RunSequences, SequenceDataset
from titanlite.data.downloads import Downloads, NodeOrder
from titanlite.data.loader import Loader, LoaderLayout, MicroBatches, SequenceLoader
from titanlite.data.sequence_cache import SequenceCache
from titanlite.data.skips import SkippedSequences
from titanlite.data.sources import Source, short_names
from titanlite.data.stream_source import Stream
from titanlite.errors import LoaderError
from titanlite.fetch import local_copy
from titanlite.flops import peak_bf16_flops
from titanlite.interop.formats import locate_base
from titanlite.interop.initial import check_initial, load_base, load_initial
from titanlite.interop.weights import ModelAndTokenizer
from titanlite.job import TOKENIZER, Job, build_tokenizer
from titanlite.log import logger
from titanlite.metrics.guard import StepGuard
from titanlite.metrics.memory import building
from titanlite.metrics.meter import Meter, StepCost
from titanlite.metrics.sinks.base import RunInfo, Sinks
from titanlite.optim.base import check_covers
from titanlite.optim.ema import WeightAverage
from titanlite.parallel.apply import parallelize
from titanlite.parallel.clip import Clipper
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.ranks import Ranks
from titanlite.runtime.environment import place, shared_memory
from titanlite.runtime.process import device_name
from titanlite.runtime.runtime import Runtime, environment
from titanlite.runtime.training import BatchLayout
from titanlite.stages import Stages
from titanlite.start_log import about_steps, job_toml_text, summary
from titanlite.storage import parse_path, storage_of
from titanlite.tasks.requests import OpenTask
from titanlite.tokenizers.base import Tokenizer

MAX_PARAMETERS_WITH_GRAPHS = 1_000_000_000  # models of up to 0.6e9 parameters were measured with graphs


def open_memory(job: Job, ranks: Ranks) -> NodeMemory | None:
    """The memory of the nodes for copies of the state; None: no copies are made. Collective."""
    if not (job.checkpoint.enable and job.checkpoint.memory_interval):
        return None
    here = place()
    return NodeMemory(shared_memory(), job.folder, ranks, Place(here.local_rank, here.num_local_ranks))


def decide_start(job: Job, ranks: Ranks, lock: FolderLock, memory: NodeMemory | None) -> Start:
    """Decide how the run starts. An existing run folder is locked first; the folder of a first start is made
    and locked when its checks have passed. Collective."""
    start: Start = ranks.from_rank_zero(lambda: decide(job.checkpoint, job.folder, lock=lock))
    return start if memory is None else memory.newer(start)


@dataclass(frozen=True)
class Parts:
    """The inputs of a run, open and checked. `job`: with all amounts of training as numbers of steps and
    sequences, and with the version of a stream. `num_parameters`: of the whole model. `flops_per_token`: of
    the whole model, by sequence length. `about`: log lines on the configuration. `data_lines`: log lines on
    the data, for the checkpoint that the run is to resume from. `job_toml`: the job.toml of the run and of
    its checkpoints."""

    job: Job
    tokenizer: Tokenizer
    tasks: Sequence[OpenTask]
    sequences: RunSequences
    stages: Stages
    identity: dict[str, Any]
    num_parameters: int
    flops_per_token: Mapping[int, int]
    about: Sequence[str]
    data_lines: Sequence[str]
    job_toml: str


class NotReady(Exception):
    """Data would have to be tokenised, packed or hashed, which a dry run does not do."""


def assemble(job: Job, num_ranks: int, ranks: Ranks, start: Start, dry: bool = False) -> Parts:
    """Open the inputs of a run on `num_ranks` ranks (tokenizer, initial weights, tasks, data), and check them
    against the model and the run that is continued. Cheap checks come first, because data may be
    tokenised for long. Raises ConfigError, LoaderError if a run that resumes cannot read its input now, and
    NotReady in a dry run. Collective over `ranks`, which are one process in a dry run."""
    tokenizer = open_tokenizer(job)
    is_first = ranks.rank == 0  # an error of rank 0 is raised on every rank
    if (stream := job.data.stream) is not None:
        source = ranks.from_rank_zero(lambda: _pinned(stream, start))
        job = replace(job, data=replace(job.data, sources=[source]))
    with ranks.rank_zero_first():
        _check_labels(job, tokenizer, start)
        if is_first:
            _check_initial_weights(job, tokenizer, start)
        tasks = job.validation.open_tasks(tokenizer, job.training.seq_len)
        sequences = open_data(job, tokenizer, start, dry)
    given = job
    job, stages = open_stages(given, num_ranks, sequences)
    identity = job.identity(sequences.identity, sequences.names)
    check_same_on_all_ranks(identity, job.data.skipped, ranks)
    with ranks.rank_zero_first():
        if is_first:
            check_run_identity(start, identity, job.checkpoint.allow_changed, job.folder)
    net = job.build_on_meta()
    about = [*summary(job, net, tokenizer.vocab_size), *about_steps(given, job)]
    return Parts(
        job=job,
        tokenizer=tokenizer,
        tasks=tasks,
        sequences=sequences,
        stages=stages,
        identity=identity,
        num_parameters=sum(p.numel() for p in net.parameters()),
        flops_per_token={length: net.flops_per_token(length) for length in job.sequence_lengths().values()},
        about=about,
        data_lines=check_data(job, stages, sequences, start.candidate and start.candidate.train),
        job_toml=job_toml_text(job, about),
    )


def check_device(
    job: Job, device: torch.device, param_dtype: torch.dtype, world_size: int
) -> tuple[AttentionBackend, str]:
    """The attention backend for this device, and the name of its kernel. Raises ConfigError if the job needs
    something that the device lacks."""
    job.training.check_device(device)
    job.float8.check_device(device)
    job.compile.check_device(device)
    job.profiling.check(device, world_size)
    model, kinds = job.model.config, job.model.attention_kinds
    needs = AttentionNeeds(
        device=device,
        dtype=param_dtype,
        seq_len=job.training.seq_len,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        masks_documents=job.data.mask_documents,
        context_parallel=job.parallelism.context_parallel_degree > 1,
        kinds=tuple(dict.fromkeys(kinds)),
    )
    attention = build_attention(job.attention, needs)
    return attention, kernels(attention, needs, kinds)


def shard_model(job: Job, rt: Runtime) -> tuple[ShardedModel, str]:
    """The sharded model, still on the meta device, and the name of the attention kernel. Raises ConfigError
    if the job needs something that the device lacks, or does not fit the layout. Collective."""
    attention, kernel = check_device(job, rt.device, rt.param_dtype, rt.world_size)
    net = job.build_on_meta()
    job.optimizer.check(net, rt.mesh.degrees.tp)
    memory = job.step_memory(net, rt.world_size, rt.param_dtype)
    num_parameters = sum(p.numel() for p in net.parameters())
    by_default = job.compile.cuda_graphs is None and records_by_default(
        job, num_parameters, rt.device, rt.world_size
    )
    settings = replace(
        memory.settings,
        parallelism=memory.resolved(rt.mesh, rt.ranks),
        attention=attention,
        clock=rt.clock,
        compile=replace(job.compile, cuda_graphs=job.compile.cuda_graphs or by_default),
        graphs_are_optional=by_default,
    )
    return parallelize(net, job.loss, rt.mesh, settings), kernel


def records_by_default(job: Job, num_parameters: int, device: torch.device, world_size: int) -> bool:
    """Whether a job that leaves compile.cuda_graphs unset runs by CUDA graphs: it is compiled, has at most
    MAX_PARAMETERS_WITH_GRAPHS, and would be valid with compile.cuda_graphs = true. Not with a model, loss or
    attention from outside the package: its code may wait for the device, which cannot be recorded."""
    parts = (job.model, job.loss, job.attention)
    is_own = all(type(part).__module__.startswith("titanlite.") for part in parts)
    if not (job.compile.enable and is_own and num_parameters <= MAX_PARAMETERS_WITH_GRAPHS):
        return False
    with_graphs = replace(job, compile=replace(job.compile, cuda_graphs=True))
    try:
        with_graphs.compile.check_device(device)
        with_graphs.check(world_size)
    except ConfigError:
        return False
    return True


def open_tokenizer(job: Job) -> Tokenizer:
    """The job's tokenizer. Raises ConfigError if it has ids that the model's vocabulary lacks."""
    tokenizer = build_tokenizer(job)
    job.model.check_vocabulary(tokenizer.vocab_size)
    return tokenizer


def _pinned(stream: Stream, start: Start) -> Source:
    """The stream of a job, which is its only source, with the version of its documents, such as a commit: the
    recorded version for a run that resumes, or else the newest one."""
    recorded: dict[str, Any] = {}
    if start.candidate is not None:
        recorded = toml.parse(start.candidate.job_toml)["data"]["sources"][0]
    with _restartable(start), keys_in("data.sources.0"):
        return stream.pinned(recorded)


def _check_labels(job: Job, tokenizer: Tokenizer, start: Start) -> None:
    """Raises ConfigError if the run that is continued differs, as far as this can be known before any source
    is opened."""
    data = job.data.label_identity(tokenizer, seq_len=job.training.seq_len, seed=job.training.seed)
    if job.stages:  # a source may be new, if the stages so far do not read it
        del data["sources"]
    check_labels(start, job.identity(data, {}), job.checkpoint.allow_changed, job.folder)


def _check_initial_weights(job: Job, tokenizer: Tokenizer, start: Start) -> None:
    """Raises ConfigError unless the initial weights, which only a new run and runs of adapters need, can be
    read."""
    if not job.checkpoint.initial_load_path or (start.candidate is not None and not job.lora.enable):
        return
    path = local_copy(parse_path(job.checkpoint.initial_load_path, "checkpoint.initial_load_path"))
    if start.candidate is not None:
        path = locate_base(path, BaseModel.recorded_in(start.candidate.train))
    check_initial(path, ModelAndTokenizer(job.model, tokenizer), is_base=job.lora.enable)


def open_data(job: Job, tokenizer: Tokenizer, start: Start, dry: bool = False) -> RunSequences:
    """The sequences of the run; sources of raw text are tokenised on first use, but not if `dry`."""
    with _restartable(start):
        make = job.data.check if dry else job.data.build
        sequences = make(tokenizer, seq_len=job.training.seq_len, seed=job.training.seed)
    if sequences is None:
        raise NotReady
    return sequences


@contextmanager
def _restartable(start: Start) -> Iterator[None]:
    """An input that a run which resumes cannot read now was readable before, so another start may succeed: a
    LoaderError, whose exit code lets the launcher try it. For a new run it may be a mistake in a name."""
    try:
        yield
    except Unreadable as e:
        if start.candidate is None:
            raise
        raise LoaderError(str(e)) from None


def open_stages(job: Job, num_ranks: int, sequences: RunSequences) -> tuple[Job, Stages]:
    """The job with all its amounts of training as numbers of steps and sequences, and its stages, whose
    weights the sources get. Raises ConfigError for numbers of steps that do not fit together."""
    resolved = job.resolved(num_ranks, sequences.epoch_sequences)
    batch = BatchLayout.from_training(job.training, job.parallelism.degrees(num_ranks).data_parallel)
    sequences.layout = LoaderLayout(batch.num_ranks, job.data.num_workers, batch.micro_batch_size)
    stages = resolved.open_stages(batch.global_size)
    weights = [stage.weights_of(short_names(job.data.sources)) for stage in stages.stages]
    sequences.set_stages(job.data.sources, list(zip(stages.firsts, weights)))
    return resolved, stages


def check_data(job: Job, stages: Stages, sequences: RunSequences, train: dict[str, Any] | None) -> list[str]:
    """One line per source on how much of it the whole run reads, one per stage, and one on the sequences that
    the run skips, if there are any. `train`: the train.json of the checkpoint that the run resumes from.

    Raises ConfigError as `check_resumed` does, if the run reads a source for more than its max_epochs, or if
    it cannot continue a stream on its layout."""
    sequences.check_resumed(train)
    skipped = check_resumed(job, stages.batch_size, train)
    step, position = (train["step"], train["sequences"]) if train else (0, 0)
    lines = sequences.describe(stages.last_sequence(step, position, skipped))
    lines += stages.describe(short_names(job.data.sources))
    if skipped:
        lines.append(f"skipped for good: {_spelled(skipped)}; {skipped.count():,} in all")
    return lines


def check_resumed(job: Job, batch_size: int, train: dict[str, Any] | None) -> SkippedSequences:
    """The sequences that the run never trains on: data.skip_sequences, and what the resumed run skips.
    `batch_size`: training.global_batch_size, with -1 resolved. `train`: the checkpoint's train.json.

    Raises ConfigError if the global batch size differs from the resumed run's only because the number of
    ranks does, and if the run has trained on sequences of data.skip_sequences."""
    if train is None:
        return job.data.skipped
    job.training.check_resumed(batch_size, train["global_batch_size"])
    before, position = SkippedSequences.merge(train["skipped"]), train["sequences"]
    if trained := job.data.skipped.below(position) - before:
        raise ConfigError(
            f"the run has already trained on {_spelled(trained)}: after step {train['step']} it continues "
            f"with sequence {position}. Name later sequences only, or go back to a step before them with "
            "--checkpoint.load_step",
            "data.skip_sequences",
        )
    return before | job.data.skipped


def _spelled(skipped: SkippedSequences) -> str:
    """Such as `sequence 5` and `sequences 5, 7 to 9`."""
    texts = [f"{first} to {last}" if last > first else f"{first}" for first, last in skipped.ranges]
    is_one = len(texts) == 1 and texts[0].isdecimal()
    return f"sequence{'' if is_one else 's'} {listed(texts)}"


def open_checkpoints(
    parts: Parts, rt: Runtime, start: Start, lock: FolderLock, memory: NodeMemory | None, kernel: str
) -> Checkpointer:
    """The checkpoints of the run, whose folder is made and locked. `kernel`: of the attention. Collective."""
    config, guard = parts.job.checkpoint, parts.job.guard
    record = RunRecord(parts.identity, parts.job_toml, bits_conditions(parts.job, rt, kernel))
    keep = KeptForFaults(guard.rewind_distance, guard.fault_check_freq)
    return Checkpointer(config, record, start, rt.ranks, lock, keep, memory)


def bits_conditions(job: Job, rt: Runtime, kernel: str) -> dict[str, Any] | None:
    """The conditions under which runs have the same bits on any number of ranks; None without
    training.same_bits_on_any_ranks. `kernel`: of the attention."""
    if not rt.mesh.same_bits:
        return None
    return {
        "torch": torch.__version__,
        "device": device_name(rt.device),
        "dtype": str(rt.param_dtype).removeprefix("torch."),
        "local_batch_size": job.training.local_batch_size,
        "compile": job.compile.enable,
        "loss_backend": job.compile.loss_backend,
        "attention": kernel,
        "activation_checkpoint": job.activation_checkpoint.mode,
        "cuda": torch.version.cuda or "",
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def load_state(
    parts: Parts, rt: Runtime, model: ShardedModel, checkpoints: Checkpointer
) -> tuple[TrainState, StepGuard, Clipper]:
    """Allocate the state of the run and fill it: from the checkpoint that the run resumes from, or with
    initial weights. Returns it with the guard, which is a part of it, and the clipper of the gradients.
    `model`: on the meta device. Collective."""
    job = parts.job
    with building(parts.num_parameters, rt.mesh.shards, job.ema.enable):
        if checkpoints.candidate is None:
            logger.info("initialising the weights")
        model.materialize(rt.device, job.training.seed)
        optimizer = job.optimizer.build(model.net, rt.mesh)
        check_covers(optimizer, model.net)
        job.optimizer.check_scheduled(optimizer, model.net)
        clipper = Clipper(job.training.clip, job.training.max_norm, model.net, optimizer)
        # With same bits all ranks have the same norm, and a mean of more copies could round otherwise.
        divisor = float(rt.world_size)
        if rt.mesh.same_bits:
            divisor = 1.0 if rt.rank == 0 else math.inf
        guard = StepGuard(job.guard, rt.device, divisor, parts.stages.loss_changes)
        state = TrainState(model.net, optimizer, rt.ranks.count(0), guard, rt.batch.global_size)
        state.skipped = job.data.skipped
        load_initial_weights(job, state, checkpoints)
        state.average = WeightAverage(job.ema, model.net)
        checkpoints.load(state)
        model.weights_changed()
    return state, guard, clipper


def load_initial_weights(job: Job, state: TrainState, checkpoints: Checkpointer) -> None:
    """Read the weights at checkpoint.initial_load_path into the model of a new run. For adapters, they are
    the base model, which is read at every start and which `state` records. Raises ConfigError if the resumed
    run had another base model. Collective."""
    resumed = checkpoints.candidate
    if not job.checkpoint.initial_load_path or (resumed is not None and not job.lora.enable):
        return
    path = local_copy(parse_path(job.checkpoint.initial_load_path, "checkpoint.initial_load_path"))
    if job.lora.enable:
        recorded = BaseModel.recorded_in(resumed.train) if resumed is not None else None
        state.base = load_base(path, job.model, state.net, checkpoints.ranks, recorded)
    else:
        load_initial(path, job.model, state.net, checkpoints.ranks)


def open_loader(parts: Parts, rt: Runtime, state: TrainState) -> Loader[Any]:
    """The loader of this rank's micro-batches, which continues at the position of `state`. The first rank of
    a node downloads the sequences of its ranks that are on a storage."""
    sequences, data, here = parts.sequences, parts.job.data, place()
    if isinstance(sequences, SequenceDataset) and sequences.remote:
        sequences.use_cache(SequenceCache(Path(data.cache_dir) / "sequences"))
    loader = sequences.loader(
        rt.mesh.dp_rank,
        parts.stages.step_sizes,
        first_sequence=state.num_sequences,
        skipped=state.skipped,
        stream_state=state.stream,
        pin_memory=rt.device.type == "cuda",
    )

    def downloads(order: MicroBatches) -> Downloads:
        assert isinstance(sequences, SequenceDataset)
        end = parts.stages.last_sequence(state.step, order.first_sequence, order.skipped)
        max_bytes = int(data.cache_gib * 2**30)
        return Downloads(sequences, NodeOrder(order, rt.mesh.dp_ranks(here.num_local_ranks), end), max_bytes)

    if sequences.remote and isinstance(loader, SequenceLoader) and here.local_rank == 0:
        loader.prefetch(downloads)
    return loader


def open_meter(parts: Parts, rt: Runtime, resumed_step: int, changes: Sequence[str]) -> Meter:
    """The meter of a run that continues after `resumed_step` (0: a new run), and on rank 0 its open sinks.
    `changes`: the result of `log_changes`."""
    job, sinks = parts.job, Sinks({})
    if rt.rank == 0:
        run = RunInfo.identify(job.folder, toml.as_tree(job), resumed_step, job.training.steps)
        sinks = job.metrics.open_sinks(run)
        if resumed_step:
            sinks.event(resumed_step, "resumed", {"changed": "; ".join(changes)} if changes else {})
    cost = StepCost(
        seq_len=job.training.seq_len,
        world_size=rt.world_size,
        flops_per_token=parts.flops_per_token,
        peak_flops=peak_bf16_flops(device_name(rt.device)) if rt.param_dtype == torch.bfloat16 else None,
    )
    is_measured = partial(job.metrics.is_due, last_step=job.training.steps)
    return Meter(rt.device, sinks, cost, rt.synchronize, rt.clock, is_measured, rt.ranks.max, rt.began)


def write_run_files(parts: Parts, rt: Runtime, resumed_step: int) -> None:
    """Write the files that record the run into its folder, on rank 0, with a copy of the tokenizer's. A run
    that has nothing left to train keeps its files: they describe how it was trained."""
    job = parts.job
    if rt.rank > 0 or resumed_step >= job.training.steps:
        return
    storage = storage_of(job.folder)
    storage.make_folder(job.folder)
    layout = job.parallelism.describe(rt.mesh.degrees, job.model.num_experts)
    files = {
        "job.toml": parts.job_toml,
        "env.json": json.dumps({**environment(rt), "layout": layout}, indent=1) + "\n",
        "sources.json": json.dumps({"sources": parts.sequences.shares()}, indent=1) + "\n",
        "run_identity.json": json.dumps(parts.identity, indent=1) + "\n",
    }
    for name, text in files.items():
        storage.put(job.folder / name, text.encode())
    job.tokenizer.copy_to(job.folder / TOKENIZER)


def log_steps(parts: Parts, start: Start, resumed: Candidate | None) -> None:
    """Log how much of the data the run reads, and the steps that it will take. `resumed`: the checkpoint that
    was loaded, which is an older one than the one of `start` if that was damaged."""
    job, lines = parts.job, parts.data_lines
    if resumed is not None and resumed is not start.candidate:
        lines = check_data(job, parts.stages, parts.sequences, resumed.train)
    for line in lines:
        logger.info(line)
    step = resumed.step if resumed is not None else 0
    if step < job.training.steps:
        compiling = " (the first one compiles)" if job.compile.enable else ""
        logger.info(f"steps {step + 1} to {job.training.steps}{compiling}")
