"""The process groups of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlite.config.component import ConfigError
from titanlite.mesh import ALONE, build_mesh
from titanlite.parallelism import Parallelism


def groups_of_rank() -> tuple[int, list[list[int]], list[int]]:
    """Rank, the ranks of each of its groups, and those of its FSDP group, with FSDP over cp and tp beside."""
    parallelism = Parallelism(context_parallel_degree=2, tensor_parallel_degree=2)
    mesh = build_mesh(parallelism, "cpu", dist.get_rank(), 4)
    fsdp = mesh.fsdp.get_group()
    assert fsdp in mesh.groups, "the group of a flattened axis is missing"
    assert fsdp not in mesh.device_mesh.get_all_groups(), "then the axes have it already"  # type: ignore[union-attr]
    ranks = [dist.get_process_group_ranks(group) for group in mesh.groups]
    return dist.get_rank(), ranks, dist.get_process_group_ranks(fsdp)


def test_groups_has_the_default_group_and_that_of_each_axis(run_on: Callable[..., Any]) -> None:
    for rank, groups, fsdp in run_on(4, groups_of_rank):
        assert groups[0] == [0, 1, 2, 3]
        along_tp, along_cp = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert along_tp in groups
        assert along_cp in groups
        assert fsdp == along_cp
    assert ALONE.groups == []


def test_asynchronous_tensor_parallel_stays_on_one_machine() -> None:
    split = Parallelism(enable_async_tensor_parallel=True, tensor_parallel_degree=4)
    cuda = torch.device("cuda")
    split.check_machine(cuda, num_local_ranks=8)
    with pytest.raises(ConfigError, match="must be on one machine; this one has 2 ranks") as error:
        split.check_machine(cuda, num_local_ranks=2)
    assert error.value.key == "parallelism.enable_async_tensor_parallel"
    split.check_machine(torch.device("cpu"), num_local_ranks=2)
    Parallelism(tensor_parallel_degree=4).check_machine(cuda, num_local_ranks=2)
