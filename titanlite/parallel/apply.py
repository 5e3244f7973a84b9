"""The order of the transforms: float8, expert parallel, tensor parallel, activation checkpointing, compile,
pipeline parallel, FSDP. A new transform gets a file of its own and a line in `parallelize`.

With tensor parallel, compile comes before activation checkpointing, which then repeats compiled forwards:
torch 2.13 cannot compile the repeated forward of a tensor-parallel block."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from titanlite.attention.auto import Auto
from titanlite.attention.base import AttentionBackend
from titanlite.losses import WHOLE_VOCABULARY, Loss
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder, HeadFn, logits
from titanlite.models.load_balance import LoadBalance
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint, apply_activation_checkpoint
from titanlite.parallel.compile import Compile, apply_compile, compile_forwards
from titanlite.parallel.expert_loads import ExpertLoads
from titanlite.parallel.expert_parallel import apply_expert_parallel
from titanlite.parallel.float8 import Float8, apply_float8
from titanlite.parallel.fsdp import apply_fsdp, time_waits
from titanlite.parallel.pipeline_parallel import ZERO_BUBBLE, Pipeline, apply_pipeline_parallel
from titanlite.parallel.precision import apply_precision
from titanlite.parallel.probe import mlp_units
from titanlite.parallel.sharded_model import ExecutionSettings, ShardedModel
from titanlite.parallel.tensor_parallel import (
    apply_tensor_parallel,
    gather_for_loss,
    gather_logits,
    vocabulary_shard,
)
from titanlite.parallel.torch_compat import enable_async_tensor_parallel, recompute_float8_copies
from titanlite.parallelism import Parallelism
from titanlite.step_clock import StepClock


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The sections and dtypes that decide how a model is sharded and run. `attention`: the backend that
    `AttentionBackend.build` returned. `clock`: measures the phases of the steps."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    attention: AttentionBackend = field(default_factory=Auto)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    moe: LoadBalance = field(default_factory=LoadBalance)
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    cpu_offload: bool = False
    clock: StepClock = field(default_factory=lambda: StepClock(torch.device("cpu")))


def parallelize(net: Decoder, loss: Loss, mesh: Mesh, settings: ParallelSettings) -> ShardedModel:
    """Apply all transforms to `net`, which stays on the meta device: the model of this rank's stages and
    shards. A single process does not shard."""
    parallelism, float8, compile = settings.parallelism, settings.float8, settings.compile
    units = mlp_units(net)
    zero_bubble = mesh.pp is not None and parallelism.pipeline_parallel_schedule in ZERO_BUBBLE
    loads = ExpertLoads(net, settings.moe, mesh, zero_bubble, settings.clock, mesh.expert_degree)
    apply_float8(net, float8, sharded=mesh.device_mesh is not None, ranks=mesh.degrees.tp)
    apply_expert_parallel(net, mesh, parallelism)
    head_fn_for_logits: HeadFn = logits
    vocabulary, gather = WHOLE_VOCABULARY, None
    if mesh.degrees.tp == 1:
        loss_function = loss.build(compile.loss_backend)
        apply_activation_checkpoint(net, settings.activation_checkpoint, settings.attention.kept_ops)
        apply_compile(net, compile, mesh.has_expert_axes, compile_options(settings, mesh))
    else:
        apply_tensor_parallel(net, mesh.tp, float8)
        vocabulary = vocabulary_shard(net.vocab_size, mesh.tp)
        loss_function = loss.build(compile.loss_backend, vocabulary)
        gather = partial(gather_for_loss, mesh=mesh.tp)
        head_fn_for_logits = gather_logits(mesh.tp)
        compile_forwards(net, compile, compile_options(settings, mesh))
        apply_activation_checkpoint(net, settings.activation_checkpoint, settings.attention.kept_ops)
    net, stages = apply_pipeline_parallel(net, parallelism, mesh)
    dtype, offload = settings.param_dtype, settings.cpu_offload
    if mesh.device_mesh is None:
        apply_precision(net, dtype)
    else:
        for stage in stages.values():
            apply_fsdp(stage, mesh, dtype, settings.reduce_dtype, parallelism, offload)
            time_waits(stage, settings.clock, on_cuda=mesh.fsdp.device_type == "cuda")
    pipeline = None
    if mesh.pp is not None:
        schedule = parallelism.pipeline_parallel_schedule
        pipeline = Pipeline(stages, schedule, mesh.pp, mesh.degrees.tp, dtype)
    # With a reduce_dtype other than fp32, FSDP would accumulate micro-batches in that dtype.
    every_micro_batch = parallelism.fsdp_reduce == "micro_batch" or settings.reduce_dtype != torch.float32
    execution = ExecutionSettings(
        mesh=mesh,
        auxiliary_losses=loss.auxiliary_losses,
        mlp_units=units,
        pipeline=pipeline,
        vocabulary=vocabulary,
        gather_for_loss=gather,
        head_fn_for_logits=head_fn_for_logits,
        reduce_every_micro_batch=every_micro_batch,
        gathers_float8=float8.gathers_float8 and mesh.device_mesh is not None,
        cpu_offload=offload,
        expert_loads=loads,
        cuda_graphs=compile.cuda_graphs,
        clock=settings.clock,
    )
    return ShardedModel(net, loss_function, settings.attention, execution)


def compile_options(settings: ParallelSettings, mesh: Mesh) -> dict[str, Any] | None:
    """Options of torch.compile for the blocks; None if they need none."""
    if not settings.compile.enable or settings.compile.backend != "inductor":
        return None  # other backends take no options
    options = dict[str, Any]()
    if settings.float8.gathers_float8 and mesh.device_mesh is not None:
        options |= recompute_float8_copies()
    overlaps = mesh.degrees.tp > 1 and settings.parallelism.enable_async_tensor_parallel
    if overlaps and mesh.tp.device_type == "cuda":
        options |= enable_async_tensor_parallel(mesh.tp)
    return options or None
