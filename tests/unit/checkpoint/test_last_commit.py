"""A run never starts again over the checkpoints of an earlier run: last_commit.json distinguishes a run whose
checkpoints are gone from a run that has saved none. checkpoint.restart starts again on purpose, once, and
deletes nothing."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import (
    IDENTITY,
    Toy,
    archived,
    flip_a_shard,
    go,
    kill_before_moving,
    names,
    open_run,
    start_run,
)
from tests.support.jobs import make_job, metrics_of
from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.section import Checkpoint
from titanlite.config.component import ConfigError
from titanlite.log import set_up_logging
from titanlite.storage import LocalDisk
from titanlite.train import train

RECORD = "last_commit.json"


def recorded(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / RECORD).read_text())
    assert record.pop("history"), "tests/unit/checkpoint/test_memory.py"
    return record


def test_each_commit_is_recorded_outside_the_checkpoint_folder(tmp_path: Path) -> None:
    run, toy = open_run(tmp_path), Toy()
    assert recorded(tmp_path) == {"step": None, "folder": "checkpoint", "restarted": False, "load_step": -1}
    for step in (1, 2):
        toy.step()
        run.save(toy.state)
        run.check_save()
        assert recorded(tmp_path) == {
            "step": step,
            "folder": "checkpoint",
            "restarted": False,
            "load_step": -1,
        }
    run.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LOCK", "checkpoint", RECORD]


@pytest.mark.parametrize("enable", [True, False])
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(tmp_path: Path, enable: bool) -> None:
    run = tmp_path / "run"
    go(run, 3)
    (run / "checkpoint").rename(tmp_path / "unmounted")
    before = sorted(run.iterdir())
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            open_run(run, enable=enable)
        assert error.value.exit_code == 3
        restart = "start at step 1 with --checkpoint.restart=true, " if enable else ""
        assert str(error.value) == (
            f"this run has saved {run}/checkpoint/step-3, and no checkpoint exists now: put it back (is "
            f"a disk not mounted?), {restart}or choose another --job.dump_folder"
        )
    assert sorted(run.iterdir()) == before
    (tmp_path / "unmounted").rename(run / "checkpoint")
    assert go(run, 4) == 3


def test_another_checkpoint_folder_is_told_where_the_checkpoints_are(tmp_path: Path) -> None:
    go(tmp_path, 3)
    other = Checkpoint(folder="other")
    with pytest.raises(CheckpointError) as error:
        start_run(tmp_path, other)
    error.match(
        rf"^this run's newest checkpoint is {tmp_path}/checkpoint/step-3, and {tmp_path}/other has none: set "
        r"--checkpoint\.folder=checkpoint to resume from it, start at step 1 "
    )
    assert not (tmp_path / "other").exists()
    (tmp_path / "checkpoint").rename(tmp_path / "other")  # the user renamed the folder
    run, toy = start_run(tmp_path, other), Toy()
    run.load(toy.state)
    assert run.candidate is not None
    run.close()
    assert recorded(tmp_path) == {"step": 3, "folder": "other", "restarted": False, "load_step": -1}


@pytest.mark.parametrize("enable", ["true", "false"])
def test_a_run_that_saved_nothing_starts_again_and_says_so(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], enable: str
) -> None:
    """The first start ends without a checkpoint, like a run that is killed before its first save."""
    job = make_job(tmp_path, corpus, "--training.steps=1", "--checkpoint.enable=false")
    train(job)
    assert "starting again" not in capsys.readouterr().err
    job = make_job(tmp_path, corpus, "--training.steps=2", f"--checkpoint.enable={enable}")
    train(job)
    line = f"the earlier run in {job.folder} saved no checkpoint; starting at step 1"
    assert capsys.readouterr().err.count(line) == 1
    assert [row["step"] for row in metrics_of(job)] == [1, 2]


def test_retention_rewinds_and_quarantine_keep_the_record_true(tmp_path: Path) -> None:
    go(tmp_path, 6, keep_latest_k=2)
    assert go(tmp_path, 5, load_step=5) == 5  # step 6 is archived, and the run ends before its next save
    assert recorded(tmp_path)["step"] == 5
    assert go(tmp_path, 7) == 5
    flip_a_shard(tmp_path / "checkpoint/step-7")
    assert go(tmp_path, 6) == 6
    assert recorded(tmp_path)["step"] == 6
    flip_a_shard(tmp_path / "checkpoint/step-6")
    flip_a_shard(tmp_path / "checkpoint/step-5")
    with pytest.raises(
        CheckpointError, match=r"no usable checkpoint in .* archive them with --checkpoint\.restart"
    ):
        go(tmp_path, 6)
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"this run has saved \S+/step-6, and"):
        go(tmp_path, 6)


# ---- restart


def test_restart_archives_what_was_there_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(rank=0, verbose=True)
    go(tmp_path, 4)
    flip_a_shard(tmp_path / "checkpoint/step-4")
    assert go(tmp_path, 3) == 3  # step 4 is quarantined
    (tmp_path / "checkpoint/step-2.keep").touch()
    other = {**IDENTITY, "model": {"dim": 8}}  # a new run may have another identity
    run, toy = open_run(tmp_path, other, restart=True), Toy()
    run.load(toy.state)
    assert toy.state.step == 0
    run.close()
    assert names(tmp_path) == ["archived-0"]
    kept = sorted(p.name for p in (tmp_path / "checkpoint/archived-0").iterdir())
    assert kept == ["quarantined-step-4-0", "step-1", "step-2", "step-2.keep", "step-3"]
    begun = "checkpoint.restart = true: a new run begins at step 1\n"
    assert capsys.readouterr().err.count(begun) == 1
    assert go(tmp_path, 2, restart=True) is None  # it ended before its first save
    assert go(tmp_path, 3, restart=True) == 2  # started again, as by Slurm: it resumes
    assert archived(tmp_path) == [[1, 2, 3]]
    assert begun not in capsys.readouterr().err
    assert go(tmp_path, 3) == 3
    assert go(tmp_path, 1, restart=True) is None  # restart was set again
    assert archived(tmp_path) == [[1, 2, 3], [1, 2, 3]]


def test_restart_where_the_checkpoints_are_gone(tmp_path: Path) -> None:
    go(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoint")
    assert go(tmp_path, 3, restart=True) is None
    assert go(tmp_path, 3, restart=True) == 3
    shutil.rmtree(tmp_path / "checkpoint")  # restart is still set from the first time
    with pytest.raises(CheckpointError, match=rf"or delete {tmp_path}/{RECORD} to restart once more$"):
        go(tmp_path, 3, restart=True)
    (tmp_path / RECORD).unlink()
    assert go(tmp_path, 1, restart=True) is None


def test_a_kill_between_two_moves_of_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    go(run, 4)
    kill_before_moving(monkeypatch, "step-2")
    with pytest.raises(KeyboardInterrupt):
        go(run, 4, restart=True)
    monkeypatch.undo()
    assert recorded(run)["restarted"] is False
    shutil.copytree(run, tmp_path / "copy")
    assert go(run, 1, restart=True) is None
    assert archived(run) == [[3, 4], [1, 2]]
    assert go(tmp_path / "copy", 2) == 2  # without restart, it resumes from the remaining checkpoint


@pytest.mark.full
def test_a_whole_run_restarts(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, "--training.steps=8")
    train(job)
    first = (job.folder / "metrics.jsonl").read_text()
    for steps in (4, 6):  # the second start resumes
        job = make_job(
            tmp_path, corpus, f"--training.steps={steps}", "--training.seed=1", "--checkpoint.restart=true"
        )
        train(job)
    assert [row["step"] for row in metrics_of(job)] == list(range(1, 7))
    assert (job.folder / "metrics.superseded.jsonl").read_text() == first
    assert archived(job.folder) == [[4, 8]]
    assert [step for step, _ in commit.list_committed(job.folder / "checkpoint")] == [4, 6]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"load_step": 4}, "load_step = 4 goes back to a checkpoint"),
        ({"enable": False}, "enable = false saves no checkpoints"),
    ],
)
def test_restart_with_what_contradicts_it(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint(restart=True, **config)


# ---- other folders and files


def test_a_run_of_an_older_titanlite_without_the_record(tmp_path: Path) -> None:
    go(tmp_path, 2)
    (tmp_path / RECORD).unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    assert go(tmp_path, 3) == 2  # it resumes from its checkpoints, and has a record from now on
    assert recorded(tmp_path)["step"] == 3
    (tmp_path / RECORD).unlink()
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(
        CheckpointError, match=r"metrics of a run, but no checkpoint in 'checkpoint', and no last_"
    ):
        go(tmp_path, 3)
    assert go(tmp_path, 1, restart=True) is None


def as_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE = pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text('{"step": 2'),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text('{"step": 2, "more": 0}'),
        lambda file: file.write_bytes(b"\xff"),
    ],
    ids=["torn", "list", "unknown key", "not UTF-8"],
)


@DAMAGE
def test_a_damaged_record(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The record matters only if there is no checkpoint."""
    go(tmp_path, 2)
    damage(tmp_path / RECORD)
    (tmp_path / "checkpoint").rename(tmp_path / "gone")
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path}/{RECORD} cannot be read \(.*\): if this run has saved no"
    ):
        go(tmp_path, 3)


@DAMAGE
@pytest.mark.parametrize("gone", [False, True])
def test_restart_over_a_damaged_record(tmp_path: Path, damage: Callable[[Path], None], gone: bool) -> None:
    go(tmp_path, 2)
    damage(tmp_path / RECORD)
    if gone:
        shutil.rmtree(tmp_path / "checkpoint")
    assert go(tmp_path, 1, restart=True) is None
    assert archived(tmp_path) == ([] if gone else [[1, 2]])
    assert recorded(tmp_path) == {"step": 1, "folder": "checkpoint", "restarted": True, "load_step": -1}
    assert go(tmp_path, 2, restart=True) == 1  # once


def test_a_record_that_cannot_be_read_now_restarts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not answer is no damage: a run that was restarted before would lose its
    progress."""
    go(tmp_path, 2)

    open_file = LocalDisk.open

    def stale(disk: LocalDisk, file: Path) -> BufferedIOBase:
        if file.name == RECORD:
            raise OSError(errno.ESTALE, "Stale file handle")
        return open_file(disk, file)

    with monkeypatch.context() as patch:
        patch.setattr(LocalDisk, "open", stale)
        with pytest.raises((OSError, RuntimeError), match="Stale file handle"):
            go(tmp_path, 1, restart=True)
    assert archived(tmp_path) == []
    assert go(tmp_path, 2) == 2


def test_a_damaged_record_beside_good_checkpoints_is_replaced(tmp_path: Path) -> None:
    go(tmp_path, 2)
    (tmp_path / RECORD).write_text("")
    assert go(tmp_path, 2) == 2
    assert recorded(tmp_path)["step"] == 2


def test_a_record_that_cannot_be_written_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(rank=0, verbose=True)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    run, toy = open_run(tmp_path), Toy()
    toy.step()
    monkeypatch.setattr(LocalDisk, "put", full)
    run.save(toy.state)
    run.close()
    monkeypatch.undo()
    assert f"{RECORD} could not be written: [Errno 28] No space left on device\n" in capsys.readouterr().err
    assert go(tmp_path, 2) == 1
    assert recorded(tmp_path)["step"] == 2
