"""Sends the shards of matrices to one owner rank each, and back. The matrices may be sharded in any way.

Optimizers that need whole matrices, such as Muon, use it: a matrix is worked on by one rank, so that its
result has the same bits on every layout, and no rank needs memory for all matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from titanlite.mesh import local_shard_and_offsets


class Region(NamedTuple):
    """The part of a tensor that one rank holds: `offsets` in the whole tensor, and the shard's `shape`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """This region of the whole tensor, as a view."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape))]


@dataclass(frozen=True)
class Ownership:
    """Which rank owns which tensor, equal on all ranks. `owners`: the owner of each tensor, a rank of the
    group. `buckets`: indices of the tensors that are exchanged together."""

    owners: list[int]
    buckets: list[list[int]]

    @classmethod
    def balanced(
        cls,
        batches: Sequence[Sequence[int]],
        costs: Sequence[float],
        num_bytes: Sequence[int],
        num_ranks: int,
        bucket_bytes: int,
    ) -> Ownership:
        """Balance the cost over the ranks: batches in descending order of cost, each to the rank with the
        least work so far.

        `batches`: indices of the tensors that must have the same owner and be exchanged together; each tensor
        is in one batch. `costs`: of each batch. `num_bytes`: of each whole tensor. A bucket ends before an
        owner would receive more than `bucket_bytes` in several batches."""
        owners, load = [0] * len(num_bytes), [0.0] * num_ranks
        buckets, held = [list[int]()], [0] * num_ranks
        for i in sorted(range(len(batches)), key=lambda i: (-costs[i], i)):
            owner = min(range(num_ranks), key=lambda rank: (load[rank], rank))
            load[owner] += costs[i]
            size = sum(num_bytes[j] for j in batches[i])
            if held[owner] and held[owner] + size > bucket_bytes:
                buckets.append([])
                held = [0] * num_ranks
            held[owner] += size
            buckets[-1] += batches[i]
            for j in batches[i]:
                owners[j] = owner
        return cls(owners, buckets)


class Transfer:
    """A collective under way: the buffer that it fills, and torch's handle."""

    def __init__(self, buffer: torch.Tensor, work: dist.Work):
        self._buffer: torch.Tensor | None = buffer
        self._work = work

    def wait(self) -> torch.Tensor:
        """The filled buffer, which this object gives up, so that its memory is free after the last use. On
        CUDA the current stream waits; the host does not."""
        assert self._buffer is not None, "waited twice"
        self._work.wait()
        buffer, self._buffer = self._buffer, None
        return buffer


class Exchange:
    """The exchanges of tensors that are sharded like `tensors`.

    `group`: the ranks that together hold one copy of the tensors. Every element is sent by one rank, the
    lowest rank that has it. Collective: all ranks of `group` call all methods in the same order. Raises
    ValueError if the shards of a tensor do not make up the whole tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor], ownership: Ownership, group: dist.ProcessGroup):
        self._group, self._rank, self._size = group, dist.get_rank(group), group.size()
        self.buckets, self._owners = ownership.buckets, ownership.owners
        self._shapes = [tensor.shape for tensor in tensors]
        mine = []
        for tensor in tensors:
            shard, offsets = local_shard_and_offsets(tensor)
            mine.append(Region(tuple(offsets), tuple(shard.shape)))
        by_rank: list[list[Region]] = [[] for _ in range(self._size)]
        dist.all_gather_object(by_rank, mine, group=group)
        self._regions = list(zip(*by_rank))  # by tensor, then by rank
        self._senders = [first_ranks(regions) for regions in self._regions]
        for tensor, regions, senders in zip(tensors, self._regions, self._senders):
            if sum(regions[rank].numel for rank in senders) != tensor.numel():
                raise ValueError(f"{regions} are not the shards of a tensor of shape {tuple(tensor.shape)}")

    def owned(self, bucket: Sequence[int]) -> list[int]:
        """The tensors of a bucket that this rank owns."""
        return [i for i in bucket if self._owners[i] == self._rank]

    def send(self, bucket: Sequence[int], shards: dict[int, torch.Tensor]) -> Transfer:
        """Begin to send this rank's shards of a bucket's tensors to their owners."""
        sent = [i for i in bucket if self._rank in self._senders[i]]
        outgoing = [[shards[i] for i in sent if self._owners[i] == rank] for rank in range(self._size)]
        sizes = [
            sum(self._regions[i][rank].numel for i in self.owned(bucket) if rank in self._senders[i])
            for rank in range(self._size)
        ]
        return self._start(outgoing, sizes, next(iter(shards.values())))

    def receive(self, bucket: Sequence[int], transfer: Transfer) -> dict[int, torch.Tensor]:
        """The whole tensors of a bucket that this rank owns."""
        buffer, begin = transfer.wait(), 0
        whole = {i: buffer.new_empty(self._shapes[i]) for i in self.owned(bucket)}
        for rank in range(self._size):
            for i, tensor in whole.items():
                if rank in self._senders[i]:
                    region = self._regions[i][rank]
                    region.view(tensor).copy_(buffer[begin : begin + region.numel].view(region.shape))
                    begin += region.numel
        return whole

    def send_back(
        self, bucket: Sequence[int], whole: dict[int, torch.Tensor], like: torch.Tensor
    ) -> Transfer:
        """Begin to send each rank its shards of the tensors that this rank owns. `like`: any tensor with the
        dtype and the device of all owners' tensors, for ranks that own none."""
        outgoing = [
            [self._regions[i][rank].view(tensor) for i, tensor in whole.items()] for rank in range(self._size)
        ]
        sizes = [
            sum(self._regions[i][self._rank].numel for i in bucket if self._owners[i] == rank)
            for rank in range(self._size)
        ]
        return self._start(outgoing, sizes, like)

    def receive_back(self, bucket: Sequence[int], transfer: Transfer) -> dict[int, torch.Tensor]:
        """This rank's shards of a bucket's tensors, from their owners."""
        buffer, begin, shards = transfer.wait(), 0, dict[int, torch.Tensor]()
        for i in sorted(bucket, key=lambda i: self._owners[i]):  # stable: by owner, then as in the bucket
            region = self._regions[i][self._rank]
            shards[i] = buffer[begin : begin + region.numel].view(region.shape)
            begin += region.numel
        return shards

    def _start(
        self, outgoing: Sequence[Sequence[torch.Tensor]], sizes: list[int], like: torch.Tensor
    ) -> Transfer:
        """Send the tensors of `outgoing`, by rank. `sizes`: number of elements that arrive from each rank."""
        flat = [tensor.reshape(-1) for tensors in outgoing for tensor in tensors]
        buffer = torch.cat(flat) if flat else like.new_empty(0)
        incoming = buffer.new_empty(sum(sizes))
        splits = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
        work = dist.all_to_all_single(incoming, buffer, sizes, splits, group=self._group, async_op=True)
        assert work is not None
        return Transfer(incoming, work)


def first_ranks(regions: Sequence[Region]) -> set[int]:
    """The lowest rank that has each region, of the regions of all ranks. Empty regions have none."""
    first = dict[Region, int]()
    for rank, region in enumerate(regions):
        first.setdefault(region, rank)
    return {rank for region, rank in first.items() if region.numel}
