"""The axes of a layout and the options that change how a step is computed, to be combined."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Something to combine: how many ranks it takes, and how it is asked for."""

    ranks: int
    keys: list[str]


def axis(name: str, *keys: str) -> Part:
    """Two ranks along one axis of the mesh."""
    return Part(2, [f"--parallelism.{name}_degree=2", *keys])


def pipeline(schedule: str) -> Part:
    """Two ranks with two pipeline stages each: a layer per stage."""
    key = f"--parallelism.pipeline_parallel_schedule={schedule}"
    return axis("pipeline_parallel", key, "--model.overrides.n_layers=4")


AXES = {
    "shard": Part(2, []),
    "replicate": axis("data_parallel_replicate"),
    "tensor": axis("tensor_parallel"),
    "context": axis("context_parallel"),
    "pipeline": axis("pipeline_parallel"),
    "interleaved": pipeline("Interleaved1F1B"),
    "zero bubble": pipeline("ZBVZeroBubble"),
}
FLOAT8 = ["--float8.enable", "--float8.emulate", "--compile.enable=false"]
TRACED = "--compile.backend=aot_eager"  # as torch.compile traces and divides it, without generated code
COMPILED = ["--compile.enable", TRACED]
MASKED = ["--data.packing=best_fit", "--data.mask_documents=true"]
OPTIONS = {
    "recompute full": Part(1, ["--activation_checkpoint.mode=full"]),
    "recompute op": Part(1, ["--activation_checkpoint.mode=selective"]),
    "float8 tensorwise": Part(1, [*FLOAT8, "--float8.recipe=tensorwise"]),
    "float8 rowwise": Part(1, [*FLOAT8, "--float8.recipe=rowwise"]),
    "masked documents": Part(1, MASKED),
    "CPU offload": Part(1, ["--training.enable_cpu_offload"]),
    "reshard always": Part(1, ["--parallelism.fsdp_reshard_after_forward=always"]),
    "reduce by micro-batch": Part(1, ["--parallelism.fsdp_reduce=micro_batch"]),
    "compile": Part(1, COMPILED),
    "compile, recompute full": Part(1, [*COMPILED, "--activation_checkpoint.mode=full"]),
    "compile, recompute op": Part(1, [*COMPILED, "--activation_checkpoint.mode=selective"]),
    "compile, memory budget": Part(1, ["--compile.enable", "--activation_checkpoint.mode=memory_budget"]),
}


def combined(*names: str) -> Part:
    """All of these at once."""
    parts = [{**AXES, **OPTIONS}[name] for name in names]
    ranks = 1
    for part in parts:
        ranks *= part.ranks
    return Part(ranks, [key for part in parts for key in part.keys])
