"""Pins what every storage does, for the local disk and for the example from outside the package."""

from __future__ import annotations

import ast
from pathlib import Path, PurePath

import pytest

from tests.examples import sqlite_storage
from tests.support.jobs import ROOT
from titanlite.config.component import ConfigError
from titanlite.storage import LOCAL, local_path, parse_path, storage_of


@pytest.fixture(params=["file", "sqlite", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> PurePath:
    texts = {"file": f"file://{tmp_path}/run", "sqlite": f"sqlite://{tmp_path}/runs.db/run"}
    if request.param == "s3":
        texts["s3"] = f"s3://{request.getfixturevalue('bucket')}/run"
    folder = parse_path(texts[request.param])
    storage_of(folder).make_folder(folder / "below")
    return folder


def write(path: PurePath, data: bytes) -> None:
    file = storage_of(path).create(path)
    file.write(data[:2])
    file.write(memoryview(data)[2:])
    file.close()


def test_files_are_created_once_and_read_by_ranges(folder: PurePath) -> None:
    storage, path = storage_of(folder), folder / "below/a.bin"
    assert not storage.exists(path)
    write(path, b"0123456789")
    assert (storage.exists(path), storage.is_folder(path), storage.size(path)) == (True, False, 10)
    assert (storage.read(path), storage.read(path, 3, 4), storage.read(path, 8)) == (
        b"0123456789", b"3456", b"89",
    )  # fmt: skip
    with pytest.raises(FileExistsError):
        write(path, b"other")
    assert storage.read(path) == b"0123456789"
    aborted = storage.create(folder / "aborted")
    aborted.write(b"half")
    aborted.abort()
    for missing in (folder / "none", folder / "none/none"):
        for access in (storage.read, storage.size):
            with pytest.raises(FileNotFoundError):
                access(missing)


def test_small_files_are_replaced_and_appended_to(folder: PurePath) -> None:
    storage, path = storage_of(folder), folder / "lines"
    storage.append(path, b"one\n")
    storage.append(path, b"two\n")
    assert storage.read(path) == b"one\ntwo\n"
    storage.put(path, b"new")
    assert storage.read(path) == b"new"


def test_folders_are_listed_renamed_and_deleted(folder: PurePath) -> None:
    storage = storage_of(folder)
    for step, names in (("step-1", "ab"), ("step-2", "a")):  # as checkpoints are made
        partial = folder / f".partial-{step}-0123abcd"
        storage.make_folder(partial)
        for name in names:
            write(partial / name, f"{step}/{name}".encode())
        assert partial in storage.list(folder, ".partial-*")
        storage.rename(partial, folder / step)
        assert not storage.list(folder, ".partial-*")
    write(folder / "step-2.keep", b"")
    assert {path.name for path in storage.list(folder, "step-*")} == {"step-1", "step-2", "step-2.keep"}
    assert storage.list(folder / "none") == []
    assert storage.is_folder(folder / "step-1")
    storage.rename(folder / "step-1", folder / "step-3")
    assert not storage.exists(folder / "step-1")
    assert {path.name: storage.read(path) for path in storage.list(folder / "step-3")} == {
        "a": b"step-1/a", "b": b"step-1/b",
    }  # fmt: skip
    with pytest.raises(OSError):
        storage.rename(folder / "step-3", folder / "step-2")
    assert storage.read(folder / "step-2/a") == b"step-2/a"
    for path in (folder / "step-3", folder / "step-2.keep", folder / "none"):
        storage.delete(path)
        assert not storage.exists(path)
    assert storage.exists(folder / "step-2/a")


def test_one_process_has_a_lock(folder: PurePath) -> None:
    lock = storage_of(folder).lock(folder / "LOCK")
    assert lock.try_take()
    lock.write_owner("process 1")
    assert (lock.owner(), lock.is_lost()) == ("process 1", False)
    lock.release()


def test_a_path_names_its_storage(tmp_path: Path) -> None:
    assert storage_of(tmp_path) is LOCAL
    assert parse_path("outputs/a") == Path("outputs/a")
    path = parse_path("sqlite:///data/runs.db/first")
    assert isinstance(storage_of(path / "checkpoint"), sqlite_storage.SQLite)
    assert str(path / "checkpoint") == "sqlite:///data/runs.db/first/checkpoint"
    with pytest.raises(ConfigError, match="no storage for s4:// paths") as error:
        parse_path("s4://bucket/run", "job.dump_folder")
    assert error.value.key == "job.dump_folder"
    for misspelt in ("SQLITE:///data/runs.db/first", "sqlite:/data/runs.db/first", "sqlite:data"):
        with pytest.raises(ConfigError, match="a URL of this storage begins with sqlite://"):
            parse_path(misspelt)
    with pytest.raises(ConfigError, match="profiling needs a folder on a local disk"):
        local_path(path, "profiling")


# Modules that touch the files of a run, and what they may not call by themselves.
MODULES = [
    "checkpoint/*.py",
    "metrics/*.py",
    "metrics/sinks/*.py",
    "runtime/signals.py",
    "run.py",
    "start.py",
    "train.py",
]
CALLS = {
    "open", "mkdir", "rename", "replace", "unlink", "rmtree", "rmdir", "remove", "exists", "is_file",
    "is_dir", "stat", "iterdir", "glob", "rglob", "scandir", "listdir", "read_bytes", "read_text",
    "write_bytes", "write_text", "touch", "fsync", "write_atomically", "write_new", "read_regular",
}  # fmt: skip
# A user's own paths, copies on the disk and in the memory of a node, and the traces that torch writes.
LOCAL_ONLY = {
    "checkpoint/find.py", "checkpoint/memory.py", "checkpoint/node_copies.py", "checkpoint/transfer.py",
    "metrics/profiling.py",
}  # fmt: skip


def direct_calls(source: str) -> set[str]:
    """Calls that access files without a storage."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            is_text = name == "replace" and (len(node.args) == 2 or owner in ("", "dataclasses"))
            through = "storage" in owner or owner in ("disk", "LOCAL")
            if name in CALLS and not through and not is_text:
                found.add(ast.unparse(node))
    return found


def test_a_runs_files_are_accessed_through_their_storage() -> None:
    package = ROOT / "titanlite"
    files = [file for pattern in MODULES for file in sorted(package.glob(pattern))]
    names = {file: file.relative_to(package).as_posix() for file in files}
    found = {
        names[file]: calls
        for file in files
        if names[file] not in LOCAL_ONLY and (calls := direct_calls(file.read_text()))
    }
    assert not found
    assert len(files) > 40
    planted = "with open(path) as f: pass\npath.exists()\nos.rename(a, b)\nstorage.exists(a)\n"
    assert direct_calls(planted) == {"open(path)", "path.exists()", "os.rename(a, b)"}
