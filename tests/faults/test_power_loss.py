"""Power loss at any moment of a run's work on its checkpoints: the file operations are recorded, and the
states in which a power loss may leave the disk are made from the recording.

Each such state gets a cheap check: committed checkpoints are complete to the last byte, so that a power loss
never leads to a quarantine, and saves that were waited for exist. In addition, the program is started from
one state of each set of names, and the run continues."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoints import Toy, flip_a_shard, open_run, save_steps, sharded_toy
from tests.support.file_operations import Recording, recorded
from tests.support.power_loss import check_all, crashes, described, without_syncs
from tests.support.tiers import full
from titanlite.checkpoint import commit, last_commit
from titanlite.checkpoint.digest import digest_file
from titanlite.checkpoint.state import read_train
from titanlite.files import sync
from titanlite.log import logger
from titanlite.storage import LocalDisk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="holds files by O_PATH")
LAST = 4  # last step of the recorded runs
UNREAD = ("LOCK",)  # files whose content no program reads
OWN = {"LOCK", "last_commit.json", "checkpoint"}
Values = dict[int, list[torch.Tensor]]  # weights and moments by step


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No log and no wait for the disk, because these tests start the program hundreds of times."""
    monkeypatch.setattr(logger, "disabled", True)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def values() -> Values:
    """The values of a run without a power loss."""
    toy, after = Toy(), dict[int, list[torch.Tensor]]()
    for step in range(1, LAST + 3):
        toy.step()
        after[step] = toy.values()
    return after


def train(run_folder: Path, to_step: int, note: Callable[[Any], None], **config: Any) -> None:
    """Start the program, train to `to_step` and save every step. `note` is called for each save that was
    waited for."""
    run, toy = open_run(run_folder, **config), Toy()
    run.load(toy.state)
    while toy.state.step < to_step:
        toy.step()
        run.save(toy.state)
        run.check_save()
        note(toy.state.step)
    run.close()


def committed(folder: Path, damaged: tuple[int, ...] = ()) -> list[int]:
    """Steps of the committed checkpoints in a folder. Each must be complete and undamaged, except the
    `damaged` ones."""
    there = [(step, path) for step, path in commit.list_committed(folder) if step not in damaged]
    for step, path in there:
        assert (fault := commit.fault(path, step)) is None, f"step-{step}: {fault}"
        for name, digest in commit.digests(commit.read_manifest(path)).items():
            assert digest_file(path / name) == digest, f"step-{step}: {name} is not what was written"
    return [step for step, _ in there]


def recorded_step(run: Path) -> int | None:
    """The step in last_commit.json, which must be readable."""
    last = last_commit.read(run)
    return last.step if last else None


def leftovers(run: Path) -> set[str]:
    """Names of all files and folders except committed checkpoints and the files that a run always has."""
    names = {p.name for p in (run / "checkpoint").iterdir()} | {p.name for p in run.iterdir()}
    return {name for name in names - OWN if not name.startswith("step-")}


def resumes(run: Path, newest: int, values: Values, **config: Any) -> None:
    """A start loads the state of step `newest` bit for bit, and takes the next step."""
    opened, toy = open_run(run, **config), Toy()
    opened.load(toy.state)
    assert toy.state.step == newest
    if newest:
        assert all(map(torch.equal, toy.values(), values[newest]))
    toy.step()
    assert all(map(torch.equal, toy.values(), values[newest + 1]))
    opened.save(toy.state)
    opened.close()
    assert newest + 1 in committed(run / "checkpoint")


# ---- saves and retention


def record_saves(root: Path, last: int = LAST, **config: Any) -> Recording:
    """Record a new run that keeps its newest two checkpoints."""
    root.mkdir()
    with recorded(root) as recording:
        train(root / "run", last, recording.mark, keep_latest_k=2, **config)
    assert recording.coarse == 0
    return recording


def saved(place: Path, step: int) -> list[int]:
    """The committed steps. `step`, which was waited for, must be among them, and so must the step in
    last_commit.json."""
    there = committed(place / "run/checkpoint")
    assert max(there, default=0) >= step, f"step {step} was saved, {there} are there"
    assert recorded_step(place / "run") in (None, *there)
    return there


@pytest.mark.parametrize(
    ("mode", "samples"),
    [
        ("disabled", 4),
        pytest.param("disabled", 100, marks=pytest.mark.full),
        pytest.param("async", 100, marks=pytest.mark.full),
    ],
)
def test_saves_and_retention(tmp_path: Path, values: Values, mode: str, samples: int) -> None:
    recording = record_saves(tmp_path / "root", async_mode=mode)

    def start(place: Path, there: list[int]) -> None:
        resumes(place / "run", max(there, default=0), values)
        assert leftovers(place / "run") == set()

    states = crashes(recording, samples=samples, settled=UNREAD, start=0)
    count, starts = check_all(states, tmp_path, saved, start)
    assert (count > 400, starts > 20) == (True, True), f"{count} states, {starts} of them started from"


def test_an_asynchronous_save_does_the_same(tmp_path: Path) -> None:
    both = [record_saves(tmp_path / mode, async_mode=mode) for mode in ("disabled", "async")]
    assert described(both[0]) == described(both[1])


def test_a_folder_in_folders_is_there_after_a_save(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with recorded(tmp_path / "root") as recording:
        train(tmp_path / "root/a/b", 1, recording.mark, folder="c/d")
    for crash in crashes(recording, settled=UNREAD, start=0):
        assert crash.mark == 0 or any(path.startswith("a/b/c/d/step-1/") for path in crash.tree)


# ---- a rewind

GONE_BACK = {"load_step": 2}


def branch_of(run: Path, step: int) -> int | None:
    """The load_step of the start that saved this step."""
    return read_train(run / f"checkpoint/step-{step}").get("branch")


@pytest.mark.full
def test_a_rewind(tmp_path: Path, values: Values) -> None:
    """No checkpoint that is archived is lost, nor its keep file, and the branch resumes from its newest
    step."""
    root = tmp_path / "root"
    save_steps(root / "run", LAST)[1].close()
    (root / "run/checkpoint/step-4.keep").touch()
    with recorded(root) as recording:
        train(root / "run", 3, recording.mark, **GONE_BACK)
    assert recording.coarse == 0

    def look(place: Path, step: int) -> list[Any]:
        run = place / "run"
        there = committed(run / "checkpoint")
        aside = [committed(path) for path in sorted((run / "checkpoint").glob("archived-*"))]
        ours = [s for s in there if branch_of(run, s) == 2]
        assert set(there) - set(ours) | {s for steps in aside for s in steps} == {1, 2, 3, 4}
        assert len(list(run.rglob("step-4.keep"))) == 1
        assert step in (2, *ours)
        assert recorded_step(run) in there
        return [there, ours]

    def start(place: Path, outcomes: list[Any]) -> None:
        there, ours = outcomes
        resumes(place / "run", max(ours) if ours == there[-1:] else 2, values, **GONE_BACK)
        assert all(name.startswith("archived-") for name in leftovers(place / "run"))
        look(place, 3)

    count, starts = check_all(crashes(recording, settled=UNREAD, start=2), tmp_path, look, start)
    assert (count > 40, starts > 10) == (True, True), f"{count} states, {starts} of them started from"


# ---- a start: cleaning up, quarantine, a restart


@pytest.mark.full
def test_a_start_that_cleans_up_and_quarantines_damaged_checkpoints(tmp_path: Path, values: Values) -> None:
    """Damaged checkpoints are never lost, and no undamaged one is quarantined."""
    root, there = tmp_path / "root", tmp_path / "root/run/checkpoint"
    save_steps(root / "run", LAST)[1].close()
    for name in (".partial-step-5-0a", ".trash-step-0-0b"):
        shutil.copytree(there / "step-1", there / name)
    flip_a_shard(there / "step-3")
    (there / "step-4/train.json").write_text("{}")
    (there / "step-4.keep").touch()
    with recorded(root) as recording:
        train(root / "run", 3, recording.mark)
    assert recording.coarse == 0

    def look(place: Path, step: int) -> list[Any]:
        run = place / "run"
        names = {path.name for path in (run / "checkpoint").glob("*step-*") if path.is_dir()}
        new = (run / "checkpoint/step-3").exists() and "quarantined-step-3-0" in names
        good = committed(run / "checkpoint", damaged=(4,) if new else (3, 4))
        assert good == [1, 2, 3] if new else [1, 2]
        assert step in (2, *good)
        assert {"step-3", "quarantined-step-3-0"} & names
        assert {"step-4", "quarantined-step-4-0"} & names
        assert not {name for name in names if name.startswith("quarantined-")} - {
            "quarantined-step-3-0",
            "quarantined-step-4-0",
        }
        assert [*run.rglob("*step-4*.keep")]
        recorded_step(run)
        return [good[-1]]

    def start(place: Path, outcomes: list[int]) -> None:
        resumes(place / "run", outcomes[0], values)
        assert {n for n in leftovers(place / "run") if not n.endswith(".keep")} == {
            "quarantined-step-3-0", "quarantined-step-4-0"
        }  # fmt: skip

    count, starts = check_all(crashes(recording, settled=UNREAD, start=2), tmp_path, look, start)
    assert (count > 40, starts > 10) == (True, True), f"{count} states, {starts} of them started from"


@pytest.mark.full
def test_a_restart(tmp_path: Path, values: Values) -> None:
    """A new run in the folder of an earlier run: the earlier checkpoints are archived once, and none is
    lost."""
    root = tmp_path / "root"
    save_steps(root / "run", 2)[1].close()
    with recorded(root) as recording:
        train(root / "run", 1, recording.mark, restart=True)

    def look(place: Path, step: int) -> list[Any]:
        run = place / "run"
        there = committed(run / "checkpoint")
        aside = [committed(path) for path in sorted((run / "checkpoint").glob("archived-*"))]
        record = last_commit.read(run)
        begun = record is not None and record.restarted
        new = there if begun else []
        assert {s for steps in aside for s in steps} | (set() if begun else set(there)) == {1, 2}
        assert step in (0, *new)
        return [max(new, default=0)]

    def start(place: Path, outcomes: list[int]) -> None:
        resumes(place / "run", outcomes[0], values, restart=True)
        assert all(name.startswith("archived-") for name in leftovers(place / "run"))

    count, starts = check_all(crashes(recording, settled=UNREAD, start=0), tmp_path, look, start)
    assert (count > 30, starts > 8) == (True, True), f"{count} states, {starts} of them started from"


# ---- controls: what is found when a sync is missing, or comes late


def assert_found(recording: Recording, folder: Path, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_all(crashes(recording, settled=UNREAD, start=0), folder, saved)


@pytest.mark.parametrize(
    ("unsynced", "message"),
    [
        (r"\.partial-.*/__0_0\.distcp", "__0_0.distcp has 0 bytes|__0_0.distcp is not what was written"),
        full(r"\.partial-.*/\.metadata.*", ".metadata"),
        full(r"\.partial-.*/train\.json", "train.json"),
        (r"\.partial-.*/manifest\.json", "its manifest cannot be trusted"),
        (r"run/checkpoint/\.partial-[^/]*", "is missing"),
        full(r"run/checkpoint", "recorded_step"),
        (r"run", "recorded_step"),
        (r"", "was saved, .* are there"),
        full(r"run/\.partial-last_commit\.json.*", "last_commit.json cannot be read"),
    ],
)
def test_control_a_missing_sync_is_found(tmp_path: Path, unsynced: str, message: str) -> None:
    recording = record_saves(tmp_path / "root", last=1)
    without = without_syncs(recording, lambda path: bool(re.search(rf"(^|/){unsynced}$", path)))
    assert len(without.operations) < len(recording.operations)
    error = commit.CheckpointError if "last_commit" in unsynced else AssertionError
    with pytest.raises(error, match=message):
        check_all(crashes(without, settled=UNREAD, start=0), tmp_path, saved)


def test_control_a_rename_before_the_sync_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(disk: LocalDisk, path: Path) -> None:
        if not path.name.startswith(".partial-"):
            for _, step in commit.list_committed(path):
                sync(step)
            sync(path)

    monkeypatch.setattr(LocalDisk, "sync", late)
    assert_found(record_saves(tmp_path / "root", last=1), tmp_path, "is missing|manifest")


@pytest.mark.full
@pytest.mark.parametrize("renames", [False, True], ids=["no rename", "no sync"])
def test_control_a_deletion_that_is_not_hidden_first_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: bool
) -> None:
    def retain(folder: Path, *_: Any) -> None:
        for step, path in commit.list_committed(folder)[:-2]:
            if renames:
                path = path.rename(folder / f".trash-step-{step}")
            shutil.rmtree(path)

    monkeypatch.setattr(commit, "retain", retain)
    assert_found(record_saves(tmp_path / "root"), tmp_path, "step-.: .* is missing")


def test_control_a_deletion_before_the_commit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only checkpoint is deleted to make room."""
    begin = commit.begin

    def forgetful(folder: Path, step: int) -> Path:
        for _, path in commit.list_committed(folder):
            os.rename(path, folder / f".trash-{path.name}")
        return begin(folder, step)

    monkeypatch.setattr(commit, "begin", forgetful)
    assert_found(record_saves(tmp_path / "root", last=2), tmp_path, r"step 1 was saved, \[\] are there")


# ---- several ranks: the recorder sees one process, so their syncs are compared by time


def save_on_rank(folder: Path, lazy: int) -> list[tuple[int, str, int, int]]:
    """Save one step, sharded over two ranks. Returns (time in ns, operation, inode, size) of this rank's
    syncs and renames. Rank `lazy` syncs nothing."""
    noted: list[tuple[int, str, int, int]] = []
    rank, fsync, rename = dist.get_rank(), os.fsync, os.rename

    def note(operation: str, status: os.stat_result) -> None:
        noted.append((time.monotonic_ns(), operation, status.st_ino, status.st_size))

    def syncing(fd: int) -> None:
        if rank != lazy:
            fsync(fd)
            note("sync", os.fstat(fd))

    def renaming(source: Any, target: Any) -> None:
        note("rename", os.stat(source))
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", syncing)
        patch.setattr(os, "rename", renaming)
        run, toy = open_run(folder), sharded_toy(2, width=64)
        toy.step()
        run.save(toy.state)
        run.close()
    return noted


def unsynced_at_the_rename(folder: Path, lazy: int, run_on: Callable[..., Any]) -> list[str]:
    """Files of the checkpoint of which no rank had synced all bytes when the checkpoint was committed."""
    noted = [entry for rank in run_on(2, save_on_rank, folder, lazy) for entry in rank]
    final = folder / "checkpoint/step-1"
    (renamed,) = [
        ns for ns, operation, inode, _ in noted if (operation, inode) == ("rename", final.stat().st_ino)
    ]
    synced = {(inode, size) for ns, operation, inode, size in noted if operation == "sync" and ns < renamed}
    status = {path.name: path.stat() for path in final.iterdir()}
    return sorted(name for name, s in status.items() if (s.st_ino, s.st_size) not in synced)


def test_every_ranks_files_are_synced_before_one_renames(tmp_path: Path, run_on: Callable[..., Any]) -> None:
    assert unsynced_at_the_rename(tmp_path, -1, run_on) == []
    assert {p.name[:4] for p in (tmp_path / "checkpoint/step-1").glob("*.distcp")} == {"__0_", "__1_"}


def test_control_a_rank_that_does_not_sync_is_found(tmp_path: Path, run_on: Callable[..., Any]) -> None:
    unsynced = unsynced_at_the_rename(tmp_path, 1, run_on)
    assert unsynced
    assert all(name.startswith("__1_") for name in unsynced)
