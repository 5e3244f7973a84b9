"""FSDP2 and HSDP: parameters are sharded per block and gathered in the compute dtype; gradients are summed in
the reduce dtype.

Gradients are summed over ranks, not averaged, because the loss is already divided by the number of tokens of
all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.models.moe import moe_layers_of
from titanlite.parallel.expert_parallel import fsdp_dim
from titanlite.parallelism import EXPERT_FSDP, Degrees, Parallelism
from titanlite.step_clock import StepClock
from titanlite.torch_compat import (
    finish_weight_backward,
    forget_fsdp_forwards,
    reduce_fsdp_in_computation_memory,
    time_fsdp_waits,
)


def frees_by_default(
    parallelism: Parallelism, degrees: Degrees, has_experts: bool, cpu_offload: bool
) -> bool:
    """Whether FSDP frees gathered parameters after the forward if fsdp_reshard_after_forward is "default".
    Where memory decides, reshard.py has replaced the value before.

    With one shard there is nothing to free; experts with separate mesh axes may have more shards than the
    other parameters. Pipeline parallel would gather again for each micro-batch."""
    num_shards = degrees.dp_shard * degrees.cp
    if has_experts and parallelism.has_expert_axes:
        num_shards = max(num_shards, degrees.of_experts(parallelism.expert_parallel_degree)[EXPERT_FSDP])
    return cpu_offload or (num_shards > 1 and degrees.pp == 1)


def apply_fsdp(
    net: Decoder,
    mesh: Mesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    parallelism: Parallelism,
    cpu_offload: bool,
) -> None:
    """Shard each block, the embedding and the head, in place. Tied embeddings are sharded with the root
    module. Experts with separate mesh axes are sharded before their block, which leaves them alone."""
    # cast_forward_inputs would also cast the rotary tables, which must stay fp32.
    # Gradients are exact in the dtype in which they were computed: ordered sums receive them in that one.
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=param_dtype if mesh.same_bits else reduce_dtype,
        cast_forward_inputs=False,
    )
    reshard = parallelism.fsdp_reshard_after_forward == "always"
    if parallelism.fsdp_reshard_after_forward == "default":
        reshard = frees_by_default(parallelism, mesh.degrees, bool(net.moe_layers()), cpu_offload)
    pinned = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type == "cuda")
    offload = pinned if cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mp_policy=policy, offload_policy=offload)
    blocks = list(net.blocks().values())
    # The backward begins with the head and the last block, so they stay gathered.
    for block in blocks:
        options = {"reshard_after_forward": reshard and block is not blocks[-1]}
        for layer in moe_layers_of(block) if mesh.has_expert_axes else ():
            # With other options than the block's, zero-bubble schedules would read freed weights.
            placement = fsdp_dim(layer.experts, mesh)
            shard(layer.experts, mesh=mesh.expert_fsdp, shard_placement_fn=placement, **options)
        shard(block, mesh=mesh.fsdp, **options)
    if reshard and mesh.has_expert_axes:
        _prefetch_next_block(blocks, len(blocks) - len(net.training_blocks()))
    for group in net.embedding_and_head():
        options = {"reshard_after_forward": reshard and isinstance(group[0], nn.Embedding)}
        shard(group, mesh=mesh.fsdp, **options)
    shard(net, mesh=mesh.fsdp, reshard_after_forward=False)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if isinstance(module, nn.Embedding):
                module.set_unshard_in_backward(False)  # an embedding's backward does not read the weight
    if mesh.same_bits:
        return
    if mesh.fsdp.device_type == "cuda" and not cpu_offload:
        _share_memory_of_gradients(net)  # offloaded gradients leave the device as soon as they are reduced


def _prefetch_next_block(blocks: list[nn.Module], num_always: int) -> None:
    """Begin to gather each block and its experts while the block before it runs, and in the backward the
    block after it. FSDP does so by itself only while the host runs ahead of the device, which the host
    synchronisation of expert parallel prevents. `num_always`: number of blocks that every forward runs. The
    weights of others, gathered in a validation, would be those of the next training step."""
    groups: list[list[Any]] = [
        [block, *(layer.experts for layer in moe_layers_of(block))] for block in blocks
    ]
    for i, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        if i + 1 < num_always:
            block.set_modules_to_forward_prefetch(groups[i + 1])
        if i > 0:
            block.set_modules_to_backward_prefetch(groups[i - 1])


def _share_memory_of_gradients(net: Decoder) -> None:
    """Let activations take the memory of the gradients that the optimizer has used."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            reduce_fsdp_in_computation_memory(module)


def time_waits(net: Decoder, clock: StepClock, on_cuda: bool) -> None:
    """Let `clock` count the time in which FSDP waits for its collectives."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            time_fsdp_waits(module, clock.waiting_in, on_cuda)


def sync_gradients(net: Decoder, on: bool) -> None:
    """Set whether the next backward reduces gradients. `on` is False while micro-batches accumulate."""
    if isinstance(net, FSDPModule):
        net.set_requires_gradient_sync(on)


def add_up_gradients(net: Decoder) -> None:
    """Add gradients in the compute dtype to FSDP's accumulators in the reduce dtype, after the separate
    weight backward of a zero-bubble schedule. FSDP does this only after a full backward."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            finish_weight_backward(module)


def reshard(net: Decoder) -> None:
    """Free gathered parameters after a forward without backward, and forget the forward. Otherwise some
    modules stay gathered, named_parameters() returns the gathered copies instead of the optimizer's
    parameters, and the next backward gathers parameters that it does not need."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            forget_fsdp_forwards(module)
