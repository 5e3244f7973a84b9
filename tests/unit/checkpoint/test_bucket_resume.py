"""A resume from a bucket reads each byte of the checkpoint once per node, verified before it is used."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import tracemalloc
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.buckets import Server
from tests.support.checkpoints import Toy, open_run
from tests.support.counted_bytes import CountedBytes
from tests.support.tiers import full
from titanlite import bucket_objects, object_store
from titanlite.checkpoint import commit, node_copies
from titanlite.checkpoint.commit import Damaged
from titanlite.checkpoint.digest import FileDigest
from titanlite.checkpoint.node_copies import NodeCopies
from titanlite.checkpoint.reader import load_tensors
from titanlite.ranks import Ranks
from titanlite.storage import parse_path, storage_of

WIDTH = 600  # 4.3 MB of weights and optimizer state


@pytest.fixture
def run_folder(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PurePath:
    """The folder of a run in a bucket with the checkpoints of steps 1 and 2. Copies go to tmp_path/node."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    monkeypatch.setattr(node_copies, "SPARE_BYTES", 0)
    folder: Any = parse_path(f"s3://{bucket}/run")
    run, toy = open_run(folder), Toy(WIDTH)
    for _ in range(2):
        toy.step()
        run.save(toy.state)
    run.close()
    return folder


@pytest.fixture
def counted(run_folder: PurePath, monkeypatch: pytest.MonkeyPatch) -> CountedBytes:
    client = CountedBytes(bucket_objects.client_of(run_folder))
    monkeypatch.setattr(bucket_objects, "clients", dict.fromkeys(bucket_objects.clients, client))
    return client


def checkpoint_bytes(run_folder: PurePath) -> int:
    return commit.total_size(commit.read_manifest(run_folder / "checkpoint/step-2"))


def resumed(run_folder: Any) -> Toy:
    run, toy = open_run(run_folder), Toy(WIDTH, seed=1)
    run.load(toy.state)
    run.close()
    return toy


def test_a_resume_reads_each_byte_once(
    run_folder: PurePath, counted: CountedBytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = checkpoint_bytes(run_folder)
    counted.count = 0
    weights = resumed(run_folder).net.weight
    assert 1.0 * size < counted.count <= 1.05 * size
    assert not list((tmp_path / "node").iterdir()), "copies are deleted"
    # Without room for copies, the shards are read twice: to load and to verify them.
    counted.count = 0
    monkeypatch.setattr(node_copies, "SPARE_BYTES", 1 << 60)
    assert (resumed(run_folder).net.weight == weights).all()
    assert counted.count > 1.9 * size
    assert not list((tmp_path / "node").iterdir())


@pytest.mark.parametrize("room", [0, full(1 << 60)], ids=["copied", "in place"])
def test_a_damaged_shard_is_found_before_it_is_used(
    run_folder: PurePath, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_copies, "SPARE_BYTES", room)
    key = object_store._resolved(run_folder / "checkpoint/step-2/__0_0.distcp")
    data = bytearray(bucket_objects.get(run_folder, str(key)))
    data[len(data) // 2] ^= 1
    bucket_objects.put(run_folder, str(key), bytes(data))
    assert resumed(run_folder).state.step == 1
    names = {path.name for path in storage_of(run_folder).list(run_folder / "checkpoint")}
    assert names >= {"step-1", "quarantined-step-2-0"}


def test_ranks_of_a_node_share_the_copies(
    run_folder: PurePath, counted: CountedBytes, tmp_path: Path
) -> None:
    path = run_folder / "checkpoint/step-2"
    manifest, ranks, size = commit.read_manifest(path), Ranks(path, alone=True), checkpoint_bytes(run_folder)
    shards = [NodeCopies(path, manifest, ranks) for _ in range(2)]
    shards[1].folder = shards[0].folder  # as the ranks of one job agree on
    counted.count = 0

    def load(copies: NodeCopies) -> None:
        toy = Toy(WIDTH)
        toy.step()
        load_tensors(path, toy.state.tensors(), manifest=manifest, files=copies)
        assert copies.result() is None

    threads = [threading.Thread(target=load, args=(copies,)) for copies in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(copies._verified for copies in shards)
    assert 1.0 * size < counted.count <= 1.05 * size
    shards[0].close()
    assert not list((tmp_path / "node").iterdir())


@pytest.mark.full
@pytest.mark.parametrize("is_supported", [True, False], ids=["reserved", "unsupported"])
def test_copies_that_begin_together_leave_the_room_free(
    run_folder: PurePath, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second copy begins before the first one is read. The disk has room for one of them."""
    path = run_folder / "checkpoint/step-2"
    manifest, ranks = commit.read_manifest(path), Ranks(path, alone=True)
    copies, other = (NodeCopies(path, manifest, ranks) for _ in range(2))
    other.folder, size = copies.folder, copies._shards["__0_0.distcp"].size
    other._shards["__1_0.distcp"] = other._shards["__0_0.distcp"]  # there is no such object
    second, copy_and_hash = list[Path | str | None](), node_copies._copy_and_hash

    def begins(target: Path, source: PurePath) -> FileDigest:
        if source.name == "__0_0.distcp":
            try:
                second.append(other._copy(path / "__1_0.distcp"))
            except Damaged as e:
                second.append(str(e))
        return copy_and_hash(target, source)

    def disk_usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=2 * size - sum(file.stat().st_blocks * 512 for file in folder.iterdir()))

    def unsupported(*args: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(node_copies, "SPARE_BYTES", size // 2)
    monkeypatch.setattr(node_copies, "_copy_and_hash", begins)
    monkeypatch.setattr(node_copies.shutil, "disk_usage", disk_usage)
    if not is_supported:
        monkeypatch.setattr(node_copies.os, "posix_fallocate", unsupported)
    copy = copies._copy(path / "__0_0.distcp")
    assert copy is not None
    assert copy.stat().st_size == size
    assert second == [None if is_supported else "__1_0.distcp is missing"]
    copies.close()


def test_a_copy_has_one_block_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the answers of the store, which are obstore's, and the buffer of the reader."""
    monkeypatch.setattr(bucket_objects, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(node_copies, "BLOCK_BYTES", 4 << 20)
    path = Server("s3", "").new_folder()
    storage_of(path).put(path / "shard", os.urandom(14 << 20))
    (tmp_path / "copy").touch()
    tracemalloc.start()
    node_copies._copy_and_hash(tmp_path / "copy", path / "shard")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    object_store.forget_clients()
    assert 4 << 20 < peak < 6 << 20


@pytest.mark.full
def test_copies_that_a_killed_start_has_left_are_deleted(run_folder: PurePath, tmp_path: Path) -> None:
    path = run_folder / "checkpoint/step-2"
    manifest, ranks = commit.read_manifest(path), Ranks(path, alone=True)
    killed = NodeCopies(path, manifest, ranks)
    killed.folder.mkdir()
    (killed.folder / "__0_0.distcp").write_bytes(b"old")
    (tmp_path / "node/titanlite-resume-of-another-run").mkdir()
    NodeCopies(path, manifest, ranks)
    assert [file.name for file in (tmp_path / "node").iterdir()] == ["titanlite-resume-of-another-run"]
