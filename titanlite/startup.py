"""The start of a run: its log lines, the files that record it, and the comparison with the checkpoint that it
continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.attention.base import AttentionBackend, AttentionNeeds
from titanlite.checkpoint import commit
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.run_folder import RunFolder
from titanlite.checkpoint.run_identity import differences, spell
from titanlite.checkpoint.state import BaseModel, TrainState, listed
from titanlite.config import toml
from titanlite.config.component import ConfigError, Unreadable, keys_in
from titanlite.config.resolve import value_at
from titanlite.data.dataset import RunSequences
from titanlite.data.loader import Loader, LoaderLayout
from titanlite.data.skips import SkippedSequences
from titanlite.data.sources import short_names
from titanlite.errors import LoaderError
from titanlite.files import write_atomically
from titanlite.flops import peak_bf16_flops
from titanlite.interop.formats import locate_base
from titanlite.interop.initial import check_initial, load_base, load_initial
from titanlite.interop.weights import ModelAndTokenizer
from titanlite.job import TOKENIZER, Job, build_tokenizer
from titanlite.log import logger
from titanlite.metrics.meter import Meter, StepCost
from titanlite.metrics.sinks.base import RunInfo, Sinks
from titanlite.models.base import Decoder
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Parallelism
from titanlite.runtime.process import device_name
from titanlite.runtime.runtime import Runtime, environment
from titanlite.runtime.training import BatchLayout
from titanlite.stages import Stages
from titanlite.tokenizers.base import Tokenizer


def check_device(
    job: Job, device: torch.device, param_dtype: torch.dtype, world_size: int
) -> tuple[AttentionBackend, str]:
    """The attention backend for this device, and the name of its kernel. Raises ConfigError if the job needs
    something that the device lacks."""
    job.float8.check_device(device)
    job.parallelism.check_device(device)
    job.compile.check_device(device)
    job.profiling.check(device, world_size)
    model = job.model.config
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
        window=job.model.sliding_window,
    )
    attention = job.attention.build(needs)
    return attention, attention.kernel(needs)


def parallel_settings(job: Job, rt: Runtime, attention: AttentionBackend) -> ParallelSettings:
    """The settings that decide how the model is sharded and run. Collective."""
    return ParallelSettings(
        parallelism=_resolve_reshard(job, rt),
        attention=attention,
        activation_checkpoint=job.activation_checkpoint,
        compile=job.compile,
        float8=job.float8,
        moe=job.moe,
        param_dtype=rt.param_dtype,
        reduce_dtype=rt.reduce_dtype,
        cpu_offload=job.training.enable_cpu_offload,
        clock=rt.clock,
    )


def _resolve_reshard(job: Job, rt: Runtime) -> Parallelism:
    """The section [parallelism] with "always" or "never" for a fsdp_reshard_after_forward of "default", and a
    line in the log. Unchanged on a CPU and without FSDP. Collective: all ranks decide by the memory of the
    smallest GPU."""
    is_sharded_on_gpus = rt.device.type == "cuda" and rt.mesh.device_mesh is not None
    if job.parallelism.fsdp_reshard_after_forward != "default" or not is_sharded_on_gpus:
        return job.parallelism
    frees, reason = job.step_memory(rt.world_size, rt.param_dtype).reshard(rt.smallest_memory())
    action = (
        "frees gathered weights after the forward" if frees else "keeps gathered weights for the backward"
    )
    logger.info(f"FSDP {action}: {reason}")
    return replace(job.parallelism, fsdp_reshard_after_forward="always" if frees else "never")


def open_tokenizer(job: Job) -> Tokenizer:
    """The job's tokenizer. Raises ConfigError if it has ids that the model's vocabulary lacks."""
    tokenizer = build_tokenizer(job)
    job.model.check_vocabulary(tokenizer.vocab_size)
    return tokenizer


def check_interop(job: Job, tokenizer: Tokenizer) -> None:
    """Raises ConfigError unless the initial weights, which only a new run and runs of adapters need, can be
    read."""
    config = job.checkpoint
    path, folder = Path(config.initial_load_path), RunFolder(config, job.folder, None)
    if job.lora.enable and (resumed := folder.newest()):
        path = locate_base(path, BaseModel.of(resumed.train))
    if config.initial_load_path and (job.lora.enable or folder.is_new_run()):
        check_initial(path, ModelAndTokenizer(job.model, tokenizer), is_base=job.lora.enable)


def load_initial_weights(job: Job, net: Decoder, checkpoints: Checkpointer, state: TrainState) -> None:
    """Read the weights at checkpoint.initial_load_path into `net`: those of a new run, or the base model of
    adapters, which `state` records. Raises ConfigError if the resumed run had another base model.
    Collective."""
    path, resumed = Path(job.checkpoint.initial_load_path), checkpoints.resumed_train
    if job.lora.enable:
        recorded = BaseModel.of(resumed) if resumed is not None else None
        state.base = load_base(path, job.model, net, checkpoints.ranks, recorded)
    elif resumed is None and job.checkpoint.initial_load_path:
        load_initial(path, job.model, net, checkpoints.ranks)


def pin_stream(job: Job, rt: Runtime) -> Job:
    """The job of a run on a stream, which names the version of the documents that the run reads, such as a
    commit: see `pinned`. Rank 0 looks it up, so that all ranks read the same. Collective."""
    if job.data.stream is None:
        return job
    sources = job.data.sources
    with rt.rank_zero_first():
        if rt.rank == 0:
            sources = pinned(job).data.sources
    return replace(job, data=replace(job.data, sources=rt.gather(sources)[0]))


def pinned(job: Job) -> Job:
    """The job, whose stream names the version of its documents: that of the run in the run folder, or else
    the newest one. Raises ConfigError, and LoaderError if a run that resumes cannot read its stream now."""
    stream = job.data.stream
    if stream is None:
        return job
    recorded: dict[str, Any] = {}
    with _restartable(job), keys_in("data.sources.0"):
        if not _is_new_run(job):
            with suppress(ConfigError, LookupError):  # without the record, the newest version is read
                recorded = toml.read(job.folder / "job.toml")[0]["data"]["sources"][0]
        return replace(job, data=replace(job.data, sources=[stream.pinned(recorded)]))


def open_data(job: Job, tokenizer: Tokenizer) -> RunSequences:
    """The sequences of the run; sources of raw text are tokenised on first use. Raises ConfigError for
    unusable input, and LoaderError if a run that resumes cannot read its stream now."""
    with _restartable(job):
        return job.data.build(tokenizer, seq_len=job.training.seq_len, seed=job.training.seed)


@contextmanager
def _restartable(job: Job) -> Iterator[None]:
    """An input that a run which resumes cannot read now was readable before, so another start may succeed: a
    LoaderError, whose exit code lets the launcher try it. For a new run it may be a mistake in a name."""
    try:
        yield
    except Unreadable as e:
        if _is_new_run(job):
            raise
        raise LoaderError(str(e)) from None


def _is_new_run(job: Job) -> bool:
    return RunFolder(job.checkpoint, job.folder, None).is_new_run()


def check_run_folder(job: Job, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the run folder holds a run that this job cannot continue, as far as this can
    be known before any source is opened."""
    data = job.data.label_identity(tokenizer, seq_len=job.training.seq_len, seed=job.training.seed)
    if job.stages:  # a source may be new, if the stages so far do not read it
        del data["sources"]
    RunFolder(job.checkpoint, job.folder, job.identity(data, {})).check_known_identity()


def last_sequence(job: Job, stages: Stages, step: int, position: int, skipped: SkippedSequences) -> int:
    """The position in the data order after the last step of a run that has taken `step` steps and is at
    `position`."""
    num_left = max(job.training.steps - step, 0)
    taken = position - skipped.below(position).count()
    end = stages.step_sizes.without(skipped).position_after(num_left, taken)
    return skipped.advance(position, end - taken)


def check_data(
    job: Job, stages: Stages, sequences: RunSequences, resumed_train: dict[str, Any] | None
) -> list[str]:
    """One line per source on how much of it the whole run reads, one per stage, and one on the sequences that
    the run skips, if there are any. `resumed_train`: the checkpoint's train.json.

    Raises ConfigError if the global batch size differs from the resumed run's only because the number of
    ranks does, if the run has trained on sequences that it should skip, if it reads a source for more than
    its max_epochs, or if it cannot continue a stream on its layout."""
    sequences.check_resumed(resumed_train)
    check_global_batch(job, stages.batch_size, resumed_train)
    skipped = skipped_sequences(job, resumed_train)
    step, position = (resumed_train["step"], resumed_train["sequences"]) if resumed_train else (0, 0)
    lines = sequences.describe(last_sequence(job, stages, step, position, skipped))
    lines += stages.describe(short_names(job.data.sources))
    if skipped:
        lines.append(f"skipped for good: {_spelled(skipped)}; {skipped.count():,} in all")
    return lines


def check_global_batch(job: Job, size: int, resumed_train: dict[str, Any] | None) -> None:
    """Raises ConfigError if the global batch size differs from the resumed run's only because the number of
    ranks does. `resumed_train`: the checkpoint's train.json."""
    before = resumed_train["global_batch_size"] if resumed_train else size
    if size == before:
        return
    if job.training.global_batch_size == -1:
        raise ConfigError(
            f"this run takes {before} sequences per step; global_batch_size = -1 would make it {size} here: "
            f"set --training.global_batch_size={before} to keep it, or ={size} to change it"
        )


def skipped_sequences(job: Job, resumed_train: dict[str, Any] | None) -> SkippedSequences:
    """The sequences that the run never trains on: those of data.skip_sequences, and those of the resumed run.
    Raises ConfigError if the run has trained on sequences of data.skip_sequences. `resumed_train`: the
    checkpoint's train.json."""
    if resumed_train is None:
        return job.data.skipped
    before, position = SkippedSequences.of(resumed_train["skipped"]), resumed_train["sequences"]
    if trained := job.data.skipped.below(position) - before:
        raise ConfigError(
            f"the run has already trained on {_spelled(trained)}: after step "
            f"{resumed_train['step']} it continues with sequence {position}. Name later sequences only, or "
            "go back to a step before them with --checkpoint.load_step",
            "data.skip_sequences",
        )
    return before | job.data.skipped


def _spelled(skipped: SkippedSequences) -> str:
    """Such as `sequence 5` and `sequences 5, 7 to 9`."""
    texts = [f"{first} to {last}" if last > first else f"{first}" for first, last in skipped.ranges]
    is_one = len(texts) == 1 and texts[0].isdecimal()
    return f"sequence{'' if is_one else 's'} {listed(texts)}"


def check_same_on_all_ranks(job: Job, identity: dict[str, Any], rt: Runtime) -> None:
    """Raises ConfigError on all ranks unless all ranks have the same run identity and skip the same
    sequences. Collective."""
    data = {**identity["data"], "skip_sequences": job.data.skipped.as_lists()}
    own = {**identity, "data": data}
    sha256 = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest()
    digests = rt.gather_floats([float(int.from_bytes(sha256[:6], "little"))])  # exact: 48 bits
    if all(digest == digests[0] for digest in digests):
        return  # whole identities of thousands of ranks are large: they are gathered only for the message
    identities = rt.gather(own)
    for rank, other in enumerate(identities):
        changes = [
            f"{key} is {spell(value)} on rank {rank}, {spell(first)} on rank 0"
            for key, first, value in differences(identities[0], other)
        ]
        if changes:
            raise ConfigError(f"data, tokenizer or model differ: {listed(changes, separator='; ')}")


# Changes of these keys are not logged: they change no result, the run identity is compared for them, or, for
# data.skip_sequences, another line says what is in force.
NOT_LOGGED = (
    "job.", "checkpoint.", "comm.", "metrics.", "profiling.", "generation.", "model.", "lora.", "tokenizer.",
    "data.sources.", "data.skip_sequences", "data.cache_dir", "data.num_workers", "data.verify",
    "training.gc_freq",
)  # fmt: skip


def log_changes(
    job: Job, rt: Runtime, checkpoints: Checkpointer, stages: Stages, state: TrainState
) -> list[str]:
    """Log each key whose value differs from the job of the checkpoint that the run resumes, and by how much
    this changes the learning rate of the next step. Returns the changes, on rank 0."""
    path, train = checkpoints.resumed_path, checkpoints.resumed_train
    if path is None or train is None or rt.rank > 0:
        return []
    saved, locator = toml.read(path / "job.toml")  # nothing that the file names is imported
    now = toml.as_tree(job)
    saved.setdefault("training", {})["global_batch_size"] = train["global_batch_size"]
    now["training"]["global_batch_size"] = rt.batch.global_size  # the resolved number, if it is -1
    changes = [("ranks", commit.read_manifest(path)["ranks"], rt.world_size)]
    changes += [change for change in differences(saved, now) if not change[0].startswith(NOT_LOGGED)]
    texts = [f"{key} {spell(before)} -> {spell(after)}" for key, before, after in changes if before != after]
    for text in texts:
        logger.info(f"changed since step {train['step']}: {text}")
    next_step = state.step + 1, state.next_sequence
    # A component of the file that is no longer imported, or one that cannot tell the rate of this step.
    with suppress(Exception):
        then = toml.build(Job, saved, locator)
        rate = then.learning_rate(then.open_stages(train["global_batch_size"]), *next_step)
        new = job.learning_rate(stages, *next_step)
        if new != rate and state.step < job.training.steps:
            logger.info(f"these change the learning rate of step {state.step + 1}: {rate:.3g} -> {new:.3g}")
    return texts


def summary(job: Job, net: Decoder, num_ids: int | None) -> list[str]:
    """Lines on facts that follow from the configuration: the model's shape and the optimizer's groups. `net`:
    the whole model. `num_ids`: ids of the tokenizer; None: unknown."""
    size = sum(p.numel() for p in net.parameters())
    changed = " with overrides" if job.model.overrides and not job.model.origin else ""
    ids = "" if num_ids is None else f"; the tokenizer has {num_ids} ids"
    return [
        f"{job.model.title}{changed}: {size:,} parameters",
        f"{job.model.shape()}{ids}",
        *job.moe.describe(job.model.num_experts),
        *job.lora.describe(net),
        *job.optimizer.describe(net),
    ]


def open_stages(
    job: Job, ranks: int, sequences: RunSequences, about: Sequence[str] = ()
) -> tuple[Job, Stages, list[str]]:
    """The job with all its amounts of training as numbers of steps and sequences on `ranks` ranks, its
    stages, whose weights the sources get, and `about` with the lines of `about_steps` added. Raises
    ConfigError for numbers of steps that do not fit together."""
    resolved = job.resolved(ranks, sequences.epoch_sequences)
    batch = BatchLayout.from_training(job.training, job.parallelism.degrees(ranks).data_parallel)
    sequences.layout = LoaderLayout(batch.num_ranks, job.data.num_workers, batch.micro_batch_size)
    stages = resolved.open_stages(batch.global_size)
    weights = [stage.weights_of(short_names(job.data.sources)) for stage in stages.stages]
    sequences.set_stages(job.data.sources, list(zip(stages.firsts, weights)))
    return resolved, stages, [*about, *about_steps(job, resolved)]


def about_steps(given: Job, job: Job) -> list[str]:
    """Lines on facts that follow from numbers of steps: the schedule, and the number of steps of each amount
    of training in the job as it was `given`. `job`: the same job, resolved; amounts in epochs may remain."""
    left, lines = job.amounts(), list[str]()
    if not left:
        schedule = job.lr_scheduler.describe(job.training.steps)
        lines += [f"learning rate: {schedule}", *job.ema.describe()]
    for key, amount in given.amounts().items():
        value = value_at(job, key)  # a number of steps, or a text such as "1000 sequences"
        number = f" = {value:,.0f} steps" if isinstance(value, (int, float)) else f" = {value}"
        lines.append(f"{key}: {amount}{', counted once the data is open' if key in left else number}")
    return lines


def open_checkpoints(
    job: Job,
    stages: Stages,
    sequences: RunSequences,
    identity: dict[str, Any],
    about: Sequence[str],
) -> Checkpointer:
    """The checkpoints of the run. Raises ConfigError if the run folder holds a run with another identity, and
    the errors of `check_data`; for a new run, before its folder is made. `about`: the lines of `summary`, for
    the job.toml of each checkpoint. Collective."""
    if _is_new_run(job):
        check_data(job, stages, sequences, None)
    checkpoints = Checkpointer(
        job.checkpoint,
        job.folder,
        identity,
        job_toml_text(job, about),
        rewind_distance=job.guard.rewind_distance,
    )
    check_data(job, stages, sequences, checkpoints.resumed_train)
    return checkpoints


def job_toml_text(job: Job, lines: Sequence[str]) -> str:
    """The job as TOML, below `lines` as comments."""
    return "".join(f"# {line}\n" for line in lines) + "\n" + toml.dump(job)


def log_start(job: Job, rt: Runtime, about: Sequence[str], sequences: RunSequences, kernel: str) -> None:
    """Log the model, the layout, the data and the batch. `about`: the lines of `summary`."""
    batch, num_micro_batches = rt.batch, rt.batch.num_micro_batches(rt.batch.global_size)
    offload = ", weights on the CPU" if job.training.enable_cpu_offload else ""
    dtype = str(rt.param_dtype).removeprefix("torch.")
    for line in about:
        logger.info(line)
    layout = job.parallelism.describe(rt.mesh.degrees, job.model.num_experts)
    logger.info(f"{rt.world_size} x {device_name(rt.device)}: {layout}{offload}, {dtype}")
    logger.info(f"{sequences.describe_size()}, {sequences.num_held_out:,} held out")
    for line in sequences.describe_conversations(min(job.sequence_lengths().values())):
        logger.info(line)
    logger.info(
        f"{batch.global_size} sequences per step: {num_micro_batches} "
        f"micro-batch{'es' if num_micro_batches > 1 else ''} of {batch.micro_batch_size} per rank"
    )
    masked = ", documents masked from each other" if job.data.mask_documents else ""
    mode = job.activation_checkpoint.mode
    logger.info(f"attention by {kernel}{masked}; activation checkpointing {mode}; {job.loss.name}")


def open_loader(
    job: Job, rt: Runtime, sequences: RunSequences, stages: Stages, state: TrainState
) -> Loader[Any]:
    """The loader of this rank's micro-batches, which continues at the position of `state`."""
    return sequences.loader(
        rt.mesh.dp_rank,
        stages.step_sizes,
        first_sequence=state.num_sequences,
        skipped=state.skipped,
        stream_state=state.stream,
        pin_memory=rt.device.type == "cuda",
    )


def open_meter(
    job: Job, rt: Runtime, flops_per_token: Mapping[int, int], resumed_step: int, changes: Sequence[str]
) -> Meter:
    """The meter of a run that continues after `resumed_step` (0: a new run), and on rank 0 its open sinks.
    `changes`: the result of `log_changes`."""
    sinks = Sinks({})
    if rt.rank == 0:
        run = RunInfo.of(job.folder, toml.as_tree(job), resumed_step, job.training.steps)
        sinks = job.metrics.open_sinks(run)
        if resumed_step:
            sinks.event(resumed_step, "resumed", {"changed": "; ".join(changes)} if changes else {})
    cost = StepCost(
        seq_len=job.training.seq_len,
        world_size=rt.world_size,
        flops_per_token=flops_per_token,
        peak_flops=peak_bf16_flops(device_name(rt.device)) if rt.param_dtype == torch.bfloat16 else None,
    )
    is_measured = partial(job.metrics.is_due, last_step=job.training.steps)
    return Meter(rt.device, sinks, cost, rt.synchronize, rt.clock, is_measured, rt.max, rt.began)


def write_run_files(job: Job, rt: Runtime, checkpoints: Checkpointer, sequences: RunSequences) -> None:
    """Write the files that record the run into its folder, on rank 0, with a copy of the tokenizer's. A run
    that has nothing left to train keeps its files: they describe how it was trained."""
    resumed = checkpoints.resumed_train
    if rt.rank > 0 or (resumed is not None and resumed["step"] >= job.training.steps):
        return
    job.folder.mkdir(parents=True, exist_ok=True)
    files = {
        "job.toml": checkpoints.job_toml,
        "env.json": json.dumps(environment(rt), indent=1) + "\n",
        "sources.json": json.dumps({"sources": sequences.shares()}, indent=1) + "\n",
        "run_identity.json": json.dumps(checkpoints.identity, indent=1) + "\n",
    }
    for name, text in files.items():
        write_atomically(job.folder / name, text)
    job.tokenizer.copy_to(job.folder / TOKENIZER)


def log_steps(
    job: Job, stages: Stages, sequences: RunSequences, resumed_train: dict[str, Any] | None
) -> None:
    """Log the lines of `check_data`, which is called again because the checkpoints may have fallen back to an
    older one with another batch size, and the steps that the run will take. `resumed_train`: the train.json
    of the checkpoint that was loaded."""
    for line in check_data(job, stages, sequences, resumed_train):
        logger.info(line)
    step = resumed_train["step"] if resumed_train else 0
    if step < job.training.steps:
        compiling = " (the first one compiles)" if job.compile.enable else ""
        logger.info(f"steps {step + 1} to {job.training.steps}{compiling}")
