"""Going back to an earlier healthy checkpoint within the process, and the checkpoints kept for that."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import SavedGuard, Toy, archived, flip_a_shard, go, open_run, start_run
from titanlite.checkpoint import commit
from titanlite.checkpoint.checkpointer import Checkpointer, steps_for_rewind
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.section import Checkpoint


def take_steps(
    run: Checkpointer, toy: Toy, to_step: int, unhealthy: Collection[int] = ()
) -> list[list[torch.Tensor]]:
    """Take and save steps up to `to_step`; return the state after each."""
    values = []
    while toy.state.step < to_step:
        toy.step()
        toy.state.guard = SavedGuard(healthy=toy.state.step not in unhealthy)
        run.save(toy.state)
        values.append(toy.values())
    return values


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in commit.list_committed(folder / "checkpoint")]


def test_a_rewind_restores_the_newest_healthy_checkpoint_and_archives_the_later_ones(tmp_path: Path) -> None:
    run, toy = open_run(tmp_path), Toy()
    values = take_steps(run, toy, 6, unhealthy=[3])
    assert run.rewind(3, toy.state)
    assert (toy.state.step, toy.state.num_sequences, int(toy.state.tokens)) == (2, 16, 160)
    assert equal(toy.values(), values[1])
    assert not equal(toy.values(), values[2])
    assert steps_in(tmp_path) == [1, 2]
    assert archived(tmp_path) == [[3, 4, 5, 6]]
    again = take_steps(run, toy, 4)
    assert equal(again[-1], values[3])
    run.close()
    assert go(tmp_path, to_step=4) == 4


@pytest.mark.parametrize("num_after", [0, 1, 3])
def test_a_run_that_rewinds_to_before_its_load_step_can_be_started_again(
    tmp_path: Path, num_after: int
) -> None:
    go(tmp_path, to_step=5)
    run, toy = open_run(tmp_path, load_step=4), Toy()
    run.load(toy.state)
    take_steps(run, toy, 6)
    assert run.rewind(2, toy.state)
    take_steps(run, toy, 2 + num_after)
    run.close()
    assert go(tmp_path, to_step=7, load_step=4) == 2 + num_after
    assert go(tmp_path, to_step=8, load_step=4) == 7
    assert go(tmp_path, to_step=8, load_step=3) == 3  # a user may still go back


def test_a_load_step_above_all_checkpoints_is_an_error(tmp_path: Path) -> None:
    go(tmp_path, to_step=3)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"load_step=4: no usable checkpoint"):
            go(tmp_path, to_step=5, load_step=4)


def test_without_an_old_healthy_checkpoint_a_rewind_changes_nothing(tmp_path: Path) -> None:
    run, toy = open_run(tmp_path), Toy()
    values = take_steps(run, toy, 3, unhealthy=[1])
    assert not run.rewind(1, toy.state)
    assert toy.state.step == 3
    assert equal(toy.values(), values[2])
    assert steps_in(tmp_path) == [1, 2, 3]
    run.close()


def test_a_rewind_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    run, toy = open_run(tmp_path), Toy()
    values = take_steps(run, toy, 5)
    run.check_save()
    flip_a_shard(tmp_path / "checkpoint/step-3")
    assert run.rewind(3, toy.state)
    assert equal(toy.values(), values[1])
    assert steps_in(tmp_path) == [1, 2]
    assert (tmp_path / "checkpoint/quarantined-step-3-0").exists()
    take_steps(run, toy, 5)
    assert run.rewind(4, toy.state)  # what was quarantined is not met again
    assert toy.state.step == 4
    run.close()


def test_if_the_only_old_checkpoint_is_damaged_the_run_ends(tmp_path: Path) -> None:
    run, toy = open_run(tmp_path), Toy()
    take_steps(run, toy, 2)
    run.check_save()
    flip_a_shard(tmp_path / "checkpoint/step-1")
    with pytest.raises(CheckpointError, match=r"cannot rewind: .*step-1: "):
        run.rewind(1, toy.state)
    run.close_after_error()


@pytest.mark.parametrize(
    ("distance", "unhealthy", "kept"),
    [
        (None, [], [8, 9]),
        (5, [], [4, 7, 8, 9]),  # 7 takes the place of 4 when the newest checkpoint is 12
        (3, [], [6, 7, 8, 9]),
        (3, [4, 5, 6], [3, 7, 8, 9]),
        (9, [], [1, 8, 9]),
    ],
)
def test_healthy_checkpoints_for_a_rewind_are_kept(
    tmp_path: Path, distance: int | None, unhealthy: list[int], kept: list[int]
) -> None:
    config = Checkpoint(interval=1, keep_latest_k=2)
    run = start_run(tmp_path, config, distance=distance)
    take_steps(run, Toy(), 9, unhealthy)
    run.close()
    assert steps_in(tmp_path) == kept


def test_a_checkpoint_for_a_rewind_is_never_older_than_twice_the_distance() -> None:
    present: list[int] = []
    for newest in range(1, 200):
        present = sorted({*steps_for_rewind([*present, newest], newest - 10), newest - 1, newest} - {0})
        old = [step for step in present if step <= newest - 10]
        assert bool(old) == (newest > 10)
        assert all(newest - 20 <= step for step in old)
