"""Pins the branching of a run by a copy of a checkpoint in another run folder (docs/howto.md): weights,
optimizer state and data order are those of the first run, which is not touched."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from tests.support.averages import sha_of
from tests.support.jobs import make_job, metrics_of
from titanlite import cli
from titanlite.checkpoint.commit import CheckpointError
from titanlite.job import Job
from titanlite.train import train

CONSTANT = ("--lr_scheduler.total_steps=0", "--lr_scheduler.decay_ratio=0", "--metrics.log_freq=1")
STEPS, BRANCH = 40, 20
SMALL = (f"--training.steps={STEPS}", f"--checkpoint.interval={BRANCH}", "--training.global_batch_size=4")
RATE = "train/learning_rate"


def branch(trunk: Job, corpus: Path, name: str, *overrides: str) -> Job:
    """A run in another folder that begins with the trunk's checkpoint, which is copied as hard links."""
    folder = trunk.folder.parent
    step = f"checkpoint/step-{BRANCH}"
    shutil.copytree(trunk.folder / step, folder / name / step, copy_function=os.link)
    return make_job(folder, corpus, *SMALL, *CONSTANT, *overrides, name=name)


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """A finished run at a constant learning rate."""
    job = make_job(tmp_path_factory.mktemp("trunk"), corpus, *SMALL, *CONSTANT, name="trunk")
    train(job)
    return job


@pytest.mark.full
def test_a_decay_branches_from_a_trunk(trunk: Job, corpus: Path) -> None:
    before = contents(trunk.folder)
    job = branch(trunk, corpus, "decay", f"--lr_scheduler.decay_start={BRANCH}")
    train(job)
    assert contents(trunk.folder) == before
    ours, theirs = metrics_of(job), metrics_of(trunk)[BRANCH:]
    assert [row["step"] for row in ours] == list(range(BRANCH + 1, STEPS + 1))
    assert [row["data/batch_sha"] for row in ours] == [row["data/batch_sha"] for row in theirs]
    peak, decay_steps = 3e-3, STEPS + 1 - BRANCH
    assert {row[RATE] for row in theirs} == {peak}
    assert [row[RATE] for row in ours] == pytest.approx(
        [peak * (1 - i / decay_steps) for i in range(1, decay_steps)]
    )
    # the first loss is that of the trunk's weights; from the second on, the learning rate was lower
    assert ours[0]["train/loss"] == theirs[0]["train/loss"]
    assert all(a["train/loss"] != b["train/loss"] for a, b in zip(ours[1:], theirs[1:], strict=True))
    assert sha_of(job.folder, "model") != sha_of(trunk.folder, "model")
    assert (job.folder / "run_id.json").read_text() != (trunk.folder / "run_id.json").read_text()


def test_a_branch_with_the_trunks_schedule_repeats_the_trunk(trunk: Job, corpus: Path) -> None:
    """So that only the learning rate sets a branch with another schedule apart."""
    job = branch(trunk, corpus, "same")
    train(job)
    for section in ("model", "optimizer"):
        assert sha_of(job.folder, section) == sha_of(trunk.folder, section)


def test_a_copy_that_was_cut_short_starts_no_run(trunk: Job, corpus: Path) -> None:
    job = branch(trunk, corpus, "cut")
    (job.folder / f"checkpoint/step-{BRANCH}/.metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        train(job)
    assert not (job.folder / "metrics.jsonl").exists()


@pytest.mark.parametrize("inside", ["", "checkpoint/step-1"])
def test_a_recorded_job_goes_on_where_it_lies(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_job(tmp_path, corpus)
    start = ["train", "job.toml", "--job.dump_folder=run", f"--data.cache_dir={corpus / 'cache'}"]
    assert cli.run([*start, "--training.steps=1"]) == 0
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "run", tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorded = tmp_path / "moved" / inside / "job.toml"
    assert cli.run(["train", os.path.relpath(recorded), "--training.steps=2"]) == 0
    assert sorted(p.name for p in (tmp_path / "moved/checkpoint").iterdir()) == ["step-1", "step-2"]
    assert not list((tmp_path / "elsewhere").iterdir())
    other = f"--job.dump_folder={tmp_path / 'other'}"
    assert (
        cli.run(["train", str(recorded), other, "--training.steps=1"]) == 0
    )  # unless another folder is chosen
    assert (tmp_path / "other/checkpoint/step-1").exists()
