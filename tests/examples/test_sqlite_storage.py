"""The example of a storage: a run whose files are in a database is killed there, resumes there on two ranks,
and ends with the same bytes of weights and the same metrics as a run on the local disk."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

import pytest

from tests.examples.sqlite_storage import SQLite
from tests.support.jobs import make_job
from tests.support.runs import train_on_rank
from titanlite.checkpoint import commit
from titanlite.config.component import ConfigError
from titanlite.storage import storage_of
from titanlite.train import train

IMPORT = "--job.imports=['tests.examples.sqlite_storage']"
KEYS = [
    IMPORT,
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest_k=2",
    "--generation.freq=3",
    "--generation.prompts=['a']",
]


def folder_of(tmp_path: Path) -> PurePath:
    return SQLite().path(f"sqlite://{tmp_path}/runs.db/first")


def content(folder: PurePath, name: str) -> bytes:
    return storage_of(folder).read(folder / name)


def losses(folder: PurePath) -> list[tuple[int, float]]:
    lines = map(json.loads, content(folder, "metrics.jsonl").splitlines())
    return [(line["step"], line["train/loss"]) for line in lines]


def test_a_run_in_a_database_is_the_run_on_a_disk(tmp_path: Path, corpus: Path) -> None:
    local = make_job(tmp_path, corpus, *KEYS, "--training.steps=7")
    assert train(local) == 0
    dump_folder = f"--job.dump_folder=sqlite://{tmp_path}/runs.db/first"
    job = make_job(tmp_path, corpus, *KEYS, dump_folder, "--training.steps=5")
    folder, checkpoints = folder_of(tmp_path), folder_of(tmp_path) / "checkpoint"
    assert train(job) == 0
    storage = storage_of(folder)
    assert [step for step, _ in commit.list_committed(checkpoints)] == [4, 5]
    storage.append(checkpoints / "step-5/__0_0.distcp", b"damage")
    assert train(make_job(tmp_path, corpus, *KEYS, dump_folder, "--training.steps=7")) == 0
    assert sorted(path.name for path in storage.list(checkpoints)) == [
        "quarantined-step-5-0", "step-4", "step-6", "step-7",
    ]  # fmt: skip
    assert commit.read_manifest(checkpoints / "step-7")["commit"] == "rename"
    for name in ("checkpoint/step-7/__0_0.distcp", "checkpoint/step-7/.metadata", "samples.txt"):
        assert content(folder, name) == content(local.folder, name)
    assert losses(folder) == losses(local.folder)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("sqlite")]


@pytest.mark.full
def test_two_ranks_share_a_database(tmp_path: Path, corpus: Path, run_on: Any) -> None:
    runs = {"on a disk": [], "in a database": [f"--job.dump_folder=sqlite://{tmp_path}/runs.db/first"]}
    for where in runs.values():
        run_on(2, train_on_rank, tmp_path, corpus, [*KEYS, *where, "--training.steps=4"], "run", 2)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        name = f"checkpoint/step-4/{name}"
        assert content(folder_of(tmp_path), name) == content(tmp_path / "run", name)


def test_a_path_without_a_database_and_an_unknown_storage_are_refused(tmp_path: Path, corpus: Path) -> None:
    for path, problem in (("sqlite:///a/b", "names no database"), ("s4://a/b", "no storage for s4:// paths")):
        with pytest.raises(ConfigError, match=problem):
            make_job(tmp_path, corpus, IMPORT, f"--job.dump_folder={path}")
