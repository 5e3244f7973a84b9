"""Pins sums whose bits do not depend on the number of ranks: of losses, in the order of the micro-batches,
and of squares, by cells that no sharding cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import run
from titanlite.config.component import ConfigError
from titanlite.mesh import ALONE, Mesh, build_mesh
from titanlite.parallel.expert_loads import EXACT, limit_counts_
from titanlite.parallel.same_bits import _fold, check_same_bits, ordered_sum, squared_norms
from titanlite.parallelism import Degrees, Parallelism


def test_the_sum_of_a_row_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    for width in (1, 2, 3, 7, 100, 1000):
        rows = torch.randn(37, width, dtype=torch.float64)
        whole = _fold(rows)
        assert torch.allclose(whole, rows.sum(1))
        for part in (rows[:1], rows[5:9], rows[11:]):
            first = rows.data_ptr()
            begin = (part.data_ptr() - first) // (8 * width)
            assert torch.equal(_fold(part), whole[begin : begin + len(part)])


def losses(num: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(num) * torch.logspace(-4, 4, num)


def mesh_of(ranks: int) -> Mesh:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return build_mesh(Parallelism(), "cpu", rank, ranks, same_bits=True)


def loss_on_rank(ranks: int) -> float:
    mesh, of_step = mesh_of(ranks), losses(12)
    total = ordered_sum(list(of_step[mesh.dp_rank :: ranks]), mesh)
    if ranks > 1:
        dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_added_in_the_order_of_the_micro_batches(ranks: int) -> None:
    expected = _fold(losses(12).double().view(1, -1))[0].float().item()
    assert run(ranks, loss_on_rank, ranks) == [expected] * ranks
    assert loss_on_rank(1) == expected


def test_counts_of_experts_do_not_depend_on_the_order_of_their_additions() -> None:
    """Also above 2^24 tokens per expert and step, where fp32 has no odd numbers."""
    torch.manual_seed(3)
    counts = torch.randint(1 << 18, (99, 40)).float() * torch.linspace(0.1, 3, 40).round(decimals=1)
    counts = counts.round()
    exact = counts.double().sum(0)
    assert (exact < EXACT).any()
    assert (exact > EXACT).any()

    def summed(ranks: int) -> torch.Tensor:
        """Counts of micro-batches added on each rank, and then over the ranks."""
        total = torch.zeros(40)
        for rank in range(ranks):
            of_rank = torch.zeros(40)
            for count in counts[rank::ranks]:
                of_rank += count
            total += of_rank
        return total

    sums = [summed(ranks) for ranks in (1, 3, 9, 11)]
    assert not torch.equal(sums[0], sums[1]), "control"
    for total in sums:
        limit_counts_(total)
        assert torch.equal(total.double(), exact.clamp(max=EXACT))


def gradients() -> list[tuple[torch.Tensor, int]]:
    """Gradients, and the dim along which each is sharded."""
    torch.manual_seed(2)
    shapes = [((7, 33), 0), ((5,), 0), ((4, 6, 9), 1), ((4, 6, 9), 0)]
    return [(torch.randn(shape) * 10 ** torch.randn(shape), dim) for shape, dim in shapes]


def squares_on_rank(ranks: int) -> list[float]:
    mesh, sharded = mesh_of(ranks), list[Any]()
    for whole, dim in gradients():
        if ranks > 1:
            whole = distribute_tensor(whole, mesh.fsdp, [Shard(dim)])
        sharded.append(whole)
    return squared_norms(sharded, mesh).tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_squared_norms_have_the_same_bits(ranks: int) -> None:
    whole = squared_norms([gradient for gradient, _ in gradients()], ALONE)
    exact = torch.stack([gradient.double().square().sum() for gradient, _ in gradients()])
    assert torch.allclose(whole, exact, rtol=1e-13)
    assert run(ranks, squares_on_rank, ranks) == [whole.tolist()] * ranks


def test_settings_that_cannot_keep_the_promise() -> None:
    alone = Degrees(1, 1, 1, 1, 1)
    check_same_bits(alone, 1, {"float8.enable": False})
    check_same_bits(Degrees(1, 2, 2, 1, 1), 1, {})
    for degrees, expert_degree, unsupported, message in (
        (Degrees(1, 1, 2, 2, 1), 1, {}, "context_parallel_degree = 2"),
        (Degrees(1, 4, 1, 1, 1), 1, {}, "4 unsharded copies"),
        (Degrees(1, 1, 4, 1, 1), 2, {}, "expert_parallel_degree = 2"),
        (alone, 1, {"a": False, "float8.enable": True}, "not with float8.enable"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            check_same_bits(degrees, expert_degree, unsupported)
        assert error.value.key == "training.same_bits_on_any_ranks"
