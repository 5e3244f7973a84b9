"""The plan of a save: the same choice of ranks and the same metadata as torch's own, however many ranks hold
a shard. It is made once, and an error of any rank in making it or in writing fails the save on all ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import SavePlan

from tests.support.checkpoints import names, save_steps
from tests.support.logs import listening
from tests.support.simulated_ranks import Layout, SimulatedRank, local_plans
from titanlite.checkpoint import save_plan
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.save_plan import LocalShards, SavePlans, ShardOwners
from titanlite.checkpoint.writer import ShardWriter
from titanlite.ranks import Ranks


def merged_by_tree(plans: list[SavePlan]) -> LocalShards:
    """What simulated ranks with these plans tell rank 0."""
    mail: dict[tuple[int, int], bytes] = {}
    for rank in reversed(range(len(plans))):
        shards = {item.index: ShardOwners(item, i, [rank]) for i, item in enumerate(plans[rank].items)}
        local = LocalShards(shards, plans[rank].planner_data, None)
        merged = SimulatedRank(rank, len(plans), mail).reduce(local, save_plan.merge)
    assert merged is not None
    return merged


@pytest.mark.parametrize("layout", [Layout(1, 2, 1, 1), Layout(2, 3, 2, 1), Layout(1, 1, 1, 1)])
def test_simulated_ranks_plan_as_torch_does(layout: Layout, tmp_path: Path) -> None:
    plans = list(local_plans(layout))
    wanted, metadata = DefaultSavePlanner().create_global_plan(plans)
    ours = SavePlans(SimulatedRank(0, layout.num_ranks, {}))
    got = ours._global_plan(merged_by_tree(plans), DefaultSavePlanner(), ShardWriter(tmp_path))
    assert [plan.items for plan in got] == [plan.items for plan in wanted]
    assert [[i.index.index for i in plan.items] for plan in got] == [
        [i.index.index for i in plan.items] for plan in wanted
    ]
    assert ours._metadata == metadata
    assert list(ours._metadata.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert list(ours._metadata.planner_data.items()) == list(metadata.planner_data.items())


def test_control_other_copies_give_another_plan() -> None:
    plans = list(local_plans(Layout(1, 2, 1, 1)))
    shards = merged_by_tree(plans).shards
    first_only = {index: copies._replace(ranks=[0]) for index, copies in shards.items()}
    assert save_plan.distribute(shards, 2) != save_plan.distribute(first_only, 2)


def broken(*_: Any) -> Any:
    raise TypeError("broken")


def of_rank(folder: Path) -> dict[str, Any]:
    """Saves on two ranks, of copies in pinned memory, as asynchronous saves on GPUs are: equal tensors, a new
    tensor, errors of rank 1, errors of rank 0."""
    torch.Tensor.is_pinned = lambda *_: True  # type: ignore[method-assign, assignment]
    ranks, rank = Ranks(folder), dist.get_rank()
    plans, made, numbers = SavePlans(ranks), list[int](), itertools.count(1)
    make = plans._global_plan

    def counted(*args: Any) -> Any:
        made.append(0)
        return make(*args)

    plans._global_plan = counted  # type: ignore[method-assign]

    def save(tensors: dict[str, torch.Tensor]) -> dict[str, Any] | None:
        path = folder / f"{next(numbers)}"
        ranks.from_rank_zero(path.mkdir)
        writer = ShardWriter(path)
        written = plans.write({"model": tensors}, writer)
        return ranks.from_rank_zero(lambda: plans.finish(writer, written or []))

    tensors = {"a": torch.ones(3), "b": torch.ones(2), f"of {rank}": torch.ones(4)}
    files = [save(tensors), save(tensors), save(tensors | {"c": torch.ones(1)})]
    num_made = len(made)

    def error_of(failing: int, owner: type, method: str, tensors: dict[str, torch.Tensor]) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(owner, method, broken)
            with pytest.raises(CheckpointError) as error:
                save(tensors)
        return str(error.value)

    errors = [
        error_of(1, ShardWriter, "write_file", tensors),
        error_of(1, ShardWriter, "prepare_local_plan", tensors),
        error_of(0, DefaultSavePlanner, "create_global_plan", tensors | {"c": torch.ones(1)}),
        error_of(0, ShardWriter, "finish", tensors),
    ]
    tensors = {} if rank == 1 else tensors
    save(tensors)  # the plan that rank 1 keeps is as empty as that of a rank that cannot make one
    errors.append(error_of(1, ShardWriter, "prepare_local_plan", tensors))
    return {"files": files, "made": num_made, "errors": errors}


def test_a_plan_is_kept_until_a_tensor_changes(run_on, tmp_path: Path) -> None:
    first, second = run_on(2, of_rank, tmp_path)
    files = {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    assert [set(digests) for digests in first["files"]] == [files] * 3
    assert first["files"][0] == first["files"][1] != first["files"][2]
    assert (first["made"], second["made"]) == (2, 0)
    entries = FileSystemReader(tmp_path / "2").read_metadata().state_dict_metadata
    assert not any(entry.properties.pin_memory for entry in entries.values())
    errors = [f"rank {rank}: TypeError: broken" for rank in (1, 1, 0, 0, 1)]
    assert first["errors"] == second["errors"] == errors


@pytest.mark.parametrize(
    ("owner", "method"), [(DefaultSavePlanner, "create_global_plan"), (ShardWriter, "finish")]
)
def test_an_error_of_rank_zero_is_a_failed_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    method: str,
) -> None:
    """It is counted, what was written is discarded, and the next save is whole."""
    with monkeypatch.context() as patch, listening(caplog):
        patch.setattr(owner, method, broken)
        toy, run = save_steps(tmp_path, 1)
    assert "step 1 could not be saved: rank 0: TypeError: broken (failure 1 of 3 in a row)" in caplog.text
    assert names(tmp_path) == []
    toy.step()
    run.save(toy.state)
    run.close()
    assert names(tmp_path) == ["step-2"]
