"""Pins the exchange of shards with owner ranks: whole tensors arrive, shards come back, and the work is
balanced without separating what belongs together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlite.mesh import local_shard
from titanlite.optim.exchange import Exchange, Ownership, Region, first_ranks

SHAPES = [(7, 4), (2, 6), (8, 8), (5, 2), (3, 4, 6), (1, 9)]


def test_batches_stay_together_and_the_most_expensive_ones_are_spread() -> None:
    batches = [[0, 1], [2], [3], [4, 5]]
    ownership = Ownership.balanced(batches, [4, 3, 2, 1], [10] * 6, num_ranks=2, bucket_bytes=100)
    assert ownership.owners == [0, 0, 1, 1, 0, 0]
    assert ownership.buckets == [[0, 1, 2, 3, 4, 5]]


def test_a_bucket_ends_before_an_owner_would_receive_too_much() -> None:
    batches = [[i] for i in range(6)]
    ownership = Ownership.balanced(batches, [1] * 6, [10] * 6, num_ranks=2, bucket_bytes=20)
    assert ownership.buckets == [[0, 1, 2, 3], [4, 5]]
    whole = Ownership.balanced(batches, [1] * 6, [10] * 6, num_ranks=2, bucket_bytes=1)
    assert whole.buckets == [[0, 1], [2, 3], [4, 5]], "a bucket has at least one batch per owner"


def exchanged(placements: list[list[Any]], mesh_shape: tuple[int, ...]) -> None:
    """Send tensors with the given placements to their owners, which double them, and back."""
    names = ("a", "b")[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    wholes = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in SHAPES]
    tensors = [distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in zip(wholes, placements)]
    batches = [[0, 3], [1], [2], [4], [5]]  # more than ranks, or there would be one bucket
    costs, sizes = [3, 2, 4, 1, 1], [t.numel() for t in wholes]
    ownership = Ownership.balanced(batches, costs, sizes, mesh.size(), bucket_bytes=50)
    assert len(ownership.buckets) > 1
    exchange = Exchange(tensors, ownership, torch.distributed.group.WORLD)
    for bucket in ownership.buckets:
        transfer = exchange.send(bucket, {i: local_shard(tensors[i]) for i in bucket})
        received = exchange.receive(bucket, transfer)
        for i, tensor in received.items():
            assert ownership.owners[i] == torch.distributed.get_rank()
            assert torch.equal(tensor, wholes[i]), i
        doubled = {i: 2 * tensor for i, tensor in received.items()}
        shards = exchange.receive_back(bucket, exchange.send_back(bucket, doubled, torch.empty(0)))
        assert shards.keys() == set(bucket)
        for i, shard in shards.items():
            assert torch.equal(shard, 2 * local_shard(tensors[i])), i


def test_tensors_sharded_in_any_way_arrive_whole_and_come_back(run_on: Callable[..., Any]) -> None:
    rows, columns, copies = [Shard(0)], [Shard(1)], [Replicate()]
    run_on(3, exchanged, [rows, columns, rows, copies, [Shard(2)], rows], (3,))


@pytest.mark.full
def test_tensors_sharded_on_two_dims_of_the_mesh_arrive_whole_and_come_back(
    run_on: Callable[..., Any],
) -> None:
    grid = [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]]
    run_on(4, exchanged, [*grid, [Shard(0), Shard(2)], [Shard(1), Replicate()]], (2, 2))


def rows_without_a_rank() -> str:
    """The error for a tensor whose shards are on two of three ranks."""
    mesh = init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)], src_data_rank=None)
    group = torch.distributed.new_group([0, 1], use_local_synchronization=True)
    if torch.distributed.get_rank() == 2:
        return ""
    with pytest.raises(ValueError) as raised:
        Exchange([tensor], Ownership([0], [[0]]), group)
    return str(raised.value)


@pytest.mark.full
def test_a_group_that_lacks_a_shard_is_an_error(run_on: Callable[..., Any]) -> None:
    first, second, _ = run_on(3, rows_without_a_rank)
    assert first == second
    assert "are not the shards of a tensor of shape (6, 2)" in first


def test_the_lowest_rank_with_a_region_sends_it() -> None:
    a, b, empty = Region((0, 0), (2, 4)), Region((2, 0), (2, 4)), Region((4, 0), (0, 4))
    assert first_ranks([a, b, a, empty, b, empty]) == {0, 1}
    many = [Region((i // 2, 0), (1, 4)) for i in range(16384)]  # a search per region would take a minute
    assert first_ranks(many) == set(range(0, 16384, 2))
