"""The report of a run in a bucket is the report of the same run on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

from tests.support.buckets import Server
from tests.support.clocked_runs import ClockedRun
from tests.support.curves import write_run
from titanlite import cli, object_store
from titanlite.checkpoint import commit
from titanlite.checkpoint.digest import write_file
from titanlite.config.component import ConfigError
from titanlite.report.page import report
from titanlite.report.recorded_run import names_of, read_run
from titanlite.report.timeline import timeline
from titanlite.storage import storage_of

ABOUT = {"saved_at": "2026-11-28T07:00:00", "ranks": 1}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[PurePath]]:
    """The same run on a disk and in a bucket: step 1 is kept, a shard of step 3 is missing, whose manifest
    still has the digest of the weights."""
    local = write_run(tmp_path / "runs/first", {"train/loss": [3.0, 2.0, 1.0]})
    folder = Server("s3", "").new_folder()
    for file in local.iterdir():
        storage_of(folder).put(folder / file.name, file.read_bytes())
    for run in (local, folder):
        for step in (1, 2, 3):
            partial = commit.begin(run / "checkpoint", step)
            files = {"__0_0.distcp": write_file(partial / "__0_0.distcp", b"weights")}
            about = {**ABOUT, "commit": "rename", "digest": {"weights": f"digest {step}"}}
            commit.commit(partial, step, {"train.json": "{}"}, files, about)
        storage_of(run).put(run / "checkpoint/step-1.keep", b"")
        storage_of(run).delete(run / "checkpoint/step-3/__0_0.distcp")
    yield [local, folder]
    object_store.forget_clients()


def test_the_report_of_a_run_in_a_bucket_is_that_of_a_disk(runs: list[PurePath], tmp_path: Path) -> None:
    local, there = (read_run(folder, "run") for folder in runs)
    assert there.weights_digests() == {1: "digest 1", 2: "digest 2", 3: "digest 3"}
    assert report([there]) == report([local])
    for number, folder in enumerate(runs):
        assert cli.run(["report", str(folder), "-o", str(tmp_path / f"{number}.html")]) == 0
    assert (tmp_path / "1.html").read_text() == (tmp_path / "0.html").read_text()
    assert cli.run(["compare", *map(str, runs)]) == 0
    assert len(set(names_of(runs))) == 2
    storage_of(runs[1]).put(runs[1] / "checkpoint/step-1.keep", b"")
    storage_of(runs[1]).delete(runs[1] / "checkpoint/step-1")
    assert read_run(runs[1], "run").weights_digests() == {2: "digest 2", 3: "digest 3"}
    with pytest.raises(ConfigError, match="there is no such run folder"):
        read_run(runs[1] / "other", "run")


def test_the_goodput_of_a_run_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ClockedRun(tmp_path / "run", monkeypatch)
    run.start(0, 20.0)
    run.steps(10)
    run.wait(30.0)
    run.start(5, 20.0)
    run.steps(10)
    bucket = Server("s3", "").new_folder()
    for file in run.folder.iterdir():
        storage_of(bucket).put(bucket / file.name, file.read_bytes())
    spent, local = (timeline(read_run(folder, "run")) for folder in (bucket, run.folder))
    object_store.forget_clients()
    assert spent.seconds == local.seconds
    assert spent.total_s == pytest.approx(run.now)


@pytest.mark.parametrize("place", [0, 1], ids=["disk", "bucket"])
def test_a_checkpoint_that_a_run_deletes_meanwhile_is_no_damage(
    runs: list[PurePath], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs[place]
    listed = commit.list_committed(run / "checkpoint")
    storage_of(run).delete(run / "checkpoint/step-2")
    monkeypatch.setattr(commit, "list_committed", lambda folder: listed)
    assert [saved.step for saved in read_run(run, "run").checkpoints] == [1, 3]
