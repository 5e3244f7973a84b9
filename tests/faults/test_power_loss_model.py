"""Tests of the tools of other tests: the recording of support/file_operations.py, and the states that
support/power_loss.py makes from it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.file_operations import Recording, recorded
from tests.support.power_loss import Tree, crashes, described, replayed, tree_of, without_syncs
from titanlite.files import make_folder, sync, write_atomically, write_new

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="holds files by O_PATH")


def record(root: Path, act: Callable[[], object]) -> Recording:
    """The recording of `act`. Replaying it gives the files that `act` has left."""
    with recorded(root) as recording:
        act()
    assert replayed(recording) == tree_of(root)
    return recording


def states(recording: Recording, **options: int) -> list[Tree]:
    """All crash states, each once."""
    return [crash.tree for crash in crashes(recording, **options)]


# ---- the recorder


def test_every_operation_is_recorded_in_order(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")

    def act() -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a/file").write_text("text")
        os.symlink("file", tmp_path / "a/link")
        os.link(tmp_path / "a/file", tmp_path / "second")
        sync(tmp_path / "a/file")
        os.replace(tmp_path / "second", tmp_path / "old")
        os.rename(tmp_path / "a", tmp_path / "b")
        os.truncate(tmp_path / "b/file", 2)
        sync(tmp_path)
        shutil.rmtree(tmp_path / "b")

    recording = record(tmp_path, act)
    assert recording.coarse == 0
    assert described(recording)[:10] == [
        "+ ./a", "+ a/file", "content a/file", "+ a/link", "+ ./second", "sync a/file", "- ./second, + ./old",
        "- ./a, + ./b", "content b/file", "sync .",
    ]  # fmt: skip
    assert sorted(described(recording)[10:12]) == ["- b/file", "- b/link"]
    assert described(recording)[12:] == ["- ./b"]
    assert replayed(recording) == {"old": b"te"}


# ---- the model


def test_an_unsynced_file_may_have_any_content_and_an_unsynced_name_may_be_missing(tmp_path: Path) -> None:
    """That a name exists says nothing about the content, and an fsync of the file says nothing about the
    name."""
    (tmp_path / "file").write_bytes(b"old")
    trees = states(record(tmp_path, lambda: (tmp_path / "file").write_bytes(b"longer")))
    contents = [b"old", b"", b"lon", bytes(6), b"longer"]
    assert sorted(tree["file"] for tree in trees) == sorted(contents)  # type: ignore[type-var]
    trees = states(record(tmp_path, lambda: write_new(tmp_path / "new", b"data")))
    end = [tree for tree in trees if tree.get("new") == b"data"]
    assert (len(end), {} in [{k: v for k, v in t.items() if k == "new"} for t in trees]) == (1, True)


def test_a_synced_name_and_a_synced_content_are_there_for_good(tmp_path: Path) -> None:
    def act() -> None:
        write_new(tmp_path / "file", b"data")
        sync(tmp_path)

    with recorded(tmp_path) as recording:
        act()
        recording.mark("synced")
    assert [crash.tree for crash in crashes(recording) if crash.mark == "synced"] == [{"file": b"data"}]


def test_an_atomic_write_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    trees = states(record(tmp_path, lambda: write_atomically(tmp_path / "file", b"new")))
    assert {tree["file"] for tree in trees} == {b"old", b"new"}
    assert all(len(tree) == 1 for tree in trees if tree["file"] == b"new")
    unsynced = without_syncs(
        record(tmp_path, lambda: write_atomically(tmp_path / "file", b"newer")), lambda path: True
    )
    assert {tree["file"] for tree in states(unsynced)} == {b"new", b"newer", b"", b"ne", bytes(5)}


def test_a_renamed_folder_may_lack_what_was_made_in_it(tmp_path: Path) -> None:
    def act(synced: bool) -> None:
        make_folder(tmp_path / "partial")
        for name in "ab":
            write_new(tmp_path / "partial" / name, b"x")
        if synced:
            sync(tmp_path / "partial")
        os.rename(tmp_path / "partial", tmp_path / "final")

    trees = [tree for tree in states(record(tmp_path, lambda: act(False))) if "final" in tree]
    assert sorted(len(tree) for tree in trees) == [1, 2, 2, 3]
    shutil.rmtree(tmp_path / "final")
    trees = [tree for tree in states(record(tmp_path, lambda: act(True))) if "final" in tree]
    assert [len(tree) for tree in trees] == [3]
