"""The commit protocol: the manifest's hash, the order of writes to the disk, that nothing is replaced, and
retention; and random histories of saves, failures, kills, restarts, going back and keep files, in which the
run is never lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import Toy, names, open_run, save_steps
from titanlite import files
from titanlite.checkpoint import checkpointer, commit, digest, resume, saver
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import write_file
from titanlite.checkpoint.save_plan import SavePlans
from titanlite.log import logger
from titanlite.storage import LOCAL


def make(folder: Path, step: int, data: bytes = b"shard") -> Path:
    """A committed checkpoint of one shard."""
    partial = commit.begin(folder, step)
    files = {"__0_0.distcp": write_file(partial / "__0_0.distcp", data)}
    return commit.commit(
        partial, step, {"train.json": f'{{"step": {step}}}'}, files, {"ranks": 1, "saved_at": "now"}
    )


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def steps(folder: Path) -> list[int]:
    return [step for step, _ in commit.list_committed(folder)]


# ---- the manifest


def test_a_manifest_names_every_file_and_has_its_own_hash(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    manifest = commit.read_manifest(path)
    assert (manifest["format"], manifest["step"], manifest["ranks"]) == (commit.FORMAT, 7, 1)
    assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {commit.MANIFEST}
    assert len(json.loads((path / commit.MANIFEST).read_text())["sha256"]) == 64
    assert commit.fault(path, 7) is None


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    good = (path / commit.MANIFEST).read_bytes()
    rng = random.Random(0)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        (path / commit.MANIFEST).write_bytes(bad)
        try:
            assert commit.fault(path, 7), f"byte {place} of {bytes(bad)!r}"
        except CheckpointError as error:  # the flipped bit is in the format's number
            assert "has format" in str(error)  # noqa: PT017 -- either will do
    (path / commit.MANIFEST).write_bytes(good)
    assert commit.fault(path, 7) is None


def test_a_manifest_edited_by_hand_is_not_believed(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    manifest = json.loads((path / commit.MANIFEST).read_text())
    without = [{k: v for k, v in manifest.items() if k != key} for key in manifest if key != "format"]
    for edited in (*without, {**manifest, "step": 8}, {**manifest, "files": {}}, {**manifest, "more": 1}):
        (path / commit.MANIFEST).write_text(json.dumps(edited))
        assert commit.fault(path, 7) == "its manifest cannot be trusted: its own SHA-256 differs", edited


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"5", b"null", b'"text"', b"{}", b"\xff"])
def test_what_is_no_manifest_is_a_fault(tmp_path: Path, data: bytes) -> None:
    path = make(tmp_path, 7)
    (path / commit.MANIFEST).write_bytes(data)
    assert "cannot be trusted" in str(commit.fault(path))


def test_faults_are_named(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    assert commit.fault(path, 8) == "its manifest belongs to step 7"
    shard = path / "__0_0.distcp"
    shard.write_bytes(b"shar")
    assert commit.fault(path, 7) == "__0_0.distcp has 4 bytes, 5 were written"
    shard.unlink()
    assert commit.fault(path, 7) == "__0_0.distcp is missing"
    shard.write_bytes(b"shard")
    (path / "__1_0.distcp").touch()
    assert commit.fault(path, 7) == "__1_0.distcp was not written with it"
    (path / commit.MANIFEST).unlink()
    assert commit.fault(path, 7) == "manifest.json is missing"


def test_another_format_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    manifest = json.loads((path / commit.MANIFEST).read_text()) | {"format": commit.FORMAT + 1}
    del manifest["sha256"]
    (path / commit.MANIFEST).write_text(commit.manifest_text(manifest))
    with pytest.raises(
        CheckpointError, match=f"has checkpoint format {commit.FORMAT + 1}, this version reads"
    ):
        commit.fault(path, 7)


# ---- committing


def test_a_committed_step_is_never_replaced(tmp_path: Path) -> None:
    path = make(tmp_path, 7, b"first")
    before = content(path)
    with pytest.raises(CheckpointError, match="exists already"):
        make(tmp_path, 7, b"second")
    assert content(path) == before
    run, toy = save_steps(tmp_path / "run", 1)[1], Toy()
    toy.state.step = 1  # the same step again, by a wrong loop
    before = content(tmp_path / "run/checkpoint")
    run.save(toy.state)
    with pytest.raises(CheckpointError, match="exists already"):
        run.close()
    assert content(tmp_path / "run/checkpoint") == before
    assert names(tmp_path / "run") == ["step-1"]


def test_a_short_or_a_missing_file_is_not_committed(tmp_path: Path) -> None:
    """A file of another node may look like this; only that node knows its size."""
    for damage in (lambda file: file.write_bytes(b"shar"), lambda file: file.unlink()):
        partial = commit.begin(tmp_path, 7)
        files = {"__1_0.distcp": write_file(partial / "__1_0.distcp", b"shard")}
        damage(partial / "__1_0.distcp")
        with pytest.raises((CheckpointError, OSError), match=r"has 4 bytes, 5 were written|No such file"):
            commit.commit(partial, 7, {}, files, {})
    assert steps(tmp_path) == []


def test_what_a_failed_save_left_is_not_in_the_way(tmp_path: Path) -> None:
    left = commit.begin(tmp_path, 7)
    (left / "__0_0.distcp").write_bytes(b"half")
    partial = commit.begin(tmp_path, 7)
    assert list(partial.iterdir()) == []
    LOCAL.delete(partial)
    LOCAL.delete(partial)  # twice is no error
    assert not partial.exists()
    commit.clean(tmp_path)
    assert not left.exists()


def test_only_whole_names_count(tmp_path: Path) -> None:
    for name in (
        "step-x",
        "step-",
        "step-3.keep",
        "quarantined-step-3-0",
        ".trash-step-3",
        ".partial-step-3",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-5").write_text("a file")
    for step in (10, 9, 100):
        make(tmp_path, step)
    assert steps(tmp_path) == [9, 10, 100]
    assert steps(tmp_path / "nothing here") == []


def test_quarantined_and_archived_checkpoints_get_numbers(tmp_path: Path) -> None:
    for number in range(3):
        assert commit.quarantine(make(tmp_path, 2)).name == f"quarantined-step-2-{number}"
    for number in range(2):
        for step in (1, 2, 3) if number == 0 else (2, 3):
            make(tmp_path, step)
        assert [p.name for p in commit.archive_after(tmp_path, after=1)] == ["step-2", "step-3"]
        assert steps(tmp_path) == [1]
        assert steps(tmp_path / f"archived-{number}") == [2, 3]
    assert commit.archive_after(tmp_path, after=1) == []
    assert not (tmp_path / "archived-2").exists()


# ---- retention


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"keep_latest": 2}, [5, 6]),
        ({"keep_latest": 0}, [1, 2, 3, 4, 5, 6]),
        ({"keep_latest": 9}, [1, 2, 3, 4, 5, 6]),
        ({"keep_latest": 2, "every": 2}, [2, 4, 5, 6]),
        ({"keep_latest": 2, "keep": [1]}, [1, 5, 6]),
        ({"keep_latest": 3, "every": 3, "keep": [1, 6]}, [1, 3, 4, 5, 6]),
    ],
)
def test_retention(tmp_path: Path, arguments: dict[str, Any], kept: list[int]) -> None:
    for step in range(1, 7):
        make(tmp_path, step)
    commit.retain(tmp_path, **arguments)
    assert steps(tmp_path) == kept
    (tmp_path / f"step-{kept[0]}.keep").touch()
    commit.retain(tmp_path, 1)
    assert steps(tmp_path) == [kept[0], 6]
    assert not list(tmp_path.glob(".trash-*"))


def test_a_deletion_that_fails_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)

    def half(path: Path, ignore_errors: bool) -> None:
        next(path.iterdir()).unlink()

    monkeypatch.setattr(shutil, "rmtree", half)
    commit.retain(tmp_path, 1)
    assert steps(tmp_path) == [3]
    assert {p.name[:13] for p in tmp_path.iterdir()} == {".trash-step-1", ".trash-step-2", "step-3"}
    monkeypatch.undo()
    commit.clean(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"step-3"}


def test_one_checkpoint_that_cannot_be_deleted_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    rename = os.rename

    def refuse(path: Path, target: Path) -> None:
        if path.name == "step-1":
            raise PermissionError(1, "Operation not permitted")
        rename(path, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError):
        commit.retain(tmp_path, 1)
    assert {p.name for p in tmp_path.iterdir()} == {"step-1", "step-3"}


def test_a_failed_retention_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(commit, "retain", refuse)
    run = save_steps(tmp_path, 3, keep_latest_k=2)[1]
    run.close()
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


# ---- random histories


class Killed(BaseException):
    """The process is killed here."""


class Inline(ThreadPoolExecutor):
    """Runs tasks without threads: this test would spend most of its time waiting for them."""

    def submit(self, act: Callable[..., Any], *args: Any) -> Future[Any]:  # type: ignore[override]
        done: Future[Any] = Future()
        try:
            done.set_result(act(*args))
        except BaseException as e:
            done.set_exception(e)
        return done


class History:
    """A run folder through saves that succeed or fail, kills at any change of the folder, restarts, going
    back and keep files. After every change: all committed checkpoints are complete, there is a checkpoint if
    there ever was one, and the checkpoints that must be kept exist. After every complete action, no other
    files exist."""

    def __init__(self, folder: Path, keep_latest_k: int, every: int):
        self.folder, self.run_folder = folder / "checkpoint", folder
        self.config: dict[str, Any] = {"keep_latest_k": keep_latest_k, "keep_every_n_steps": every}
        self.expected: set[int] = set()
        self.pinned: set[int] = set()
        self.changes_left = 0  # until the kill; 0: none
        self.fails_at = ""
        self.toy, self.run = Toy(), open_run(folder, **self.config, async_mode="disabled")
        self.origin: int | None = None  # the step resumed from
        self.on_branch: int | None = None  # load_step of the last start, and for each checkpoint
        self.branch: dict[int, int | None] = {}

    def is_kept(self, step: int) -> bool:
        """Whether retention keeps this step even if it is old."""
        every = self.config["keep_every_n_steps"]
        return step in self.pinned or step == self.origin or bool(every and step % every == 0)

    def retained(self, there: set[int]) -> set[int]:
        k = self.config["keep_latest_k"]
        return {s for s in there if self.is_kept(s)} | set(sorted(there)[-k:] if k else there)

    def look(self) -> None:
        whole = [
            step for step, path in commit.list_committed(self.folder) if commit.fault(path, step) is None
        ]
        assert whole == steps(self.folder)
        assert whole or not self.expected
        assert {s for s in self.expected if self.is_kept(s)} <= set(whole)

    def change(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """`act`, followed by a look at the folder, or replaced by the kill."""

        def seen(*args: Any, **kwargs: Any) -> Any:
            self.changes_left -= 1
            if self.changes_left == 0:
                for shard in Path(args[0]).glob("*.distcp") if act is rmtree else ():
                    shard.unlink()  # half done
                raise Killed
            value = act(*args, **kwargs)
            self.look()
            return value

        return seen

    def write(self, tensors: Any, writer: Any) -> list[Any]:
        """Replaces SavePlans.write."""
        for name in ("__0_0.distcp", ".metadata"):
            with writer.fs.create_stream(writer.path / name, "wb") as stream:
                stream.write(b"x" * 50)
        if self.fails_at == "write":
            raise CheckpointError("rank 0: OSError: [Errno 28] No space left on device")
        return []

    def finish(self, writer: Any, written: list[Any]) -> dict[str, Any]:
        """Replaces SavePlans.finish."""
        return writer.files

    def save(self, ahead: int, fails_at: str, kill: int) -> None:
        self.toy.state.step += ahead
        step = self.toy.state.step
        self.branch[step] = self.on_branch
        self.fails_at, self.changes_left = fails_at, kill
        try:
            self.run.save(self.toy.state)
        except Killed:
            there = set(steps(self.folder))
            assert self.retained(self.expected | {step}) - {step} <= there <= self.expected | {step}
            self.expected = there
            self.restart()
            return
        if not fails_at:
            self.expected = self.retained(self.expected | {step})
        assert set(steps(self.folder)) == self.expected
        assert not list(self.folder.glob(".*"))

    def restart(self, load_step: int = -1, kill: int = 0) -> None:
        self.run._release()
        before, self.changes_left, self.fails_at = set(self.expected), kill, ""
        # Retention no longer keeps the checkpoint that the start before resumed from.
        newest = max(before, default=0)
        if load_step != -1 and not (self.branch.get(newest) == load_step < newest):
            self.expected = {s for s in before if s <= load_step}
        self.origin = max(self.expected, default=None)
        self.on_branch = load_step if load_step != -1 else None
        try:
            self.run = open_run(self.run_folder, **self.config, async_mode="disabled", load_step=load_step)
            self.run.load(self.toy.state)
        except Killed:
            there = set(steps(self.folder))
            assert self.expected <= there <= before
            self.expected = there
            self.restart()
            return
        assert set(steps(self.folder)) == self.expected
        # Keep files are archived with their checkpoints.
        self.pinned = {
            s for s in self.pinned if s in self.expected or (self.folder / f"step-{s}.keep").exists()
        }
        assert (self.run.candidate.step if self.run.candidate else None) == self.origin
        self.toy.state.step = self.origin or 0  # a run without a checkpoint starts afresh
        assert not list(self.folder.glob(".*"))

    def pin(self, step: int, pinned: bool) -> None:
        file = self.folder / f"step-{step}.keep"
        if pinned:
            file.touch()
            self.pinned.add(step)
        else:
            file.unlink(missing_ok=True)
            self.pinned.discard(step)


rmtree = shutil.rmtree
KILL = st.one_of(st.just(0), st.integers(1, 9))
ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 3), st.sampled_from(["", "", "", "", "write", "rename"]), KILL),
    st.tuples(st.just("save"), st.integers(1, 3), st.just(""), st.just(0)),
    st.tuples(st.just("restart"), KILL),
    st.tuples(st.just("rewind"), st.integers(0, 9), KILL),
    st.tuples(st.just("pin"), st.integers(0, 9), st.booleans()),
)


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@example(
    actions=[
        *[("save", 1, "", 0)] * 3,
        ("pin", 1, True),
        ("rewind", 0, 0),  # archives the pinned checkpoint
        *[("save", 1, "", 0)] * 5,
    ],
    keep_latest_k=3,
    every=0,
)
@given(
    actions=st.lists(ACTIONS, min_size=8, max_size=25),
    keep_latest_k=st.sampled_from([0, 2, 2, 3]),
    every=st.sampled_from([0, 0, 4]),
)
def test_random_histories_never_lose_the_run(
    actions: list[tuple[Any, ...]], keep_latest_k: int, every: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        history = History(Path(name), keep_latest_k, every)
        rename = history.change(os.rename)

        def failing_rename(a: Any, b: Any) -> None:
            if history.fails_at == "rename":
                raise OSError(28, "No space left on device")
            rename(a, b)

        patch.setattr(logger, "disabled", True)
        patch.setattr(files, "READ_BYTES", 4096)
        patch.setattr(os, "fsync", lambda fd: None)  # there is no power to lose
        patch.setattr(os, "rename", failing_rename)
        patch.setattr(shutil, "rmtree", history.change(shutil.rmtree))
        patch.setattr(commit, "write_file", history.change(write_file))
        for module in (saver, resume, digest):
            patch.setattr(module, "ThreadPoolExecutor", Inline)
        patch.setattr(SavePlans, "write", history.write)
        patch.setattr(SavePlans, "finish", history.finish)
        patch.setattr(checkpointer, "load_tensors", lambda *args, **options: set())
        patch.setattr(saver, "MAX_FAILURES", 1 << 30)
        for action, *values in actions:
            there = sorted(history.expected)
            if action == "save":
                history.save(*values)
            elif action == "restart":
                history.restart(kill=values[0])
            elif there and action == "rewind":
                history.restart(there[values[0] % len(there)], values[1])
            elif there and action == "pin":
                history.pin(there[values[0] % len(there)], values[1])
            history.look()
        with suppress(CheckpointError):  # the last save failed
            history.run.close()


def test_the_room_that_is_missing_is_that_which_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata need some room, too: 102 MiB do not suffice for 100 MiB of tensors."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=102, f_frsize=1 << 20))
    with pytest.raises(CheckpointError, match=r"needs 105\.0 MiB, and .* has 102\.0 MiB free"):
        commit.check_space(tmp_path, 100 << 20)
    commit.check_space(tmp_path, 97 << 20)


def test_fields_of_a_manifest_that_a_reader_does_not_know_are_ignored(tmp_path: Path) -> None:
    """Another storage and a later version may write more of them."""
    path = make(tmp_path, 3)
    manifest: dict[str, Any] = {**commit.read_manifest(path)}
    assert manifest["commit"] == "rename"
    manifest |= {"commit": "object", "digest": "ab", "bits": {"torch": "2.13"}, "later": 1}
    for entry in manifest["files"].values():
        entry["tag"] = "an e-tag"
    (path / commit.MANIFEST).write_text(commit.manifest_text(manifest))
    assert commit.check(path, 3)["files"] == manifest["files"]
    assert digest.first_fault(path, commit.digests(commit.read_manifest(path))) is None
    assert [step for step, _ in commit.list_committed(tmp_path)] == [3]
