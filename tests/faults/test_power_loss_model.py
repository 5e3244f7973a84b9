"""Tests of the tools of other tests: the recording of support/file_operations.py, and the states that
support/power_loss.py makes from it."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.file_operations import Content, Recording, recorded
from tests.support.power_loss import Link, Tree, crashes, described, replayed, tree_of, without_syncs
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


def test_what_libraries_and_threads_write_is_recorded(tmp_path: Path) -> None:
    """safetensors writes in Rust and torch in C++, without any Python call."""

    def act() -> None:
        save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
        torch.save(torch.ones(4), tmp_path / "b.pt")
        threads = [threading.Thread(target=write_new, args=(tmp_path / str(i), b"x" * i)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    said = described(record(tmp_path, act))
    assert {f"sync {i}" for i in range(8)} <= set(said)
    assert {"+ ./a.safetensors", "content a.safetensors", "+ ./b.pt", "content b.pt"} <= set(said)


def test_a_number_that_the_file_system_uses_again_is_another_file(tmp_path: Path) -> None:
    def act() -> None:
        for i in range(20):
            (tmp_path / "file").write_text(f"{i}")
            (tmp_path / "file").unlink()

    recording = record(tmp_path, act)
    assert len({op.node for op in recording.operations if isinstance(op, Content)}) == 20


def test_writes_within_one_tick_of_the_clock_are_seen(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb", buffering=0) as file:

        def act() -> None:
            for i in range(50):
                file.seek(0)
                file.write(bytes([i]))
                os.fsync(file.fileno())

        assert [op.data for op in record(tmp_path, act).operations if isinstance(op, Content)] == [
            bytes([i]) for i in range(50)
        ]


def test_nothing_is_recorded_afterwards(tmp_path: Path) -> None:
    recording = record(tmp_path, lambda: None)
    write_new(tmp_path / "file", b"")
    assert recording.operations == []
    with pytest.raises(AssertionError, match="nothing is being recorded"):
        recording.mark(1)


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


def test_deletions_come_in_any_order_but_a_folder_goes_last(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in "abc":
        (tmp_path / "folder" / name).touch()
    trees = states(record(tmp_path, lambda: shutil.rmtree(tmp_path / "folder")))
    assert len(trees) == 2**3 + 1
    assert [tree for tree in trees if "folder" not in tree] == [{}]


def test_a_rename_between_folders_loses_nothing(tmp_path: Path) -> None:
    for name in ("here", "file"):
        (tmp_path / "here").mkdir(exist_ok=True)
        (tmp_path / "here" / name).write_text(name)

    def act() -> None:
        (tmp_path / "there").mkdir()
        os.rename(tmp_path / "here/file", tmp_path / "there/file")
        sync(tmp_path / "there")
        os.symlink("there", tmp_path / "link")

    trees = states(record(tmp_path, act))
    assert all(("here/file" in tree) != ("there/file" in tree) for tree in trees)
    assert {tree.get("link") for tree in trees} == {None, Link("there")}


@pytest.mark.parametrize("count", [6, 12])
def test_many_unsynced_names_are_sampled(tmp_path: Path, count: int) -> None:
    """For 6 names all subsets are made; for 12 the prefixes, each name alone present, each name alone
    missing, and random subsets."""
    recording = record(tmp_path, lambda: [(tmp_path / f"{i:02}").touch() for i in range(count)])
    trees = {frozenset(tree) for tree in states(recording, samples=5)}
    names = [f"{i:02}" for i in range(count)]
    assert {frozenset(names[:i]) for i in range(count + 1)} <= trees
    assert {frozenset([name]) for name in names} <= trees
    assert {frozenset(set(names) - {name}) for name in names} <= trees
    assert len(trees) == (64 if count == 6 else pytest.approx(3 * count + 2, abs=5))
    assert trees == {frozenset(tree) for tree in states(recording, samples=5)}


def test_a_crash_is_put_on_the_disk_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_bytes(b"data")
    os.symlink("b/file", root / "a/link")
    recording = record(root, lambda: (root / "new").touch())
    assert [tree_of(crash.put(tmp_path / f"{i}")) for i, crash in enumerate(crashes(recording))] == states(
        recording
    )
