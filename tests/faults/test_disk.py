"""Disks that are full, broken, slow or read-only: a save fails or a start is refused, with a reason and an
exit code. No checkpoint is lost, and the run continues when the disk allows it."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import Toy, names, open_run, save_steps
from tests.support.jobs import make_job, metrics_of, write_toml
from tests.support.logs import listening
from tests.support.runs import history
from tests.support.tiers import full
from titanlite import cli
from titanlite.checkpoint import commit, saver, writer
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import HashingFile, first_fault
from titanlite.checkpoint.writer import ShardWriter
from titanlite.config.component import ConfigError
from titanlite.corpus import stages
from titanlite.data import packing_index, tokenize_files
from titanlite.job import Job
from titanlite.metrics.meter import Meter
from titanlite.run import Run
from titanlite.train import train

MODES = pytest.mark.parametrize("mode", ["async", "disabled"])


class Disk:
    """A small file system."""

    def __init__(self, path: Path):
        self.path = path

    def fill(self, leave: int) -> None:
        """Fill the disk with a file, except `leave` bytes."""
        disk = os.statvfs(self.path)
        with open(self.path / "ballast", "ab") as f:
            f.write(bytes(max(0, disk.f_bavail * disk.f_frsize - leave)))

    def free(self) -> None:
        (self.path / "ballast").unlink()

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", self.path], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"a disk that can be filled has to be mounted, which needs root and Linux: {e}")
    yield Disk(path)
    subprocess.run(["umount", "-l", path], check=True)


class Many(Toy):
    """A run of 240 tensors with one number each. Their files are a hundred times larger than the tensors, so
    the disk is found to be full while files are written and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.full((1,), float(i))) for i in range(60))
        self.net = self.many  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.many.parameters(), lr=0.1)

    def step(self) -> None:
        sum(p.pow(2).sum() for p in self.many).backward()
        self.optimizer.step()
        self.state.step += 1


def save(run: Checkpointer, toy: Toy) -> None:
    """Take a step, save it, and wait for the save."""
    toy.step()
    run.save(toy.state)
    run.check_save()


def assert_whole(folder: Path, *steps: int) -> None:
    """These checkpoints exist and are complete, and nothing else exists."""
    assert names(folder) == sorted(f"step-{step}" for step in steps)
    for step, path in commit.list_committed(folder / "checkpoint"):
        assert commit.fault(path, step) is None
        assert first_fault(path, commit.digests(commit.read_manifest(path))) is None


# ---- a full disk


@MODES
def test_a_full_disk_costs_one_save(disk: Disk, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    run, toy = open_run(disk.path / "run", async_mode=mode), Many()
    save(run, toy)
    disk.fill(leave=100_000)
    with listening(caplog):
        save(run, toy)
    assert "No space left on device (failure 1 of 3 in a row)" in caplog.text
    assert_whole(disk.path / "run", 1)
    disk.free()
    save(run, toy)
    run.close()
    assert_whole(disk.path / "run", 1, 3)
    again, other = open_run(disk.path / "run"), Many()
    again.load(other.state)
    assert all(torch.equal(a, b) for a, b in zip(other.values(), toy.values()))


@MODES
def test_the_third_failure_in_a_row_ends_the_run(disk: Disk, mode: str) -> None:
    run, toy = open_run(disk.path / "run", async_mode=mode), Many()
    save(run, toy)
    for _ in range(2):
        disk.fill(leave=100_000)
        save(run, toy)
        save(run, toy)
        disk.free()
        save(run, toy)  # from here on it is counted anew
    disk.fill(leave=100_000)
    save(run, toy)
    save(run, toy)
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        save(run, toy)
    assert error.value.exit_code == 3
    run.close_after_error()
    assert_whole(disk.path / "run", 1, 4, 7)


def test_no_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "MAX_FAILURES", 1)
    run, toy = save_steps(tmp_path, 1)[::-1]
    needed = sum(t.numel() * t.itemsize for t in toy.values())
    space = SimpleNamespace(f_bavail=needed // 4, f_frsize=4)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    monkeypatch.setattr(ShardWriter, "write_data", lambda *args: pytest.fail("it was written"))
    with pytest.raises(CheckpointError, match=r"a checkpoint needs .* has 0\.0 MiB free; nothing is written"):
        save(run, toy)
    assert_whole(tmp_path, 1)
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    space.f_bavail += space.f_bavail // 10
    save(run, toy)
    assert_whole(tmp_path, 1, 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """An uninterrupted run of 12 steps."""
    job = make_job(tmp_path_factory.mktemp("whole"), corpus, "--training.steps=12")
    train(job)
    return job


@pytest.mark.full
@pytest.mark.parametrize("mode", ["async", pytest.param("disabled", marks=pytest.mark.full)])
def test_a_run_on_a_disk_that_was_full_for_a_while(
    disk: Disk, whole: Job, corpus: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    original = Checkpointer.save

    def filling(self: Checkpointer, *args: Any) -> None:
        if args[0].step == 8:
            self.check_save()
            disk.fill(leave=400_000)  # enough for the tensors, not for their files
        if args[0].step == 12:
            disk.free()
        original(self, *args)

    monkeypatch.setattr(Checkpointer, "save", filling)
    job = make_job(disk.path, corpus, "--training.steps=12", f"--checkpoint.async_mode={mode}")
    assert train(job) == 0
    assert_whole(job.folder, 4, 12)
    # While the save fills the last bytes of the disk, rows of metrics.jsonl have no room either.
    rows = history(job)
    lost = [row for row in history(whole) if row not in rows]
    assert rows == [row for row in history(whole) if row not in lost]
    assert all(8 <= row[0] < 12 for row in lost)
    one, other = (commit.digests(commit.read_manifest(j.folder / "checkpoint/step-12")) for j in (job, whole))
    assert {**one, "job.toml": None} == {**other, "job.toml": None}


@pytest.mark.full
def test_a_full_disk_leaves_out_metrics_and_says_so(
    disk: Disk, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    original = Meter.report

    def filling(self: Meter, step: int, values: dict[str, Any]) -> dict[str, Any]:
        if step == 4:
            disk.fill(leave=0)
        if step == 36:
            disk.free()
        return original(self, step, values)

    monkeypatch.setattr(Meter, "report", filling)
    steps = list(range(1, 41))  # a file's last page has room for some
    options = ["--training.steps=40", "--lr_scheduler.total_steps=40", "--checkpoint.interval=40"]
    options += ["--generation.freq=5", '--generation.prompts=["a"]', "--generation.max_new_tokens=200"]
    options += ["--model.overrides.n_layers=1", "--training.seq_len=8", "--data.holdout_sequences=0"]
    job = make_job(disk.path, corpus, *options, "--metrics.sinks=[{name = 'tensorboard'}]")
    assert train(job) == 0
    written = [values["step"] for values in metrics_of(job)]
    assert written[:3] + written[-5:] == steps[:3] + steps[-5:]
    assert len(written) < 40, "the disk was not full"
    events = EventAccumulator(str(job.folder / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")][-5:] == steps[-5:]
    assert (job.folder / "samples.txt").read_text().count("--- step ") < 8
    log = capsys.readouterr().err.splitlines()
    assert sum("No space left on device" in line for line in log) == 3, log


@pytest.mark.full
def test_a_run_on_a_full_disk_ends_and_goes_on_later(
    disk: Disk, whole: Job, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Checkpointer.save

    def filling(self: Checkpointer, *args: Any) -> None:
        if args[0].step == 4:
            self.check_save()
            disk.fill(leave=400_000)
        original(self, *args)

    monkeypatch.setattr(Checkpointer, "save", filling)
    job = make_job(disk.path, corpus, "--training.steps=12", "--checkpoint.interval=2")
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(job)
    assert 8 <= metrics_of(job)[-1]["step"] <= 10  # those of 4, 6 and 8 failed
    assert_whole(job.folder, 2)
    monkeypatch.undo()
    disk.free()
    assert train(job) == 0
    assert history(job) == history(whole)


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("async", "end"),
        ("disabled", "stop"),
        pytest.param("disabled", "end", marks=pytest.mark.full),
        pytest.param("async", "stop", marks=pytest.mark.full),
    ],
)
def test_a_last_save_that_fails_is_no_success(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, mode: str, how: str
) -> None:
    """Exit code 0 promises that the last step is saved, 75 that a restart loses nothing."""
    job = make_job(tmp_path, corpus, "--training.steps=2", f"--checkpoint.async_mode={mode}")
    if how == "stop":
        job.folder.mkdir()
        (job.folder / "STOP").touch()
    break_at("manifest", monkeypatch, times=1)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(job)


def test_a_start_on_a_full_disk(disk: Disk) -> None:
    disk.fill(leave=0)
    with pytest.raises((ConfigError, CheckpointError), match="No space left on device"):
        open_run(disk.path / "run")
    disk.free()
    save_steps(disk.path / "run", 1)[1].close()
    assert_whole(disk.path / "run", 1)


# ---- errors at one place


def break_at(place: str, patch: pytest.MonkeyPatch, times: int) -> None:
    """Make the next `times` calls fail: on a full disk, or with EIO from a broken disk."""
    left, guard = [times], threading.Lock()

    def fail_if(here: bool, code: int = 28) -> None:
        with guard:
            if here and left[0]:
                left[0] -= 1
                raise OSError(code, os.strerror(code))

    def before(target: Any, name: str, check: Callable[..., None]) -> None:
        original = getattr(target, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            check(*args)
            return original(*args, **kwargs)

        patch.setattr(target, name, wrapped)

    if place == "a shard":
        patch.setattr(writer, "FILE_BYTES", 64)
        before(ShardWriter, "write_file", lambda self, name, *rest: fail_if(name.endswith("_2.distcp")))
    elif place == ".metadata":
        before(ShardWriter, "finish", lambda *args: fail_if(True))
    elif place in ("train.json", "manifest"):
        name = {"train.json": "train.json", "manifest": commit.MANIFEST}[place]
        before(commit, "write_file", lambda path, data: fail_if(path.name == name))
    elif place == "rename":
        before(os, "rename", lambda a, b: fail_if(os.path.basename(a).startswith(".partial")))
    elif place == "begin":
        before(commit, "begin", lambda *args: fail_if(True))
    elif place == "EIO at write":
        before(HashingFile, "write", lambda *args: fail_if(True, 5))
    elif place == "EIO at fsync":
        before(os, "fsync", lambda fd: fail_if(True, 5))
    else:
        raise AssertionError(place)


PLACES = ["begin", "a shard", ".metadata", "train.json", "manifest", "rename", "EIO at write", "EIO at fsync"]


@MODES
@pytest.mark.parametrize("place", PLACES)
def test_an_error_at_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, mode: str
) -> None:
    toy, run = save_steps(tmp_path, 2, async_mode=mode)
    break_at(place, monkeypatch, times=1)
    with listening(caplog):
        save(run, toy)
    error = "Input/output error" if "EIO" in place else "No space left on device"
    assert re.search(rf"{re.escape(str(error))}.* \(failure 1 of 3 in a row\)", caplog.text)
    assert_whole(tmp_path, 1, 2)
    save(run, toy)
    run.close()
    assert_whole(tmp_path, 1, 2, 4)
    again = open_run(tmp_path, async_mode=mode)
    break_at(place, monkeypatch, times=1 << 30)
    for _ in range(2):
        save(again, toy)
    with pytest.raises(CheckpointError, match=error):
        save(again, toy)
    assert_whole(tmp_path, 1, 2, 4)


write = HashingFile.write


def slow(self: HashingFile, data: bytes | memoryview) -> int:
    """Write slowly. A checkpoint takes a few hundred of these calls."""
    time.sleep(0.001)
    return write(self, data)


def save_on_rank(folder: Path, broken: int) -> list[str]:
    """Save five times. On one rank, the shard of the second save fails, and all writing is slow."""
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "MAX_FAILURES", 1)
        run, toy = open_run(folder), Toy(width=16)
        seen = []
        if rank == broken:
            patch.setattr(HashingFile, "write", slow)
        for step in range(1, 6):
            toy.step()
            with pytest.MonkeyPatch.context() as fault:
                if rank == broken and step == 2:
                    break_at("EIO at write", fault, times=1)
                run.save(toy.state)
                try:
                    run.check_save()
                    seen.append("")
                except CheckpointError as e:
                    seen.append(str(e))
        run.close()
    return seen


@pytest.mark.full
@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_of_one_rank_is_that_of_all(
    tmp_path: Path, run_on: Callable[..., list[Any]], broken: int
) -> None:
    one, other = run_on(2, save_on_rank, tmp_path, broken)
    assert one == other
    assert [bool(error) for error in one] == [False, True, False, False, False]
    assert f"rank {broken}: OSError: [Errno 5]" in one[1]
    assert_whole(tmp_path, 1, 3, 4, 5)


@pytest.mark.parametrize("mode", ["async", full("disabled")])
def test_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The next save waits, and so does each synchronous save. The disk writes nothing before the first save
    call has returned."""
    ready, there = threading.Event(), []
    ready.set()

    def waiting(self: HashingFile, data: bytes | memoryview) -> int:
        assert ready.wait(300)
        return slow(self, data)

    def train_fast() -> None:
        run, toy = open_run(tmp_path, async_mode=mode), Toy()
        if mode == "async":
            ready.clear()
        for _ in range(4):
            toy.step()
            run.save(toy.state)
            there.append([step for step, _ in commit.list_committed(tmp_path / "checkpoint")])
            ready.set()
        run.close()

    monkeypatch.setattr(HashingFile, "write", waiting)
    thread = threading.Thread(target=train_fast, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive(), "saves wait for each other forever"
    assert_whole(tmp_path, 1, 2, 3, 4)
    assert there[0] == ([1] if mode == "disabled" else [])
    assert all({*range(1, n + 1)} <= {*steps} for n, steps in enumerate(there)), there


# ---- a disk that cannot be used


def test_a_read_only_disk_is_refused_at_the_start(disk: Disk, corpus: Path) -> None:
    job = make_job(disk.path, corpus, "--training.steps=2")
    train(job)
    arguments = ["train", str(disk.path / "job.toml"), f"--data.cache_dir={corpus / 'cache'}"]
    disk.remount("ro")
    for folder in (job.folder, disk.path / "new"):
        with pytest.raises(ConfigError, match=r"cannot be written to: .*Read-only file system") as error:
            open_run(folder)
        assert error.value.exit_code == 2
        assert cli.run([*arguments, f"--job.dump_folder={folder}"]) == 2
    disk.remount("rw")
    assert_whole(job.folder, 2)


def test_a_read_only_checkpoint_folder(disk: Disk, tmp_path: Path) -> None:
    """The checkpoint folder may be a link to another disk. Checked at the start and during the run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").symlink_to(disk.path)
    toy, run = save_steps(tmp_path / "run", 1)
    disk.remount("ro")
    with pytest.raises(ConfigError, match=r"checkpoint cannot be written to: .*Read-only file system"):
        open_run(tmp_path / "run")
    save(run, toy)
    disk.remount("rw")
    save(run, toy)
    run.close()
    assert_whole(tmp_path / "run", 1, 3)


# ---- a full disk, before there is a run: one line, exit code 2, and the next start goes on


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The single line of an error, without the log and the progress before it."""
    capsys.readouterr()
    assert cli.run([str(word) for word in argv]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err, err
    lines = [line for line in err.splitlines() if line.startswith("titanlite: ") and "% of" not in line]
    assert len(lines) == 1, err
    return lines[0]


def fill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, disk: Disk) -> None:
    """Fill the disk when a function is called."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        disk.fill(leave=0)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
def test_a_full_disk_while_a_cache_is_made(
    disk: Disk,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    packing: str,
) -> None:
    where = [f"--job.dump_folder={tmp_path / 'run'}", f"--data.cache_dir={disk.path / 'cache'}"]
    start = ["train", write_toml(tmp_path, corpus), *where, "--training.steps=1", f"--data.packing={packing}"]
    if packing == "best_fit":
        fill_at(monkeypatch, packing_index, "_packed_windows", disk)
    else:
        fill_at(monkeypatch, tokenize_files, "write_shard", disk)
    line = refused(capsys, *start)
    assert f"{disk.path}/cache/" in line
    assert "No space left on device; make room there" in line
    monkeypatch.undo()
    disk.free()
    assert cli.run([str(word) for word in start]) == 0


def test_prepare_onto_a_full_disk(
    disk: Disk, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = disk.path / "out"
    start = ["prepare", corpus / "a.jsonl", f"--output={output}", "--tokenizer.name=bytes"]
    start += ["--num_processes=1", "--filters.0.name=exact_duplicates"]
    for stage in ("scan", "resolve", "encode", "assemble"):
        with monkeypatch.context() as patch:
            fill_at(patch, stages.JobState, stage, disk)
            line = refused(capsys, *start)
        assert f"{disk.path}/" in line, stage
        assert "No space left on device" in line or "not all could be written" in line, stage
        disk.free()
    assert cli.run([str(word) for word in start]) == 0
    assert cli.run(["data", "verify", str(output)]) == 0


def test_few_inodes_are_one_line(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run needs some inodes for its folder, metrics and checkpoints."""
    path = tmp_path / "small"
    path.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "nr_inodes=8", "tmpfs", str(path)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"needs root and Linux: {e}")
    try:
        where = [f"--job.dump_folder={path / 'run'}", f"--data.cache_dir={corpus / 'cache'}"]
        start = [
            write_toml(tmp_path, corpus),
            *where,
            "--training.steps=1",
            "--metrics.sinks=[{name = 'tensorboard'}]",
        ]
        capsys.readouterr()
        assert cli.run(["train", *map(str, start)]) in (2, 3)
        assert "Traceback" not in capsys.readouterr().err
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_run_folder_that_is_moved_is_made_again(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metrics since the move are kept until the next save makes the folder, and locks it again."""
    job = make_job(tmp_path, corpus)
    report_saves = Run.report_saves

    def moving(self: Run) -> None:
        report_saves(self)
        if self.state.step == 2:
            job.folder.rename(tmp_path / "elsewhere")
        if self.state.step == 6:
            self.checkpoints.saver.wait()
            locked.append((job.folder / "LOCK").read_text().startswith(f"process {os.getpid()} "))

    locked = list[bool]()
    monkeypatch.setattr(Run, "report_saves", moving)
    assert train(job) == 0
    assert locked == [True]
    said = [line for line in capsys.readouterr().err.splitlines() if "made again for step 4" in line]
    assert len(said) == 1
    assert [step for step, _ in commit.list_committed(job.folder / "checkpoint")] == [4, 8]
    assert [line["step"] for line in metrics_of(job)] == [5, 6, 7, 8]
    longer = make_job(tmp_path, corpus, "--training.steps=9")
    assert train(longer) == 0
    assert [line["step"] for line in metrics_of(longer)] == [5, 6, 7, 8, 9]
