"""Initial weights are normal, a function of (seed, name, position) alone, and equal on every layout."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.tiers import full
from titanlite.parallel import initialize
from titanlite.parallel.initialize import fill_normal


def filled(*shape: int, name: str = "w", seed: int = 0) -> torch.Tensor:
    tensor = torch.empty(shape)
    fill_normal(tensor, name, 0.0, 1.0, seed)
    return tensor


def test_golden_values() -> None:
    wanted = [[-0.698923, 0.25551, -0.580203], [1.826074, -1.141323, -1.343021]]
    assert torch.allclose(filled(2, 3), torch.tensor(wanted), atol=1e-5)


def test_values_are_box_muller_of_splitmix64() -> None:
    key = int.from_bytes(hashlib.sha256(b"0/w").digest()[:8], "little")
    wanted = [_reference(index, key) for index in range(600)]
    assert torch.allclose(filled(20, 30).flatten(), torch.tensor(wanted), atol=1e-5)


def _reference(index: int, key: int) -> float:
    mask = (1 << 64) - 1
    x = ((index ^ key) + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    radius = math.sqrt(-2 * math.log(((x >> 32) + 0.5) / 2**32))
    return radius * math.cos(2 * math.pi * (x & 0xFFFFFFFF) / 2**32)


def test_values_are_standard_normal() -> None:
    x = filled(1000, 1000).double()
    n = x.numel()
    assert abs(x.mean()) < 4 / n**0.5
    assert abs(x.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert abs((x[:, 1:] * x[:, :-1]).mean()) < 4 / n**0.5
    assert abs((x[1:] * x[:-1]).mean()) < 4 / n**0.5


def test_name_and_seed_change_every_value() -> None:
    base = filled(50, 50)
    for other in (filled(50, 50, name="v"), filled(50, 50, seed=1)):
        assert (base == other).float().mean() < 0.01


def test_mean_and_constant() -> None:
    tensor = torch.empty(100, 100)
    fill_normal(tensor, "w", 5.0, 0.1, 0)
    assert torch.allclose((tensor - 5) / 0.1, filled(100, 100), atol=1e-4)
    fill_normal(tensor, "w", 1.0, 0.0, 0)
    assert torch.equal(tensor, torch.ones(100, 100))


def test_values_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled(37, 11, 3)
    monkeypatch.setattr(initialize, "CHUNK", 100)
    assert torch.equal(filled(37, 11, 3), whole)


def shards_equal(world_size: int) -> bool:
    """Each rank's shard equals its slice of the full tensor, for even and uneven shards along each dim."""
    mesh = init_device_mesh("cpu", (world_size,))
    for shape in ((8, 6), (7, 5), (1, 9), (3, 2, 5)):
        whole = filled(*shape)
        for dim in range(len(shape)):
            sharded = distribute_tensor(torch.empty(shape), mesh, [Shard(dim)])
            fill_normal(sharded, "w", 0.0, 1.0, 0)
            assert isinstance(sharded, DTensor)
            assert torch.equal(sharded.full_tensor(), whole), (shape, dim, dist.get_rank())
    return True


@pytest.mark.parametrize("world_size", [2, full(4)])
def test_shards_are_slices_of_the_full_tensor(run_on, world_size: int) -> None:
    assert all(run_on(world_size, shards_equal, world_size))
