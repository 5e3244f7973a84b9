"""Copies of the model (HSDP) read a checkpoint together: each reads half of its shards and gets the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlite.checkpoint import reader
from titanlite.checkpoint.reader import SafeReader, load_tensors
from titanlite.checkpoint.save_plan import SavePlans
from titanlite.checkpoint.writer import ShardWriter
from titanlite.mesh import local_shard
from titanlite.ranks import Ranks

pytestmark = pytest.mark.full


def of_rank(folder: Path, forgets: bool) -> dict[str, Any]:
    """Save on 2 x 2 ranks and load into zeros: the names that this rank reads, and whether all is as saved.
    `forgets`: the control, in which no rank sends what it has read."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    placements = {"a": Shard(0), "b": Shard(1), "c": Shard(0), "d": Shard(0), "norm": Replicate()}
    wholes = {name: torch.arange(24.0).view(4, 6) + i for i, name in enumerate(placements)}
    tensors: dict[str, torch.Tensor] = {
        name: distribute_tensor(whole, mesh, [Replicate(), placements[name]])
        for name, whole in wholes.items()
    }
    tensors["step"] = torch.tensor(7.0)
    ranks, read = Ranks(folder), set[str]()
    path = ranks.from_rank_zero(lambda: folder.mkdir() or folder)
    plans, writer = SavePlans(ranks), ShardWriter(path)
    written = plans.write({"model": tensors}, writer)
    ranks.from_rank_zero(lambda: plans.finish(writer, written or []))

    loaded = {name: tensor * 0 for name, tensor in tensors.items()}
    read_data = SafeReader.read_data

    def noted(self: SafeReader, plan: Any, planner: Any) -> Any:
        read.update(item.storage_index.fqn for item in plan.items)
        return read_data(self, plan, planner)

    SafeReader.read_data = noted  # type: ignore[method-assign]
    if forgets:
        reader.dist.broadcast = lambda *args, **options: None
    load_tensors(path, {"model": loaded}, ranks)
    same = [torch.equal(local_shard(loaded[name]), local_shard(tensors[name])) for name in tensors]
    return {"read": read, "same": all(same), "replica": mesh.get_coordinate()[0], "rank": dist.get_rank()}


def test_replicas_read_for_each_other(run_on, tmp_path: Path) -> None:
    by_rank = run_on(4, of_rank, tmp_path / "saved", False)
    assert all(rank["same"] for rank in by_rank)
    reads = [rank["read"] for rank in by_rank]
    assert reads[0] == reads[1]
    assert reads[2] == reads[3]
    assert reads[0] & reads[2] == {"model.step"}, "no file is read twice"
    assert reads[0] | reads[2] == {f"model.{name}" for name in ("a", "b", "c", "d", "norm", "step")}


def test_control_shards_that_are_not_sent_are_missing(run_on, tmp_path: Path) -> None:
    assert not any(rank["same"] for rank in run_on(4, of_rank, tmp_path / "saved", True))
