"""The order of the transforms: float8, expert parallel, tensor parallel, activation checkpointing, compile,
pipeline parallel, FSDP. A new transform gets a file and a line in `parallelize`."""

from __future__ import annotations

from typing import Any

from titanlite.losses import Loss
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.parallel.activation_checkpoint import apply_activation_checkpoint
from titanlite.parallel.compile import apply_compile, compile_forwards
from titanlite.parallel.expert_loads import ExpertLoads
from titanlite.parallel.expert_parallel import apply_expert_parallel
from titanlite.parallel.float8 import apply_float8
from titanlite.parallel.fsdp import apply_fsdp, time_waits
from titanlite.parallel.pipeline_parallel import ZERO_BUBBLE, Pipeline, apply_pipeline_parallel
from titanlite.parallel.precision import apply_precision
from titanlite.parallel.probe import mlp_units
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.parallel.tensor_parallel import apply_tensor_parallel
from titanlite.torch_compat import enable_async_tensor_parallel, recompute_float8_copies


def parallelize(net: Decoder, loss: Loss, mesh: Mesh, settings: ParallelSettings) -> ShardedModel:
    """Apply all transforms to `net`, which stays on the meta device: the model of this rank's stages and
    shards. A single process does not shard."""
    parallelism, schedule = settings.parallelism, settings.parallelism.pipeline_parallel_schedule
    units = mlp_units(net)
    zero_bubble = mesh.pp is not None and schedule in ZERO_BUBBLE
    loads = ExpertLoads(net, settings.moe, mesh, zero_bubble, settings.clock, mesh.expert_degree)
    apply_float8(net, settings.float8, sharded=mesh.device_mesh is not None, ranks=mesh.degrees.tp)
    apply_expert_parallel(net, mesh, parallelism)
    options = compile_options(settings, mesh)
    if mesh.degrees.tp == 1:
        apply_activation_checkpoint(net, settings.activation_checkpoint, settings.attention.kept_ops)
        apply_compile(net, settings.compile, mesh.has_expert_axes, options)
    else:
        apply_tensor_parallel(net, mesh.tp, settings.float8)
        # Activation checkpointing comes last and repeats compiled forwards, because torch 2.13 cannot compile
        # the repeated forward of a tensor-parallel block.
        compile_forwards(net, settings.compile, options)
        apply_activation_checkpoint(net, settings.activation_checkpoint, settings.attention.kept_ops)
    net, stages = apply_pipeline_parallel(net, parallelism, mesh)
    if mesh.device_mesh is None:
        apply_precision(net, settings.param_dtype)
    else:
        for stage in stages.values():
            apply_fsdp(
                stage, mesh, settings.param_dtype, settings.reduce_dtype, parallelism, settings.cpu_offload
            )
            time_waits(stage, settings.clock, on_cuda=mesh.fsdp.device_type == "cuda")
    pipeline = None
    if mesh.pp is not None:
        pipeline = Pipeline(stages, schedule, mesh.pp, mesh.degrees.tp, settings.param_dtype)
    return ShardedModel(net, loss, mesh, settings, pipeline=pipeline, expert_loads=loads, mlp_units=units)


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
