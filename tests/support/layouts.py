"""The axes of a layout and the options that change how a step is computed, for combination."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """An element of a combination: its number of ranks and its options."""

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
    "dp_shard": Part(2, []),
    "dp_replicate": axis("data_parallel_replicate"),
    "tp": axis("tensor_parallel"),
    "cp": axis("context_parallel"),
    "pp": axis("pipeline_parallel"),
    "pp interleaved": pipeline("Interleaved1F1B"),
    "pp zero bubble": pipeline("ZBVZeroBubble"),
}
FLOAT8 = ["--float8.enable", "--float8.emulate", "--compile.enable=false"]
TRACED = "--compile.backend=aot_eager"  # as torch.compile traces and divides it, without generated code
COMPILED = ["--compile.enable", TRACED]
MASKED = ["--data.packing=best_fit", "--data.mask_documents=true"]
SHORTER = (
    "--stages=[{ until = '8 sequences', seq_len = 16 }, { until = '16 sequences', seq_len = 8 }, "
    "{ until = 'end' }]"
)
# The rows of all matrices have a multiple of 64 values on each of two tensor-parallel ranks.
WIDE = ["--model.overrides.head_dim=32", "--model.overrides.hidden_dim=128"]
OPTIONS = {
    "full activation checkpointing": Part(1, ["--activation_checkpoint.mode=full"]),
    "op activation checkpointing": Part(1, ["--activation_checkpoint.mode=selective"]),
    "float8 tensorwise": Part(1, [*FLOAT8, "--float8.recipe=tensorwise"]),
    "float8 rowwise": Part(1, [*FLOAT8, "--float8.recipe=rowwise"]),
    "document masks": Part(1, MASKED),
    "stages of shorter sequences": Part(1, [SHORTER]),
    "Muon": Part(1, ["--optimizer.name=muon"]),
    "AdamW with 8-bit state": Part(1, [*WIDE, "--optimizer.state_dtype=int8"]),
    "CPU offload": Part(1, ["--training.enable_cpu_offload"]),
    "fsdp_reshard_after_forward always": Part(1, ["--parallelism.fsdp_reshard_after_forward=always"]),
    "fsdp_reduce micro_batch": Part(1, ["--parallelism.fsdp_reduce=micro_batch"]),
    "compile": Part(1, COMPILED),
    "compile, full activation checkpointing": Part(1, [*COMPILED, "--activation_checkpoint.mode=full"]),
    "compile, op activation checkpointing": Part(1, [*COMPILED, "--activation_checkpoint.mode=selective"]),
    "compile, memory_budget": Part(1, ["--compile.enable", "--activation_checkpoint.mode=memory_budget"]),
}


def combined(*names: str) -> Part:
    """All of these together."""
    parts = [{**AXES, **OPTIONS}[name] for name in names]
    ranks = 1
    for part in parts:
        ranks *= part.ranks
    return Part(ranks, [key for part in parts for key in part.keys])
