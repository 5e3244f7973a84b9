"""The log lines of a start: facts of the configuration, the layout, the changes since the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from titanlite.checkpoint.resume import Candidate
from titanlite.checkpoint.run_identity import differences, spell
from titanlite.checkpoint.state import TrainState
from titanlite.config import toml
from titanlite.config.resolve import value_at
from titanlite.data.dataset import RunSequences
from titanlite.job import Job
from titanlite.log import logger
from titanlite.models.base import Decoder
from titanlite.runtime.process import device_name
from titanlite.runtime.runtime import Runtime
from titanlite.stages import Stages

# Changes of these keys are not logged: they change no result, the run identity is compared for them, or, for
# data.skip_sequences, another line says what is in force.
NOT_LOGGED = (
    "job.", "checkpoint.", "comm.", "metrics.", "profiling.", "generation.", "model.", "lora.", "tokenizer.",
    "data.sources.", "data.skip_sequences", "data.cache_dir", "data.num_workers", "data.verify",
    "training.gc_freq",
)  # fmt: skip


def log_changes(
    job: Job, rt: Runtime, resumed: Candidate | None, stages: Stages, state: TrainState
) -> list[str]:
    """Log each key whose value differs from the job of the checkpoint that the run resumes, and by how much
    this changes the learning rate of the next step. Returns the changes, on rank 0."""
    if resumed is None or rt.rank > 0:
        return []
    train, saved = resumed.train, toml.parse(resumed.job_toml)  # nothing that the job names is imported
    now = toml.as_tree(job)
    saved.setdefault("training", {})["global_batch_size"] = train["global_batch_size"]
    now["training"]["global_batch_size"] = rt.batch.global_size  # the resolved number, if it is -1
    changes = [("ranks", resumed.manifest["ranks"], rt.world_size)]
    changes += [change for change in differences(saved, now) if not change[0].startswith(NOT_LOGGED)]
    texts = [f"{key} {spell(before)} -> {spell(after)}" for key, before, after in changes if before != after]
    for text in texts:
        logger.info(f"changed since step {train['step']}: {text}")
    next_step = state.step + 1, state.next_sequence
    # A component of the file that is no longer imported, or one that cannot tell the rate of this step.
    with suppress(Exception):
        then = toml.build(Job, saved, toml.read(None)[1])
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


def job_toml_text(job: Job, lines: Sequence[str]) -> str:
    """The job as TOML, below `lines` as comments."""
    return "".join(f"# {line}\n" for line in lines) + "\n" + toml.dump(job)


def log_start(job: Job, rt: Runtime, about: Sequence[str], sequences: RunSequences, kernel: str) -> None:
    """Log the model, the layout, the data and the batch. `about`: the lines of `summary`."""
    batch, num_micro_batches = rt.batch, rt.batch.num_micro_batches(rt.batch.global_size)
    offload = ", weights on the CPU" if job.training.enable_cpu_offload else ""
    bits = ", same bits on any number of ranks" if job.training.same_bits_on_any_ranks else ""
    dtype = str(rt.param_dtype).removeprefix("torch.")
    for line in about:
        logger.info(line)
    layout = job.parallelism.describe(rt.mesh.degrees, job.model.num_experts)
    logger.info(f"{rt.world_size} x {device_name(rt.device)}: {layout}{offload}, {dtype}{bits}")
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
