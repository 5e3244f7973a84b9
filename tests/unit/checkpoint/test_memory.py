"""Copies of the state in the memory of the nodes: a run resumes from the newest one that is whole and belongs
to it, and from the disk otherwise. tests/faults/test_lost_memory.py kills whole jobs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.checkpoints import Toy, flip, flip_a_shard, sharded_toy, start_run
from tests.support.tiers import full
from titanlite.checkpoint import checkpointer, commit
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.memory import NodeMemory, in_use, memory_folder
from titanlite.checkpoint.section import Checkpoint
from titanlite.config.component import ConfigError
from titanlite.log import set_up_logging
from titanlite.mesh import local_shard


def opened(folder: Path, memory: Path | None = None, **config: Any) -> Checkpointer:
    set_up_logging(0, verbose=True)
    root = memory or folder / "memory"
    root.mkdir(exist_ok=True)
    return start_run(
        folder / "run", Checkpoint(**{"memory_interval": 1, "interval": 9, **config}), shared_memory=root
    )


def copies(folder: Path) -> list[Path]:
    return sorted(folder.glob("memory/titanlite-*/step-*"))


def killed_run(folder: Path, saved: int = 1, copied: int = 3) -> Toy:
    """A run with a checkpoint of the step `saved` (0: none) and a copy of the step `copied`, which dies then.
    Returns its last state."""
    run, toy = opened(folder), Toy()
    run.load(toy.state)
    for step in range(1, copied + 1):
        toy.step()
        if step == saved:
            run.save(toy.state)
            run.check_save()
        elif run.copy_due(step, busy=False):
            run.copy(toy.state)
            run.check_save()
    run.close_after_error()
    return toy


def resumed(folder: Path, **config: Any) -> Toy:
    """The state of the next start, which dies again."""
    run, toy = opened(folder, **config), Toy(seed=1)
    run.load(toy.state)
    run.close_after_error()
    return toy


def equal(a: Toy, b: Toy) -> bool:
    return len(a.values()) == len(b.values()) and all(map(torch.equal, a.values(), b.values()))


@pytest.mark.parametrize("saved", [0, 1])
def test_a_run_resumes_from_the_newest_copy(tmp_path: Path, saved: int, capfd: pytest.CaptureFixture) -> None:
    killed = killed_run(tmp_path, saved)
    assert [path.name for path in copies(tmp_path)] == ["step-3"], "the copy before was deleted"
    assert [step for step, _ in commit.list_committed(tmp_path / "run/checkpoint")] == [1][:saved]
    toy = resumed(tmp_path)
    assert toy.state.step == 3
    assert toy.state.num_sequences == killed.state.num_sequences
    assert equal(toy, killed)
    disk = "the newest checkpoint on disk is step 1" if saved else "there is no checkpoint on disk"
    assert f"resuming from the copy in memory of step 3; {disk}" in capfd.readouterr().err
    assert resumed(tmp_path).state.step == 3, "and again, if it dies before its next copy"
    toy.step()
    assert not equal(toy, killed)


def test_a_run_without_copies_resumes_from_the_disk(tmp_path: Path) -> None:
    """The control."""
    killed_run(tmp_path)
    shutil.rmtree(tmp_path / "memory")
    assert resumed(tmp_path).state.step == 1


def flip_a_small_file(step: Path) -> None:
    flip(step / "train.json")


def lose_a_shard(step: Path) -> None:
    next(step.glob("*.distcp")).unlink()


@pytest.mark.parametrize("damage", [flip_a_shard, flip_a_small_file, lose_a_shard])
def test_a_damaged_copy_is_not_used(
    tmp_path: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture
) -> None:
    killed_run(tmp_path)
    damage(copies(tmp_path)[0])
    assert resumed(tmp_path).state.step == 1
    log = capfd.readouterr().err
    assert "the copy in memory of step 3 is lost; the newest checkpoint on disk is step 1" in log
    assert not copies(tmp_path)


def another_history(folder: Path) -> None:
    """As if another machine had gone back in this run folder."""
    file = folder / "run/last_commit.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"history": "another"}))


def remove_the_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / "run/checkpoint/step-2")


def later_checkpoint(folder: Path) -> None:
    shutil.copytree(folder / "memory", folder / "away")
    run, toy = opened(folder), Toy()
    run.load(toy.state)
    toy.step()
    run.save(toy.state)
    run.check_save()
    run.close_after_error()
    shutil.rmtree(folder / "memory")
    (folder / "away").rename(folder / "memory")


@pytest.mark.parametrize(
    ("change", "step"), [(another_history, 2), (remove_the_checkpoint, 1), (later_checkpoint, 4)]
)
def test_a_copy_that_does_not_continue_the_newest_checkpoint_is_not_used(
    tmp_path: Path, change: Callable[[Path], None], step: int
) -> None:
    run, toy = opened(tmp_path), Toy()
    for _ in range(2):
        toy.step()
        run.save(toy.state)
        run.check_save()
    toy.step()
    run.copy(toy.state)
    run.check_save()
    run.close_after_error()
    change(tmp_path)
    assert copies(tmp_path)
    assert resumed(tmp_path).state.step == step
    assert not copies(tmp_path)


def test_a_run_that_goes_back_does_not_use_the_copies_from_before(tmp_path: Path) -> None:
    killed_run(tmp_path)
    shutil.copytree(tmp_path / "memory", tmp_path / "away")
    assert resumed(tmp_path, load_step=1).state.step == 1
    assert not copies(tmp_path)
    for options in ({"load_step": 1}, {}):  # as on a node that was not there when the run went back
        shutil.rmtree(tmp_path / "memory")
        shutil.copytree(tmp_path / "away", tmp_path / "memory")
        assert resumed(tmp_path, **options).state.step == 1
    shutil.rmtree(tmp_path / "memory")
    (tmp_path / "away").rename(tmp_path / "memory")
    assert resumed(tmp_path, restart=True).state.step == 0
    assert not copies(tmp_path)


def test_a_rewind_and_a_divergence_delete_the_copies(tmp_path: Path) -> None:
    run, toy = opened(tmp_path), Toy()
    for step in range(1, 4):
        toy.step()
        run.save(toy.state) if step < 3 else run.copy(toy.state)
        run.check_save()
    history = json.loads((tmp_path / "run/last_commit.json").read_text())["history"]
    assert run.rewind(1, toy.state)
    assert not copies(tmp_path)
    assert json.loads((tmp_path / "run/last_commit.json").read_text())["history"] != history
    toy.step()
    run.copy(toy.state)
    run.check_save()
    assert len(copies(tmp_path)) == 1
    run.go_back(None, "")
    assert not copies(tmp_path)
    run.close_after_error()


def test_a_state_that_is_not_healthy_or_not_finite_is_not_copied(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    run, toy = opened(tmp_path), Toy()
    toy.step()
    toy.state.guard.healthy = False  # type: ignore[attr-defined]
    run.copy(toy.state)
    run.check_save()
    toy.state.guard.healthy = True  # type: ignore[attr-defined]
    with torch.no_grad():
        toy.net.weight[0, 0] = math.nan
    run.copy(toy.state)
    run.check_save()
    assert not copies(tmp_path)
    assert "step 1 is not copied to memory: model.weight" in capfd.readouterr().err
    run.close_after_error()


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    run, toy = opened(tmp_path), Toy()
    toy.step()
    run.copy(toy.state)
    run.check_save()
    assert len(copies(tmp_path)) == 1
    toy.step()
    run.save(toy.state)
    run.close()
    assert not list((tmp_path / "memory").iterdir())


def test_copies_that_do_not_fit_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    run, toy = opened(tmp_path), Toy()
    toy.step()
    run.warm_up(toy.state)
    assert "copies in memory need at most 0.0 MiB of shared memory per node" in capfd.readouterr().err
    assert run.copy_due(1, busy=False)
    monkeypatch.setattr("titanlite.checkpoint.memory._available_memory", lambda: 100)
    run.warm_up(toy.state)
    assert "no copies in memory are made: they need 0.0 MiB per node, and" in capfd.readouterr().err
    assert not run.copy_due(1, busy=False)
    run.close_after_error()


@pytest.mark.parametrize("interval", [-1, 1])
def test_a_copy_is_in_flight_for_a_quarter_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    clock, write = SimpleNamespace(now=100.0), NodeMemory.write

    def slow(*args: Any) -> None:
        clock.now += 2
        write(*args)

    monkeypatch.setattr(NodeMemory, "write", slow)
    monkeypatch.setattr(checkpointer, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    run, toy = opened(tmp_path, memory_interval=interval), Toy()
    toy.step()
    assert run.copy_due(1, run.busy)
    run.copy(toy.state)
    run.check_save()
    clock.now += 5.9
    assert run.copy_due(2, run.busy) == (interval == 1)
    clock.now += 0.2
    assert run.copy_due(2, run.busy)
    run.close_after_error()


def test_a_copy_that_fails_keeps_the_one_before_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    run, toy = opened(tmp_path), Toy()
    toy.step()
    run.copy(toy.state)
    run.check_save()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "write_manifest", full)
    toy.step()
    run.copy(toy.state)
    run.check_save()
    assert "step 2 could not be copied to memory: rank 0: OSError: [Errno 28]" in capfd.readouterr().err
    assert not run.copy_due(3, busy=False)
    assert [path.name for path in copies(tmp_path)] == ["step-1"]
    run.close_after_error()


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    memory_folder(tmp_path / "memory", tmp_path / "run").mkdir(mode=0o777)
    memory_folder(tmp_path / "memory", tmp_path / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        opened(tmp_path)


def test_copies_of_another_run_that_nobody_uses_are_deleted(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    root.mkdir()
    used, unused, foreign = (memory_folder(root, tmp_path / name) for name in ("used", "unused", "foreign"))
    foreign = foreign.with_name("titanlite-another-user")
    foreign.mkdir()
    with in_use(unused):
        pass
    with in_use(used):
        opened(tmp_path).close_after_error()
        assert used.exists()
        assert foreign.exists()
        assert not unused.exists()


# ---- two nodes, of one rank each


def two_nodes(folder: Path, seed: int, num_steps: int) -> tuple[int, list[torch.Tensor]]:
    """A start that copies each step and dies, on one of two ranks. The first step is saved on disk. Returns
    the step that it resumed from, and the rank's values then, or at the end for a new run."""
    import torch.distributed as dist

    memory = folder / f"node-{dist.get_rank()}"
    run, toy = opened(folder, memory), sharded_toy(dist.get_world_size(), 8, seed)
    run.load(toy.state)
    start, values = toy.state.step, [local_shard(value).clone() for value in toy.values()]
    for _ in range(num_steps):
        toy.step()
        run.save(toy.state) if toy.state.step == 1 else run.copy(toy.state)
        run.check_save()
    run.close_after_error()
    return start, values if start else [local_shard(value).clone() for value in toy.values()]


@pytest.mark.parametrize(
    ("lost", "step"),
    [full([], 3), ([0], 3), full([1], 3), full([0, 1], 1)],
    ids=["none", "first", "second", "both"],
)
def test_a_copy_survives_the_loss_of_one_node(tmp_path: Path, lost: list[int], step: int) -> None:
    killed = ranks.run(2, two_nodes, tmp_path, 0, 3)
    for node in range(2):
        assert len(list(tmp_path.glob(f"node-{node}/*/step-3/*.distcp"))) == 2
    for node in lost:
        shutil.rmtree(tmp_path / f"node-{node}")
    starts = ranks.run(2, two_nodes, tmp_path, 1, 0)
    assert [start for start, _ in starts] == [step, step]
    same = [all(map(torch.equal, a, b)) for (_, a), (_, b) in zip(starts, killed)]
    assert same == [step == 3] * 2, "the state of another step is another one"


def alone(folder: Path) -> tuple[int, list[torch.Tensor]]:
    """A start on the second node only, which has no process group."""
    run, toy = opened(folder, folder / "node-1"), Toy(8, seed=1)
    run.load(toy.state)
    run.close_after_error()
    return toy.state.step, toy.values()


def test_the_node_that_is_left_goes_on_alone(tmp_path: Path) -> None:
    killed = ranks.run(2, two_nodes, tmp_path, 0, 3)
    shutil.rmtree(tmp_path / "node-0")
    step, values = alone(tmp_path)
    assert step == 3
    for value, first, second in zip(values, *(values for _, values in killed), strict=True):
        assert torch.equal(value, torch.cat([first, second]) if value.ndim else first)


@pytest.mark.full
def test_a_node_that_joins_gets_its_shards_from_the_others(tmp_path: Path) -> None:
    killed = ranks.run(2, two_nodes, tmp_path, 0, 3)
    starts = ranks.run(3, two_nodes, tmp_path, 1, 0)
    assert [start for start, _ in starts] == [3, 3, 3]
    of_two, of_three = ([values for _, values in group] for group in (killed, starts))
    for two, three in zip(zip(*of_two), zip(*of_three), strict=True):
        if two[0].ndim:
            assert torch.equal(torch.cat(two), torch.cat(three))


def test_a_shard_that_is_damaged_on_one_node_comes_from_the_other(tmp_path: Path) -> None:
    killed = ranks.run(2, two_nodes, tmp_path, 0, 3)
    for node, rank in ((0, 0), (1, 1)):
        flip(next(tmp_path.glob(f"node-{node}/*/step-3/__{rank}_0.distcp")))
    starts = ranks.run(2, two_nodes, tmp_path, 1, 0)
    assert [start for start, _ in starts] == [3, 3]
    assert all(all(map(torch.equal, a, b)) for (_, a), (_, b) in zip(starts, killed))


@pytest.mark.full
def test_a_shard_that_is_damaged_on_both_nodes_is_not_used(tmp_path: Path) -> None:
    ranks.run(2, two_nodes, tmp_path, 0, 3)
    for node in range(2):
        flip(next(tmp_path.glob(f"node-{node}/*/step-3/__0_0.distcp")))
    assert [start for start, _ in ranks.run(2, two_nodes, tmp_path, 1, 0)] == [1, 1]
