"""The order of the transforms: float8, tensor parallel, recompute, compile, pipeline, shard. A new one gets
a file, and a line here."""

from __future__ import annotations

import torch

from titanlite.losses import Loss
from titanlite.mesh import Mesh, Parallelism
from titanlite.models.base import Decoder
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint, apply_recompute
from titanlite.parallel.compile import Compile, apply_compile, compile_forwards
from titanlite.parallel.float8 import Float8, apply_float8
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.pipeline_parallel import Pipeline, apply_pipeline
from titanlite.parallel.precision import apply_precision
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.parallel.tensor_parallel import (
    apply_tensor,
    logits_of_all_tokens,
    of_all_tokens,
    vocabulary_part,
)


def parallelize(
    net: Decoder,
    loss: Loss,
    mesh: Mesh,
    *,
    attention: str,
    float8: Float8,
    recompute: ActivationCheckpoint,
    compile: Compile,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    parallelism: Parallelism,
    cpu_offload: bool = False,
) -> ShardedModel:
    """This rank's part of `net`, still on meta. A single process is left unsharded."""
    apply_float8(net, float8, sharded=mesh.device_mesh is not None, ranks=mesh.degrees.tensor)
    project = None
    if mesh.degrees.tensor == 1:
        loss_function = loss.build(compile.loss_backend)
        apply_recompute(net, recompute)
        apply_compile(net, compile)
    else:
        apply_tensor(net, mesh.tensor, float8)
        part = vocabulary_part(net.vocab_size, mesh.tensor)
        loss_function = of_all_tokens(loss.build(compile.loss_backend, part), mesh.tensor)
        project = logits_of_all_tokens(mesh.tensor)
        compile_forwards(net, compile)
        apply_recompute(net, recompute)
    net, stages = apply_pipeline(net, parallelism, mesh)
    if mesh.device_mesh is None:
        apply_precision(net, param_dtype)
    else:
        for stage in stages.values():
            reshard = parallelism.fsdp_reshard_after_forward
            apply_fsdp(stage, mesh, param_dtype, reduce_dtype, reshard, cpu_offload)
    pipeline = None
    if mesh.pipeline is not None:
        schedule, divided = parallelism.pipeline_parallel_schedule, mesh.degrees.tensor
        pipeline = Pipeline(stages, schedule, mesh.pipeline, divided, param_dtype)
    return ShardedModel(
        net,
        loss_function,
        attention,
        mesh,
        project,
        pipeline,
        # FSDP would add micro-batches up in the dtype in which it reduces.
        reduce_each=parallelism.fsdp_reduce == "micro_batch" or reduce_dtype != torch.float32,
        float8_scales=float8.gathers_float8 and mesh.device_mesh is not None,
        cpu_offload=cpu_offload,
    )
