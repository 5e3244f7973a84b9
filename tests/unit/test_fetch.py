"""Copies of folders in a bucket: a copy has what is there now, and what a command has written is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

from tests.support.buckets import Server
from titanlite import cli, fetch, object_store
from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import write_file
from titanlite.checkpoint.find import checkpoints_below
from titanlite.config.component import ConfigError
from titanlite.storage import storage_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PurePath]:
    """An empty folder in a bucket. The cache folder is tmp_path/cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield Server("s3", "").new_folder()
    object_store.forget_clients()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are copied."""
    names, fetch_file = list[str](), fetch._fetch

    def noted(source: PurePath, target: Path) -> object:
        names.append(source.name)
        return fetch_file(source, target)

    monkeypatch.setattr(fetch, "_fetch", noted)
    return names


def write(folder: PurePath, **texts: str) -> None:
    for name, text in texts.items():
        storage_of(folder).put(folder / name, text.encode())


def save(folder: PurePath, step: int) -> PurePath:
    partial = commit.begin(folder, step)
    files = {"__0_0.distcp": write_file(partial / "__0_0.distcp", b"weights")}
    return commit.commit(partial, step, {"train.json": "{}"}, files, {})


def test_a_model_that_was_replaced_by_one_of_the_same_size_is_copied_again(
    folder: PurePath, fetched: list[str]
) -> None:
    write(folder, config="{}", model="A's weights")
    copy = fetch.local_copy(folder)
    assert fetch.local_copy(folder) == copy
    assert sorted(fetched) == ["config", "model"], "copied once"
    storage_of(folder).delete(folder)
    write(folder, config="{}", model="B's weights")
    assert (fetch.local_copy(folder) / "model").read_text() == "B's weights"


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_folder_that_changes_while_it_is_copied_is_refused(
    folder: PurePath, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(folder, config="{}", model="A's weights")
    fetch_file = fetch._fetch

    def changes(source: PurePath, target: Path) -> object:
        if change == "deleted":
            storage_of(folder).delete(folder)
        write(folder, model="B's weights")
        return fetch_file(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(fetch, "_fetch", changes)
        with pytest.raises(ConfigError, match="first changed while it was copied; repeat the command"):
            fetch.local_copy(folder)
    assert (fetch.local_copy(folder) / "model").read_text() == "B's weights"


def test_a_checkpoint_that_is_deleted_while_it_is_copied_is_one_line(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fetch_file = save(folder, 1), fetch._fetch

    def deletes(source: PurePath, target: Path) -> object:
        storage_of(path).delete(path)
        return fetch_file(source, target)

    monkeypatch.setattr(fetch, "_fetch", deletes)
    with pytest.raises(CheckpointError, match="step-1 was deleted while it was read"):
        fetch.local_copy(folder)


@pytest.mark.parametrize("last", ["config.json", "meta_000000.json"], ids=["Hugging Face", "nanochat"])
def test_an_export_has_its_last_file_once_it_is_whole(
    folder: PurePath, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, upload = list[str](), fetch.upload

    def noted(file: Path, target: PurePath) -> None:
        uploads.append(target.name)
        upload(file, target)

    monkeypatch.setattr(fetch, "upload", noted)
    fetch.check_target(folder, "DIR")
    with fetch.new_target(folder) as target:
        target.mkdir()
        write(target, **{last: "{}", "model_000000.pt": "weights", "tokenizer.json": "{}"})
    assert uploads == ["model_000000.pt", "tokenizer.json", last]
    with pytest.raises(ConfigError, match="exists; choose another"):
        fetch.check_target(folder, "DIR")


def test_a_damaged_average_is_named(folder: PurePath) -> None:
    write(folder, **{"manifest.json": "{}"})
    for read in (checkpoints_below, fetch.local_copy):
        with pytest.raises(CheckpointError, match=r"^s3://.*/first is damaged: its manifest"):
            read(folder)


def test_a_verification_reads_once_and_leaves_nothing(
    folder: PurePath, fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("titanlite.tools.checkpoint.non_finite_in", lambda path: found.extend(path.iterdir()))
    found = list[Path]()
    save(folder, 1), save(folder, 2)
    assert cli.run(["checkpoint", "verify", str(folder)]) == 0
    assert sorted(fetched) == ["__0_0.distcp", "__0_0.distcp", "train.json", "train.json"]
    assert len(found) == 6
    assert not any(tmp_path.iterdir()), "neither copies nor a cache"
    write(folder / "step-1", **{"__0_0.distcp": "Weights"})
    assert cli.run(["checkpoint", "verify", str(folder)]) == 3
