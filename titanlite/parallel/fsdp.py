"""FSDP2 and HSDP: parameters sharded per block, gathered in the compute dtype, gradients summed in the reduce
dtype.

Gradients are sums, not averages: the loss is already divided by the tokens of all ranks, so FSDP's own
division is off.
"""

from __future__ import annotations

from functools import partial

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
from titanlite.torch_compat import finish_weight_backward

SMALL = 0.05  # of the device's memory


def apply_fsdp(
    net: Decoder,
    mesh: Mesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: str,
    cpu_offload: bool,
) -> None:
    """Shard each block, the embedding and the head, in place. Tied embeddings are in the root's group."""
    # Inputs are not cast: activations have the parameters' dtype from the embedding on, and the rotary tables
    # must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    many = mesh.fsdp.shape[-1] > 1 and mesh.pp is None
    default = cpu_offload or (many and not _is_small(net, param_dtype, mesh.fsdp.device_type))
    reshard = {"always": True, "never": False, "default": default}[reshard_after_forward]
    pinned = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type == "cuda")
    offload = pinned if cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload)
    blocks = list(net.blocks().values())
    for block in blocks:
        # The backward begins with the last block and the head: freeing those would be for nothing.
        free = reshard and block is not blocks[-1]
        shard(block, reshard_after_forward=free)
    for group in net.embedding_and_head():
        free = reshard and isinstance(group[0], nn.Embedding)
        shard(group, reshard_after_forward=free)
    shard(net, reshard_after_forward=False)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if isinstance(module, nn.Embedding):
                module.set_unshard_in_backward(False)  # which does not read the weight


def _is_small(net: Decoder, dtype: torch.dtype, device_type: str) -> bool:
    """Whether all blocks, gathered, leave almost as much memory as one: then the second gathering is time
    for nothing. The same on all ranks, whatever their devices; collective."""
    if device_type != "cuda":
        return False
    gathered = sum(p.numel() for p in net.blocks().parameters()) * dtype.itemsize
    device = torch.cuda.current_device()
    memory = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    torch.distributed.all_reduce(memory, torch.distributed.ReduceOp.MIN)
    return gathered <= SMALL * memory.item()


def sync_gradients(net: Decoder, on: bool) -> None:
    """Whether the coming backward reduces gradients; off while micro-batches accumulate."""
    if isinstance(net, FSDPModule):
        net.set_requires_gradient_sync(on)


def add_up_gradients(net: Decoder) -> None:
    """Move gradients in the compute dtype, as they come out of a backward, to where micro-batches add up, in
    the reduce dtype. FSDP does so after a backward of its own; not after one of the weights alone, and the
    next would add to them in bf16."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            finish_weight_backward(module)


def reshard(net: Decoder) -> None:
    """Free gathered parameters after a forward that no backward follows. Some groups stay gathered
    otherwise, and named_parameters() would give the gathered copies, not the optimizer's."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
