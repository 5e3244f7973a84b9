"""The writer: its digests are those of the files on disk, every way of saving gives the same bytes, plain DCP
reads them, and no error of any thread is lost."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.checkpoints import Toy, names, open_run, save_steps
from titanlite.checkpoint import commit, saver, writer
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.writer import ShardWriter

SEVERAL = 4096  # bytes per file, so that a few thousand numbers make several files


def some_tensors() -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of several dtypes and sizes: one is empty, one is a scalar, two are views of a larger
    storage."""
    torch.manual_seed(3)
    wide = torch.randn(64, 64)
    return {
        "model": {
            "a": torch.randn(64, 32),
            "b": torch.randn(100).bfloat16(),
            "view": wide[:4],
            "columns": wide[:, ::2],
            "empty": torch.empty(0, 3),
        },
        "optimizer": {"a.step": torch.tensor(7.0), "count": torch.arange(5), "mask": torch.ones(9).bool()},
    }


def write(path: Path, tensors: dict[str, dict[str, torch.Tensor]]) -> ShardWriter:
    path.mkdir(exist_ok=True)
    storage = ShardWriter(path)
    save(tensors, storage_writer=storage, no_dist=True)
    return storage


def bytes_of(path: Path, *but: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir() if p.name not in but}


@pytest.mark.parametrize("file_bytes", [writer.FILE_BYTES, SEVERAL, 1])
def test_digests_are_of_the_files_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", file_bytes)
    files = write(tmp_path / "c", some_tensors()).files
    on_disk = bytes_of(tmp_path / "c")
    assert {name: (d.size, d.sha256) for name, d in files.items()} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in on_disk.items()
    }
    shards = {writer.FILE_BYTES: 1, SEVERAL: 5, 1: writer.MAX_FILES}[file_bytes]
    assert files.keys() == {".metadata", *(f"__0_{i}.distcp" for i in range(shards))}


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    wide = torch.randn(1000, 100)
    digest = write(tmp_path / "c", {"model": {"view": wide[:2]}}).files["__0_0.distcp"]
    assert digest.size < 4096


def test_files_are_filled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 40_000)
    files = write(tmp_path / "c", {"model": {f"t{n}": torch.ones(50 * n) for n in range(1, 41)}}).files
    shards = [digest.size for name, digest in files.items() if name.endswith(".distcp")]
    assert len(shards) == -(-4 * 50 * sum(range(1, 41)) // 40_000) == 5
    assert max(shards) - min(shards) < 4 * 50 * 40  # the largest item


@pytest.mark.parametrize("file_bytes", [writer.FILE_BYTES, SEVERAL])
def test_plain_dcp_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", file_bytes)
    tensors = some_tensors()
    write(tmp_path / "c", tensors)
    into = {
        section: {name: torch.zeros_like(t) for name, t in by_name.items()}
        for section, by_name in tensors.items()
    }
    load(into, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    for section, by_name in tensors.items():
        assert all(torch.equal(into[section][name], t) for name, t in by_name.items())
    assert into["optimizer"]["a.step"] == 7.0  # so the comparison was not one of zeros


def test_every_way_of_saving_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", SEVERAL)
    for mode in ("async", "disabled", "async again"):
        run, toy = open_run(tmp_path / mode, async_mode=mode.split()[0]), Toy(width=40)
        for _ in range(2):  # the second save reuses the staging buffers
            toy.step()
            run.save(toy.state)
        run.close()
    for step in ("step-1", "step-2"):
        first, *others = (
            bytes_of(tmp_path / mode / "checkpoint" / step, commit.MANIFEST)
            for mode in ("async", "disabled", "async again")
        )
        assert sum(name.endswith(".distcp") for name in first) > 2
        assert first.keys() >= {".metadata", "train.json", "job.toml"}
        assert all(other == first for other in others)


def save_on_rank(folder: Path, mode: str) -> None:
    """Save a sharded model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "FILE_BYTES", SEVERAL)
        toy = Toy(width=40)
        fully_shard(toy.net, mesh=init_device_mesh("cpu", (2,)))
        toy.optimizer = torch.optim.AdamW(toy.net.parameters(), lr=0.1)
        run = open_run(folder, async_mode=mode)
        for _ in range(2):
            toy.step()
            run.save(toy.state)
        run.close()


@pytest.mark.full
def test_two_ranks_give_the_same_bytes_too(tmp_path: Path, run_on: Callable[..., list[Any]]) -> None:
    for mode in ("async", "disabled"):
        run_on(2, save_on_rank, tmp_path / mode, mode)
    for step in ("step-1", "step-2"):
        one, two = (
            bytes_of(tmp_path / m / "checkpoint" / step, commit.MANIFEST) for m in ("async", "disabled")
        )
        assert {f"__{rank}_{i}.distcp" for rank in (0, 1) for i in (0, 1)} <= one.keys()
        assert one == two
        manifest = commit.read_manifest(tmp_path / "async/checkpoint" / step)
        assert {name: d.sha256 for name, d in commit.digests(manifest).items()} == {
            name: hashlib.sha256(data).hexdigest() for name, data in one.items()
        }


# ---- what must not go unnoticed


@pytest.mark.parametrize("broken", [0, 1, 5, 7])
def test_an_error_in_one_of_the_threads_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 1)
    write_file = ShardWriter.write_file

    def failing(self: ShardWriter, name: str, *rest: Any) -> list[Any]:
        if name == f"__0_{broken}.distcp":
            raise OSError(28, "No space left on device")
        return write_file(self, name, *rest)

    monkeypatch.setattr(ShardWriter, "write_file", failing)
    with pytest.raises(CheckpointException, match="No space left"):
        write(tmp_path / "c", some_tensors())
    assert not (tmp_path / "c/.metadata").exists()


def test_an_error_at_the_last_flush_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointException, match="Input/output error"):
        write(tmp_path / "c", some_tensors())
    assert not (tmp_path / "c/.metadata").exists()


def test_a_planned_tensor_that_is_not_written_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = writer._files
    monkeypatch.setattr(writer, "_files", lambda items: [shard[:-1] for shard in files(items)])
    with pytest.raises(CheckpointException, match="1 tensors were not written"):
        write(tmp_path / "c", some_tensors())
    monkeypatch.setattr(saver, "MAX_FAILURES", 1)
    run, toy = open_run(tmp_path, async_mode="disabled"), Toy()
    toy.step()
    with pytest.raises(
        CheckpointError, match=r"step 1 could not be saved.*not written, for example (model|optimizer)\.\w+"
    ):
        run.save(toy.state)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp", ".metadata.tmp", ".metadata"])
def test_a_file_that_is_there_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", SEVERAL)
    (tmp_path / name).write_bytes(b"somebody's")
    with pytest.raises(CheckpointException, match="exists"):
        write(tmp_path, some_tensors())
    assert (tmp_path / name).read_bytes() == b"somebody's"


def test_all_bytes_of_a_file_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in Python's buffer at the fsync are lost in a power loss. torch's own writer syncs `.metadata`
    before it flushes it."""
    synced: dict[int, int] = {}
    fsync = os.fsync

    def noting(fd: int) -> None:
        fsync(fd)
        synced[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    monkeypatch.setattr(os, "fsync", noting)
    save_steps(tmp_path, 1)[1].close()
    files = list((tmp_path / "checkpoint/step-1").iterdir())
    assert {p.name for p in files} == {
        "__0_0.distcp",
        ".metadata",
        "train.json",
        "job.toml",
        commit.MANIFEST,
    }
    assert {p.name: synced[p.stat().st_ino] for p in files} == {p.name: p.stat().st_size for p in files}


def test_everything_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(fd: int) -> None:
        events.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
        fsync(fd)

    def noting_rename(a: Any, b: Any) -> None:
        events.append(f"{os.path.basename(a)} -> {os.path.basename(b)}")
        rename(a, b)

    def plain(event: str) -> str:
        return re.sub(r"(partial-(step-1|last_commit\.json))-\w{8}", r"\1", event)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    run, toy = open_run(tmp_path, async_mode="disabled"), Toy()
    toy.step()
    events.clear()
    run.save(toy.state)
    assert [plain(event) for event in events] == [
        "sync checkpoint",  # which has the new folder
        "sync __0_0.distcp",
        "sync .partial-step-1",  # this rank's files; DCP renames .metadata later
        "sync .metadata.tmp",
        ".metadata.tmp -> .metadata",
        "sync train.json",
        "sync job.toml",
        "sync manifest.json",
        "sync .partial-step-1",
        ".partial-step-1 -> step-1",
        "sync checkpoint",
        "sync .partial-last_commit.json",
        f"sync {tmp_path.name}",
    ]
