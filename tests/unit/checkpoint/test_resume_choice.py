"""The choice of the checkpoint that a run resumes from: the newest good one, or once the one of load_step;
and the archiving of later checkpoints and metrics."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import (
    archived,
    flip,
    flip_a_shard,
    go,
    kill_before_moving,
    names,
    shards,
    shorten_a_shard,
)
from tests.support.jobs import make_job, metrics_of
from tests.support.runs import history
from titanlite import files
from titanlite.checkpoint import commit, digest
from titanlite.checkpoint.commit import CheckpointError
from titanlite.job import Job
from titanlite.storage import LocalDisk
from titanlite.train import train

# ---- the newest


@pytest.mark.parametrize("text", ['{"step"', "[]", "null", '{"step": 3, "sequences": 24}', "\x00\x00"])
def test_a_train_json_that_cannot_be_used_is_damage(tmp_path: Path, text: str) -> None:
    """The size is unchanged, so that only the hash differs. The file is read before any tensor."""
    go(tmp_path, 3)
    file = tmp_path / "checkpoint/step-3/train.json"
    file.write_text(text.ljust(file.stat().st_size))
    assert go(tmp_path, 3) == 2
    assert "quarantined-step-3-0" in names(tmp_path)


@pytest.mark.parametrize(("before", "after"), [('"seed": 0', '"seed": 1'), ('"dim": 4', '"dim": 5')])
def test_a_damaged_identity_is_damage_and_not_another_identity(
    tmp_path: Path, before: str, after: str
) -> None:
    go(tmp_path, 3)
    file = tmp_path / "checkpoint/step-3/train.json"
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))
    assert go(tmp_path, 3) == 2


def test_several_bad_ones_are_passed_over_at_once(tmp_path: Path) -> None:
    go(tmp_path, 5)
    folder = tmp_path / "checkpoint"
    flip_a_shard(folder / "step-5")
    shorten_a_shard(folder / "step-4")
    flip_a_shard(folder / "step-3")
    (folder / "step-2/manifest.json").unlink()
    assert go(tmp_path, 1) == 1
    assert names(tmp_path) == [
        "quarantined-step-2-0",
        "quarantined-step-3-0",
        "quarantined-step-4-0",
        "quarantined-step-5-0",
        "step-1",
    ]
    assert go(tmp_path, 5) == 1  # their steps can be saved again
    assert go(tmp_path, 5) == 5


def test_if_none_is_usable_all_stay_as_they_are(tmp_path: Path) -> None:
    """Some are found to be damaged before any tensor is loaded, some during loading."""
    go(tmp_path, 5)
    folder = tmp_path / "checkpoint"
    flip_a_shard(folder / "step-5")
    shorten_a_shard(folder / "step-4")
    flip_a_shard(folder / "step-3")
    (folder / "step-2/manifest.json").unlink()
    flip_a_shard(folder / "step-1")

    def contents() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "LOCK"}

    before = contents()
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            go(tmp_path, 5)
        assert error.value.exit_code == 3
        said = str(error.value)
        assert [step for step in range(1, 6) if f"{folder}/step-{step}: " in said] == [1, 2, 3, 4, 5]
        assert contents() == before
    flip_a_shard(folder / "step-3")  # as it was
    assert go(tmp_path, 3) == 3
    assert names(tmp_path) == ["quarantined-step-4-0", "quarantined-step-5-0", "step-1", "step-2", "step-3"]


@pytest.mark.parametrize("name", ["__0_0.distcp", "train.json"])
@pytest.mark.parametrize(
    ("code", "is_damage"), [(errno.EIO, True), (errno.ESTALE, False), (errno.EACCES, False)]
)
def test_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, is_damage: bool
) -> None:
    """A bad sector is damage; a file system that does not answer is not."""
    go(tmp_path, 3)

    hash_stream, open_file = digest.hash_stream, LocalDisk.open

    def check(path: Path) -> None:
        if path == tmp_path / "checkpoint/step-3" / name:
            raise OSError(code, os.strerror(code))

    def hash_(file: BufferedIOBase, path: Path) -> tuple[int, str]:
        check(path)
        return hash_stream(file, path)

    def open_(disk: LocalDisk, path: Path) -> BufferedIOBase:
        if path.suffix == ".json":  # shards are loaded while they are hashed
            check(path)
        return open_file(disk, path)

    monkeypatch.setattr(digest, "hash_stream", hash_)
    monkeypatch.setattr(LocalDisk, "open", open_)
    if is_damage:
        assert go(tmp_path, 3) == 2
        return
    with pytest.raises((RuntimeError, PermissionError), match=os.strerror(code)):
        go(tmp_path, 3)
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]
    monkeypatch.undo()
    assert go(tmp_path, 3) == 3


@pytest.mark.full
@pytest.mark.parametrize("torn", [0, 10])
def test_a_start_killed_while_it_wrote_the_identity_is_not_the_end_of_the_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, torn: int
) -> None:
    """Each start writes run_identity.json beside the metrics; checkpoints have their own copy."""
    train(make_job(tmp_path, corpus, "--training.steps=2"))
    write_new = files.write_new

    def killed(path: Path, data: bytes) -> None:
        write_new(path, data[:torn] if "identity" in path.name else data)
        if "identity" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_new", killed)
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path, corpus, "--training.steps=3"))
    monkeypatch.undo()
    job = make_job(tmp_path, corpus, "--training.steps=3")
    train(job)
    assert [row["step"] for row in metrics_of(job)] == [1, 2, 3]


# ---- load_step


def test_load_step_goes_back_and_moves_what_came_after(tmp_path: Path) -> None:
    go(tmp_path, 5)
    before = {step: shards(tmp_path / f"checkpoint/step-{step}") for step in (3, 4, 5)}
    assert go(tmp_path, 4, load_step=2) == 2
    assert names(tmp_path) == ["archived-0", "step-1", "step-2", "step-3", "step-4"]
    assert archived(tmp_path) == [[3, 4, 5]]
    for step, digests in before.items():
        assert shards(tmp_path / f"checkpoint/archived-0/step-{step}") == digests
        assert step == 5 or shards(tmp_path / f"checkpoint/step-{step}") == digests  # the same run again


def test_a_restart_with_the_same_load_step_resumes(tmp_path: Path) -> None:
    go(tmp_path, 5)
    go(tmp_path, 4, load_step=2)
    assert go(tmp_path, 6, load_step=2) == 4
    assert go(tmp_path, 7) == 6  # a start without load_step resumes there, too
    assert archived(tmp_path) == [[3, 4, 5]]
    assert go(tmp_path, 3, load_step=2) == 2  # then load_step goes back again
    assert archived(tmp_path) == [[3, 4, 5], [3, 4, 5, 6, 7]]


def test_before_the_first_save_a_restart_begins_at_load_step_again(tmp_path: Path) -> None:
    go(tmp_path, 5)
    for _ in range(2):
        assert go(tmp_path, 2, load_step=2) == 2
    assert go(tmp_path, 2) == 2
    assert archived(tmp_path) == [[3, 4, 5]]


def test_going_back_to_the_newest_moves_nothing(tmp_path: Path) -> None:
    go(tmp_path, 3)
    assert go(tmp_path, 4, load_step=3) == 3
    assert archived(tmp_path) == []
    assert go(tmp_path, 5, load_step=3) == 4


def test_going_back_twice(tmp_path: Path) -> None:
    go(tmp_path, 6)
    (tmp_path / "checkpoint/step-5.keep").touch()
    go(tmp_path, 6, load_step=3)
    assert not (tmp_path / "checkpoint/step-5.keep").exists(), "the pin of another step 5"
    assert (tmp_path / "checkpoint/archived-0/step-5.keep").exists()
    assert go(tmp_path, 7, load_step=5) == 5  # on the branch of 3
    assert archived(tmp_path) == [[4, 5, 6], [6]]
    assert go(tmp_path, 7, load_step=3) == 3  # another value than before goes back again
    assert archived(tmp_path) == [[4, 5, 6], [6], [4, 5, 6, 7]]
    assert go(tmp_path, 4, load_step=2) == 2
    assert names(tmp_path)[-4:] == ["step-1", "step-2", "step-3", "step-4"]


@pytest.mark.parametrize("damage", [flip_a_shard, shorten_a_shard])
def test_a_bad_checkpoint_on_the_branch(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    go(tmp_path, 5)
    go(tmp_path, 4, load_step=2)
    damage(tmp_path / "checkpoint/step-4")
    assert go(tmp_path, 3, load_step=2) == 3  # the checkpoint before, on the branch
    damage(tmp_path / "checkpoint/step-3")
    assert go(tmp_path, 3, load_step=2) == 2  # no checkpoint is left on the branch: where it began
    assert archived(tmp_path) == [[3, 4, 5]]
    assert {"quarantined-step-3-0", "quarantined-step-4-0"} <= set(names(tmp_path))


def test_a_kill_between_two_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path, 5)
    kill_before_moving(monkeypatch, "step-4")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, 5, load_step=2)
    monkeypatch.undo()
    assert names(tmp_path)[1:] == ["step-1", "step-2", "step-3", "step-4"]  # no gap
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert go(tmp_path, 3, load_step=2) == 2
    assert archived(tmp_path) == [[5], [3, 4]]
    assert go(tmp_path / "copy", 5) == 4  # without load_step, it resumes from the newest


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (shutil.rmtree, ""),
        (shorten_a_shard, r": __0_0\.distcp has [\d,]+ bytes, [\d,]+ were written"),
        (lambda step: (step / "manifest.json").unlink(), r": manifest\.json is missing"),
        (
            lambda step: flip(step / "train.json"),
            r": train\.json is not what was written: its SHA-256 differs",
        ),
        (flip_a_shard, r": __0_0\.distcp is not what was written: its SHA-256 differs"),
    ],
    ids=["absent", "short", "no manifest", "train.json", "flipped"],
)
def test_a_load_step_that_cannot_be_loaded_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    go(tmp_path, 4)
    damage(tmp_path / "checkpoint/step-2")
    there = "1, 3, 4" if damage is shutil.rmtree else "1, 2, 3, 4"
    before = names(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            go(tmp_path, 4, load_step=2)
        assert error.value.exit_code == 3
        error.match(
            rf"load_step=2: no usable checkpoint of that step in \S+{why} \(steps in the folder: {there}\)"
        )
        assert names(tmp_path) == before
    assert go(tmp_path, 4) == 4


def test_load_step_of_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"load_step=2: no usable .* \(steps in the folder: none\)"):
        go(tmp_path, 4, load_step=2)
    assert not (tmp_path / "checkpoint").exists()


def test_the_one_gone_back_to_outlives_retention(tmp_path: Path) -> None:
    go(tmp_path, 5)
    go(tmp_path, 9, load_step=2, keep_latest_k=2)
    assert names(tmp_path) == ["archived-0", "step-2", "step-8", "step-9"]
    assert go(tmp_path, 9, load_step=2, keep_latest_k=2) == 9


# ---- the whole run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The uninterrupted run of 12 steps, saved at 4, 8 and 12."""
    job = make_job(tmp_path_factory.mktemp("whole"), corpus, "--training.steps=12")
    train(job)
    return job


@pytest.mark.full
def test_a_run_that_went_back_equals_the_original(whole: Job, tmp_path: Path, corpus: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "run")
    job = make_job(tmp_path, corpus, "--training.steps=12", "--checkpoint.load_step=4")
    train(job)
    assert [row["step"] for row in metrics_of(job)] == list(range(1, 13))
    assert history(job) == history(whole)
    superseded = (job.folder / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded] == list(range(5, 13))
    assert superseded == (whole.folder / "metrics.jsonl").read_text().splitlines()[4:]
    for step in (4, 8, 12):
        assert shards(job.folder / f"checkpoint/step-{step}") == shards(
            whole.folder / f"checkpoint/step-{step}"
        )
    assert archived(job.folder) == [[8, 12]]

    again = make_job(tmp_path, corpus, "--training.steps=14", "--checkpoint.load_step=4")
    train(again)
    assert [row["step"] for row in metrics_of(again)] == list(range(1, 15))
    assert history(again)[:12] == history(whole)
    assert (job.folder / "metrics.superseded.jsonl").read_text().splitlines() == superseded
    assert archived(job.folder) == [[8, 12]]


def test_control_another_branch_is_another_run(whole: Job, tmp_path: Path, corpus: Path) -> None:
    """Going back with another learning rate, the usual reason. The steps before are those of the original
    run."""
    shutil.copytree(whole.folder, tmp_path / "run")
    job = make_job(tmp_path, corpus, "--training.steps=12", "--checkpoint.load_step=4", "--optimizer.lr=1e-3")
    train(job)
    assert history(job)[:4] == history(whole)[:4]
    assert all(a != b for a, b in zip(history(job)[4:], history(whole)[4:]))
    assert shards(job.folder / "checkpoint/step-12") != shards(whole.folder / "checkpoint/step-12")
    loaded = [json.loads((job.folder / f"checkpoint/step-{n}/train.json").read_text()) for n in (4, 8, 12)]
    assert [train_json["branch"] for train_json in loaded] == [None, 4, 4]
    manifest = commit.read_manifest(job.folder / "checkpoint/step-12")
    assert (manifest["resumed_from"], torch.__version__) == (4, manifest["torch"])
