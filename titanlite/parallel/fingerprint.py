"""Fingerprints: digests of the results of a micro-batch. Ranks that compute the same micro-batch are compared
by them, which finds a GPU that computes wrong numbers without an error.

A digest is the sum of the bit patterns of a tensor's elements as integers. It is exact in any order of the
additions, changes with each single bit, and is computed on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanlite.data.batch import Batch
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.parallel.cuda_graphs import MicroBatchLosses
from titanlite.parallel.fsdp import sync_gradients
from titanlite.parallelism import REPLICAS
from titanlite.torch_compat import take_local_gradients

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum mod 2^64 of the bit patterns of all elements, an int64 scalar."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


class Fingerprint:
    """Makes the fingerprint of one micro-batch on this rank. `gradients`: the digest of the gradient of each
    block, and of all other parameters under the name `other parameters`."""

    def __init__(self, net: Decoder):
        self._net, device = net, next(net.parameters()).device
        names = {module: name for name, module in net.named_modules()}
        self._blocks = [names[block] for block in net.blocks().values()]
        units = [*self._blocks, "other parameters"]
        self.gradients = {unit: torch.zeros((), dtype=torch.int64, device=device) for unit in units}

    @contextmanager
    def taking_gradients(self) -> Iterator[None]:
        """Add the gradients of the body's backward to the digests, and throw them away. FSDP does not reduce
        them, and each block's are freed after its backward."""
        sync_gradients(self._net, False)  # forward_backward sets it again
        with ExitStack() as stack:
            modules: dict[str, nn.Module] = dict(self._net.named_modules())
            for name, module in modules.items():
                if isinstance(module, FSDPModule):
                    stack.enter_context(take_local_gradients(module, partial(self._add, name)))
            yield
        for name, parameter in self._net.named_parameters():  # of a single process without FSDP
            if parameter.grad is not None:
                self._add(name, parameter.grad)
                parameter.grad = None

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        """`name`: of the parameter, or of its module."""
        blocks = (block for block in self._blocks if f"{name}.".startswith(f"{block}."))
        self.gradients[next(blocks, "other parameters")] += bit_sum(gradient)

    def values(self, losses: MicroBatchLosses) -> dict[str, torch.Tensor]:
        """All digests by name, in an order that is equal on all ranks. `losses`: of the micro-batch."""
        of_loss = {} if losses.of_loss is None else {"auxiliary losses of the loss": losses.of_loss}
        values = {"loss": losses.tokens} | losses.auxiliary | of_loss
        gradients = {f"gradient of {unit}": digest for unit, digest in self.gradients.items()}
        return {name: bit_sum(value) for name, value in values.items()} | gradients


def comparable_ranks(mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks that have equal weights, bit by bit, if no GPU is faulty: those that share one copy of the
    weights (FSDP) or, if it is not sharded, all ranks. None for a single rank. With HSDP, copies may differ
    in their last bits, because the order of sums over shards may."""
    if mesh.stage_group is not None or mesh.device_mesh is None or mesh.degrees.dp_replicate == 1:
        return mesh.stage_group
    return mesh.device_mesh[REPLICAS].get_group()


def broadcast_batch(batch: Batch, group: dist.ProcessGroup | None, source: int) -> Batch:
    """The micro-batch of rank `source` of `group`, whose micro-batches have equal shapes. Waits for the
    device if documents are masked. Collective over `group`."""
    if group is None:
        return batch
    tensors = [batch.inputs, batch.targets, *([] if batch.positions is None else [batch.positions])]
    packed = torch.stack(tensors)
    dist.broadcast(packed, group=group, group_src=source)
    batch = replace(batch, inputs=packed[0], targets=packed[1])
    if batch.positions is None:
        return batch
    num_documents = torch.tensor(batch.num_documents, device=packed.device)
    dist.broadcast(num_documents, group=group, group_src=source)
    return replace(batch, positions=packed[2], num_documents=int(num_documents))


def gather_digests(digests: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> list[dict[str, int]]:
    """The digests of all ranks of `group`, in their order. Waits for the device. Collective over `group`."""
    own = torch.stack(list(digests.values()))
    rows = [own]
    if group is not None:
        rows = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(rows, own, group=group)
    return [dict(zip(digests, row)) for row in torch.stack(rows).tolist()]
