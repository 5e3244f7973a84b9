"""Checkpoints are complete or absent, a run resumes from the newest good one, and a checkpoint that does not
fit is not loaded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import IDENTITY, Toy, names, open_run, save_steps
from tests.support.tiers import full
from titanlite.checkpoint import commit, lock, resume, saver
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import write_file
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.section import Checkpoint
from titanlite.checkpoint.state import model_tensors, optimizer_tensors
from titanlite.checkpoint.writer import ShardWriter
from titanlite.config.component import ConfigError
from titanlite.log import logger, set_up_logging


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_round_trip(tmp_path: Path, mode: str) -> None:
    toy, run = save_steps(tmp_path, 3, async_mode=mode)
    run.close()
    other = Toy(seed=1)
    open_run(tmp_path).load(other.state)
    assert all(torch.equal(a, b) for a, b in zip(other.values(), toy.values()))
    assert other.state.as_json() == toy.state.as_json()
    assert (other.state.step, other.state.num_sequences, int(other.state.tokens)) == (3, 24, 240)
    step = tmp_path / "checkpoint/step-3"
    assert (step / "job.toml").read_text() == "[job]\n"
    assert json.loads((step / "train.json").read_text())["identity"] == IDENTITY
    assert set(json.loads((step / "manifest.json").read_text())["files"]) == {
        p.name for p in step.iterdir() if p.name != "manifest.json"
    }


def test_training_continues_at_once_after_an_asynchronous_save(tmp_path: Path) -> None:
    run, toy = open_run(tmp_path), Toy()
    toy.step()
    saved = toy.values()
    run.save(toy.state)
    for _ in range(3):
        toy.step()
    run.close()
    other = Toy(seed=1)
    open_run(tmp_path).load(other.state)
    assert all(torch.equal(a, b) for a, b in zip(other.values(), saved))
    assert other.state.step == 1


def test_a_changed_rate_is_not_overwritten_by_a_resume(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)[1].close()
    other = Toy()
    for group in other.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.5, 0.25
    open_run(tmp_path).load(other.state)
    assert [(g["lr"], g["weight_decay"]) for g in other.optimizer.param_groups] == [(0.5, 0.25)]


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, keep_latest_k=2)
    assert names(tmp_path) == ["step-4", "step-5"]


def test_retention_does_not_count_what_is_not_committed(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, keep_latest_k=2)
    commit.partial_path(tmp_path / "checkpoint", 9).mkdir()
    (tmp_path / "checkpoint/quarantined-step-8-0").mkdir()
    commit.retain(tmp_path / "checkpoint", 2)
    assert {"step-1", "step-2"} <= set(names(tmp_path))


def test_what_a_killed_run_left_is_cleaned_and_never_resumed_from(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    folder = tmp_path / "checkpoint"
    (folder / "step-2").rename(folder / ".partial-step-3")
    (folder / ".trash-step-0").mkdir()
    run = open_run(tmp_path)
    assert run.candidate is not None
    assert run.candidate.step == 1
    assert names(tmp_path) == ["step-1"]


def damage_missing(step: Path) -> None:
    next(step.glob("*.distcp")).unlink()


def damage_short(step: Path) -> None:
    file = next(step.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def damage_manifest(step: Path) -> None:
    (step / "manifest.json").write_text("{")


@pytest.mark.parametrize("damage", [damage_missing, damage_short, damage_manifest])
def test_a_damaged_checkpoint_is_quarantined_and_the_one_before_used(tmp_path: Path, damage) -> None:
    save_steps(tmp_path, 2)
    damage(tmp_path / "checkpoint/step-2")
    run, toy = open_run(tmp_path), Toy()
    assert run.candidate is not None
    assert run.candidate.step == 1
    assert names(tmp_path) == ["step-1", "step-2"]  # step 1 might be damaged, too
    run.load(toy.state)
    assert names(tmp_path) == ["quarantined-step-2-0", "step-1"]


def test_only_damaged_ones_end_the_run_instead_of_starting_afresh(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    damage_short(tmp_path / "checkpoint/step-1")
    with pytest.raises(CheckpointError, match="no usable checkpoint") as error:
        open_run(tmp_path)
    assert error.value.exit_code == 3
    with pytest.raises(CheckpointError, match="no usable checkpoint"):  # the next start, too
        open_run(tmp_path)


def test_another_run_identity_is_refused_by_name_unless_allowed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    changed = {**IDENTITY, "model": {"dim": 5}}
    with pytest.raises(
        ConfigError, match=r"model\.dim was 4, is 5\. .*; to change it within this run, name it in"
    ):
        open_run(tmp_path, changed)
    run = open_run(tmp_path, changed, allow_changed=["model.dim"])
    assert run.candidate is not None


def test_a_run_knows_what_it_allows_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run may also name a key that only its checkpoint has, and is told of others."""
    known = r"the run identity has no key '{}'.* \(known: data\.seed, data\.sources, model\.dim\)$"
    for name in ("foo", "model.dims", "dim", "model.", "names"):
        for restart in (False, True):
            with pytest.raises(ConfigError, match=known.format(name)) as error:
                open_run(tmp_path, allow_changed=["data", name], restart=restart)
            assert error.value.key == "checkpoint.allow_changed"
    assert [p.name for p in tmp_path.iterdir()] == ["LOCK"]
    save_steps(tmp_path, 1, allow_changed=["model", "data.seed", "data.sources"])[1].close()
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    assert open_run(tmp_path, allow_changed=["model.gone", "model.dim"]).candidate is not None
    (warning,) = warnings
    assert warning.startswith("checkpoint.allow_changed: the run identity has no key 'model.gone'")
    without = open_run(tmp_path, {**IDENTITY, "model": {}}, allow_changed=["model.dim"])
    assert without.candidate is not None
    assert warnings[1:] == ["changed, as checkpoint.allow_changed allows: model.dim was 4, is absent"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(4, 4)}, "model.bias is unexpected"),
        (
            {"weight": torch.zeros(4, 4), "bias": torch.zeros(4), "more": torch.zeros(1)},
            "model.more is missing",
        ),
        ({"weight": torch.zeros(4, 5), "bias": torch.zeros(4)}, r"shape \(4, 4\), the model's is \(4, 5\)"),
        (
            {"weight": torch.zeros(4, 4).double(), "bias": torch.zeros(4)},
            "float32, the model's is torch.float64",
        ),
    ],
)
def test_loading_is_strict(tmp_path: Path, tensors: dict, message: str) -> None:
    save_steps(tmp_path, 1)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(tmp_path / "checkpoint/step-1", {"model": tensors})
    load_tensors(tmp_path / "checkpoint/step-1", {"model": model_tensors(Toy().net)})


def test_a_failed_save_is_an_error_soon_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, toy = open_run(tmp_path), Toy()
    toy.step()

    def full(*args: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "commit", full)
    run.save(toy.state)
    until = time.monotonic() + 300
    while not run.failed:  # as the loop does after each step
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="No space left"):
        run.close()
    assert commit.list_committed(tmp_path / "checkpoint") == []


def test_a_save_in_flight_becomes_whole_after_an_error_elsewhere(tmp_path: Path) -> None:
    run, toy = open_run(tmp_path), Toy()
    toy.step()
    run.save(toy.state)
    run.close_after_error()
    assert [step for step, _ in commit.list_committed(tmp_path / "checkpoint")] == [1]


def look_often(monkeypatch: pytest.MonkeyPatch, size: Callable[[Path], int]) -> None:
    """Make the waits short, and let `size` give the size of the save in flight."""
    monkeypatch.setattr(saver, "POLL_S", 0.001)
    monkeypatch.setattr(saver, "STALL_S", 0.005)
    monkeypatch.setattr(commit, "partial_size", size)


def test_a_slow_save_is_waited_for_after_an_error_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The save writes nothing for much longer than several ranks would wait."""
    set_up_logging(rank=1, verbose=False)  # every rank that fails logs it
    looks, may_commit, original = [], threading.Event(), commit.commit

    def commit_slowly(*args: Any) -> Path:
        assert may_commit.wait(90)
        return original(*args)

    def size(folder: Path) -> int:
        looks.append(folder)
        if len(looks) == 50:
            may_commit.set()
        return 3 << 20

    look_often(monkeypatch, size)
    monkeypatch.setattr(commit, "commit", commit_slowly)
    run, toy = open_run(tmp_path), Toy()
    toy.step()
    run.save(toy.state)
    run.close_after_error(ValueError("the cause\nand more"))
    may_commit.set()
    assert names(tmp_path) == ["step-1"]
    said = capsys.readouterr().err
    line = "training has ended: ValueError: the cause; waiting for the save in flight (3.0 MiB so far)\n"
    assert said.count(line) >= 50
    assert "lost" not in said


@pytest.mark.parametrize("grows", [True, False])
def test_of_several_ranks_a_save_is_waited_for_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], grows: bool
) -> None:
    set_up_logging(rank=0, verbose=True)
    save, looks = Future[None](), []

    def size(folder: Path) -> int:
        looks.append(folder)
        if len(looks) == 100:
            save.set_result(None)
        return len(looks) // 4 if grows else 7

    look_often(monkeypatch, size)
    run = open_run(tmp_path)
    run.saver.task, run.saver.ranks.size = save, 2
    run.close_after_error()
    lost = "the checkpoint that was being written is lost: TimeoutError: no file has grown for"
    assert (lost in capsys.readouterr().err) == (not grows)
    assert len(looks) == (100 if grows else 6)


def test_what_is_being_written_is_measured(tmp_path: Path) -> None:
    assert commit.partial_size(tmp_path / "none") == 0
    partial = commit.begin(tmp_path, 3)
    write_file(partial / "a", b"123")
    write_file(partial / "b", b"4567")
    assert commit.partial_size(tmp_path) == 7


def test_bytes_of_an_unfinished_upload_count_as_growth(tmp_path: Path) -> None:
    """A bucket does not show an object before all of its parts were sent."""
    writer = ShardWriter(tmp_path)
    with writer.fs.create_stream(tmp_path / "a", "wb") as file:
        file.write(b"123")
        assert writer.fs.num_bytes == 3


def test_a_refused_run_touches_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    commit.partial_path(tmp_path / "checkpoint", 3).mkdir()  # its owner may be alive, and writing this
    damage_short(tmp_path / "checkpoint/step-2")
    before = names(tmp_path)
    with pytest.raises(ConfigError):
        open_run(tmp_path, {**IDENTITY, "model": {"dim": 5}})
    assert names(tmp_path) == before


def test_the_identity_of_a_run_without_checkpoints_counts_too(tmp_path: Path) -> None:
    (tmp_path / "run_identity.json").write_text(json.dumps(IDENTITY))
    assert open_run(tmp_path).candidate is None
    with pytest.raises(ConfigError, match=r"model\.dim was 4, is 5"):
        open_run(tmp_path, {**IDENTITY, "model": {"dim": 5}}, enable=False)


def test_a_run_with_checkpoints_is_not_started_over_without(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    with pytest.raises(ConfigError, match="holds a run"):
        open_run(tmp_path, enable=False)


def test_a_newer_format_is_not_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    file = tmp_path / "checkpoint/step-2/manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["sha256"]
    file.write_text(commit.manifest_text({**manifest, "format": commit.FORMAT + 1}))
    with pytest.raises(
        CheckpointError,
        match=f"has checkpoint format {commit.FORMAT + 1}, this version reads {commit.FORMAT}",
    ):
        open_run(tmp_path)
    assert names(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("folder", ["", ".", "/somewhere", "../other"])
def test_a_folder_outside_the_run_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="not a folder below"):
        Checkpoint(folder=folder)


def test_keeping_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep 2 or more"):
        Checkpoint(keep_latest_k=1)


# ---- a folder that the ranks do not share


def start_on_rank(folder: Path, elsewhere: Path, kind: str) -> tuple[str, str]:
    """Open the run. On rank 1 the folder is not that of rank 0."""

    def into_another(path: Path, data: bytes) -> Any:
        return write_file(elsewhere / path.name, data)

    def into_none(path: Path, data: bytes) -> Any:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            if kind == "another":
                patch.setattr(resume, "write_file", into_another)
            elif kind == "none":
                patch.setattr(resume, "write_file", into_none)
            elif kind == "another checkpoint":
                patch.setattr(commit, "read_manifest", lambda path: {"sha256": "0" * 64})
        try:
            open_run(folder).close()
        except ConfigError as e:
            return type(e).__name__, str(e)
    return "", ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("another", "rank 0 does not see files that rank 1 writes into {}; the run folder must be"),
        ("none", "rank 1 cannot write into {}: [Errno 2] No such file or directory"),
        ("another checkpoint", "rank 1 does not see the {}/step-2 that rank 0 sees"),
    ],
)
def test_a_folder_that_ranks_do_not_share_is_refused_on_all(
    tmp_path: Path, run_on: Callable[..., list[Any]], kind: str, message: str
) -> None:
    save_steps(tmp_path / "run", 2)[1].close()
    (tmp_path / "elsewhere").mkdir()
    one, other = run_on(2, start_on_rank, tmp_path / "run", tmp_path / "elsewhere", kind)
    assert one == other
    assert one[0] == "ConfigError"
    assert one[1].startswith(message.format(tmp_path / "run/checkpoint"))
    assert run_on(2, start_on_rank, tmp_path / "run", tmp_path, "the same") == [("", ""), ("", "")]
    assert names(tmp_path / "run") == ["step-1", "step-2"]


# ---- two runs in one folder


HOLDER = """
import os, sys, time
from pathlib import Path
from titanlite.checkpoint import lock
lock.WAIT_S = 0
held = lock.FolderLock(Path(sys.argv[1]))
held.take()
held.write_owner()
child = os.fork() if "worker" in sys.argv else 0
if "worker" in sys.argv and child == 0:
    time.sleep(600)  # like a loader's worker: it has all files of its parent
if "visitor" in sys.argv and os.fork() == 0:
    held.close()
    os._exit(0)
print(child, flush=True)
time.sleep(600)
"""


Hold = Callable[..., tuple[subprocess.Popen[str], int]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts processes that hold the lock of a run folder, and ends them and their children."""
    started: list[int] = []

    def start(folder: Path, *kind: str) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-c", HOLDER, str(folder), *kind]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process.pid)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        started.extend([child] if child else [])
        return process, child

    yield start
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize("kind", ["", full("worker"), full("visitor")])
def test_a_second_run_is_refused_while_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold, kind: str
) -> None:
    save_steps(tmp_path, 2)[1].close()
    (tmp_path / "checkpoint/.partial-step-3").mkdir()  # what the first run is writing
    process, _ = hold(tmp_path, kind)
    monkeypatch.setattr(lock, "WAIT_S", 0.3)
    holder = f"process {process.pid} on {socket.gethostname()}"
    with pytest.raises(ConfigError, match=f"{tmp_path} is in use by {holder}") as error:
        open_run(tmp_path)
    assert error.value.exit_code == 2
    assert names(tmp_path) == [".partial-step-3", "step-1", "step-2"]


@pytest.mark.parametrize("kind", [full(""), "worker"])
@pytest.mark.parametrize("number", [full(signal.SIGTERM), signal.SIGKILL])
def test_a_second_run_starts_when_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold, kind: str, number: int
) -> None:
    monkeypatch.setattr(lock, "WAIT_S", 200.0)
    save_steps(tmp_path, 1)[1].close()
    process, child = hold(tmp_path, kind)
    threading.Timer(0.5, os.kill, (process.pid, number)).start()
    began = time.monotonic()
    run = open_run(tmp_path)
    assert 0.4 < time.monotonic() - began < lock.WAIT_S
    assert process.wait() == -number
    if child:
        os.kill(child, 0)  # it lives, and has the file
        assert any(os.readlink(f) == str(tmp_path / "LOCK") for f in Path(f"/proc/{child}/fd").iterdir())
    assert run.candidate is not None
    assert str(os.getpid()) in (tmp_path / "LOCK").read_text()
    run.close()


def gone(folder: Path) -> None:
    (folder / "LOCK").unlink()
    folder.rmdir()


def elsewhere(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


@pytest.mark.parametrize("leave", [gone, elsewhere])
@pytest.mark.parametrize("taken", [False, True])
def test_a_folder_that_is_lost_is_locked_again_unless_another_run_has_it(
    tmp_path: Path, hold: Hold, leave: Callable[[Path], None], taken: bool
) -> None:
    folder = tmp_path / "run"
    held = lock.FolderLock(folder)
    held.take()
    held.write_owner()
    held.renew()  # not lost
    leave(folder)
    if taken:
        process, _ = hold(folder)
        with pytest.raises(ConfigError, match=f"is in use by process {process.pid}"):
            held.renew()
    else:
        held.renew()
        assert str(os.getpid()) in (folder / "LOCK").read_text()
    held.close()


def test_the_folder_is_free_after_a_run_however_it_ended(tmp_path: Path, hold: Hold) -> None:
    save_steps(tmp_path, 1)[1].close()
    open_run(tmp_path).close_after_error()
    with pytest.raises(ConfigError, match="holds a run that differs"):
        open_run(tmp_path, {"model": {"dim": 5}})
    process, _ = hold(tmp_path)  # another process gets it at once
    assert process.poll() is None


def test_optimizer_state_that_is_no_tensor_is_refused() -> None:
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state[net.weight]["count"] = 0
    with pytest.raises(ConfigError, match="optimizer state 'count' of weight is of type int, which") as error:
        optimizer_tensors(net, optimizer)
    assert error.value.key == "optimizer.name"
    optimizer.state[net.weight]["count"] = torch.tensor(0)
    assert list(optimizer_tensors(net, optimizer)) == ["weight.count"]
