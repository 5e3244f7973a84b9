"""kill -9 at every phase of a save, of retention, of going back to an earlier step and of a resume: the run
resumes from the newest committed checkpoint and ends with the same bits as the run that nobody killed.

test_power_loss.py replays the file operations of one rank and proves more about the disk. Here real processes
are killed. The default tier has one kill of each kind: in the phases of a save on two ranks, in a resume, in
going back, in a quarantine and in an export. The full tier has every point on one rank, and on two ranks
every point x {rank 0, rank 1} killed x {sync, async}."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Fault, Outcome, Trainer, find_target
from tests.support.jobs import write_toml
from tests.support.kill_points import ERRORS, MANIFEST, META, QUARANTINE, RESUME, REWIND, SAVE, SHARD, TRAIN
from tests.support.runs import KEYS
from titanlite.checkpoint import commit
from titanlite.checkpoint.digest import first_fault

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has imported torch")
INTERVAL, STEPS = 2, 8
MODES = ("async", "disabled")
ALL = "--checkpoint.keep_latest_k=0"
TWO = "--checkpoint.keep_latest_k=2"
FILES = {
    "LOCK",
    "last_commit.json",
    "job.toml",
    "env.json",
    "run_identity.json",
    "run_id.json",
    "sources.json",
    "metrics.jsonl",
    "events.jsonl",
    "parameters.jsonl",
    "checkpoint",
}
SUPERSEDED = {"metrics.superseded.jsonl", "parameters.superseded.jsonl"}


@dataclass
class Run:
    """A run folder and the command that trains in it."""

    trainer: Trainer
    folder: Path
    corpus: Path
    size: int
    overrides: tuple[str, ...]

    @property
    def checkpoints(self) -> Path:
        """The checkpoint folder."""
        return self.folder / "checkpoint"

    def start(self, *faults: Fault, **options: Any) -> Outcome:
        """Run the command."""
        self.folder.parent.mkdir(exist_ok=True)
        where = [f"--job.dump_folder={self.folder}", f"--data.cache_dir={self.corpus / 'cache'}"]
        length = [f"--checkpoint.interval={INTERVAL}", f"--training.steps={STEPS}"]
        length += [f"--training.local_batch_size={8 // self.size}"]  # one micro-batch, for speed
        toml = write_toml(self.folder.parent, self.corpus)
        return self.trainer.run(toml, [*where, *length, *self.overrides], self.size, faults, **options)

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, each of which must be complete and undamaged."""
        there = commit.list_committed(self.checkpoints)
        for step, path in there:
            assert commit.fault(path, step) is None
            assert first_fault(path, commit.digests(commit.read_manifest(path))) is None
        return [step for step, _ in there]

    def state(self, step: int = STEPS) -> dict[str, Any]:
        """The state outside of tensors, and digests of the files with weights and optimizer state. Equal
        states have equal bytes."""
        path = self.checkpoints / f"step-{step}"
        small = json.loads((path / TRAIN).read_text())
        files = commit.digests(commit.read_manifest(path))
        state = {key: small[key] for key in ("step", "sequences", "tokens", "global_batch_size")}
        return state | {name: digest for name, digest in files.items() if name.endswith((SHARD, META))}

    def history(self) -> dict[int, list[Any]]:
        """The values that must be equal at every step."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        assert len({row["step"] for row in rows}) == len(rows), "a step was logged twice"
        return {row["step"]: [row[key] for key in KEYS] for row in rows}

    def left(self) -> set[str]:
        """Names of all files and folders except committed checkpoints and the files that a run always has."""
        names = {p.name for p in self.checkpoints.iterdir()} - {f"step-{s}" for s in range(STEPS + 1)}
        return names | ({p.name for p in self.folder.iterdir()} - FILES - SUPERSEDED)


Start = Callable[..., Run]
Whole = Callable[[int], Run]
Kill = tuple[str, int, int]  # a point, a rank, the step that is being saved
Case = tuple[int, str, list[Kill]]  # number of ranks, mode, kills in this order


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def whole(trainer: Trainer, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """`whole(size)`: the uninterrupted run on that many ranks, with all its checkpoints."""
    done: dict[int, Run] = {}

    def get(size: int) -> Run:
        if size not in done:
            done[size] = Run(trainer, tmp_path_factory.mktemp(f"whole{size}") / "run", corpus, size, (ALL,))
            assert done[size].start().exits == [0] * size
            assert done[size].committed() == [2, 4, 6, 8]
        return done[size]

    return get


@pytest.fixture
def run(trainer: Trainer, corpus: Path, tmp_path: Path) -> Start:
    """`run(size, *overrides)`: a run in the test's folder."""
    return lambda size, *overrides: Run(trainer, tmp_path / "jobs" / "run", corpus, size, overrides)


def assert_same(ours: Run, whole: Run) -> None:
    """The run ended with the bits of the uninterrupted run, and no step is missing."""
    assert ours.history() == whole.history()
    assert ours.state() == whole.state()


def kill(run: Run, fault: Fault, **options: Any) -> Outcome:
    """Run until a fault, which must happen and end the chosen process."""
    outcome = run.start(fault, **options)
    victim = fault.rank if fault.victim == -1 else fault.victim
    assert outcome.fired == [(fault.rank, fault.target)], f"not reached: {outcome.exits} {outcome.logs}"
    assert [code == -9 for code in outcome.exits] == [r == victim for r in range(run.size)], outcome
    return outcome


def finish(run: Run, whole: Run, newest: int, left: Sequence[str] = ()) -> None:
    """Restart a killed run: it resumes from `newest` and ends as the uninterrupted run did."""
    outcome = run.start()
    assert outcome.exits == [0] * run.size, outcome.logs
    assert outcome.resumed == ([newest] if newest else [])
    assert_same(run, whole)
    assert run.left() == set(left)
    assert run.committed()[-1] == STEPS


# ---- saves


# Retention has a checkpoint to delete if the run resumed from step 4.
SAVES: list[Case] = [
    (2, "async", [("P3 half a write", 1, 2), ("P8 half deleted", 1, 6)]),
]


def three_per_run(
    size: int, modes: Sequence[str], victim: int, names: Sequence[str], steps: Sequence[int]
) -> Iterator[Case]:
    """Kills at points that do not need three checkpoints, in the saves of three steps of one run. The runs
    have `modes` in turn, but P2 exists in async saves only."""
    for i in range(0, len(names), 3):
        three = names[i : i + 3]
        is_async = any(name.startswith("P2") for name in three)
        mode = "async" if is_async else modes[i // 3 % len(modes)]
        yield size, mode, [(name, victim, step) for name, step in zip(three, steps)]


ANYWHERE = [name for name in SAVE if SAVE[name].step == 4]
RETENTION = [name for name in SAVE if SAVE[name].step == 6]  # needs three checkpoints


def more_saves() -> Iterator[Case]:
    """All points on one rank, and some on two."""
    yield from three_per_run(1, MODES, 0, ANYWHERE, (2, 4, 6))
    for i, name in enumerate(RETENTION):
        yield 1, MODES[i % 2], [(name, 0, 6)]
    # The phases that the default tier does not have, on two ranks.
    yield 2, "disabled", [("P4 results gathered", 1, 4), ("P6 before the rename", 0, 6)]
    yield 2, "disabled", [("P0 agreed", 1, 2), ("P1 begun", 1, 4), ("P6 before the rename", 1, 6)]
    yield 2, "async", [("P3 half a write", 1, 6), ("P5 half of the manifest", 0, 6), ("P7 agreed", 1, 8)]
    # Several kills of the same save, and kills of the last save.
    yield 1, "async", [("P3 half a write", 0, 4), ("P5 manifest", 0, 4), ("P3 half a write", 0, 4)]
    yield 1, "disabled", [("P6 before the rename", 0, 8), ("P6 renamed", 0, 8)]


def all_saves() -> Iterator[Case]:
    """Every point x the killed rank x the mode, on two ranks, in saves that have a checkpoint before them."""
    for mode, victim in itertools.product(MODES, (0, 1)):
        names = [name for name in ANYWHERE if mode == "async" or not name.startswith("P2")]
        yield from three_per_run(2, [mode], victim, names, (4, 6, 8))
        for name in RETENTION:
            yield 2, mode, [(name, victim, 6)]


def with_tiers(default: Iterable[Any], full: Iterable[Any]) -> list[Any]:
    """Parameters in the default tier, and parameters that only the full tier has."""
    return [*default, *(pytest.param(case, marks=pytest.mark.full) for case in full)]


def label(case: Case) -> str:
    """A test id for pytest."""
    size, mode, kills = case
    return f"{size} {mode} " + ", ".join(f"{name} of {step} at {rank}" for name, rank, step in kills)


@pytest.mark.parametrize("case", with_tiers(SAVES, [*more_saves(), *all_saves()]), ids=label)
def test_a_kill_while_saving(run: Start, whole: Whole, case: Case) -> None:
    size, mode, kills = case
    ours = run(size, f"--checkpoint.async_mode={mode}", TWO)
    newest = 0
    for name, victim, step in kills:
        point = SAVE[name].at(victim, step=step)
        outcome = kill(ours, point)
        assert outcome.resumed == ([newest] if newest else [])
        newest = max(ours.committed(), default=0)
        allowed = {step if point.commits else step - INTERVAL}
        if point.late and victim:
            allowed.add(step)
        if name == "P0 agreed" and mode == "async":
            allowed.add(step - 2 * INTERVAL)  # the previous save may be in flight until this one begins
        assert newest in allowed
        assert outcome.reached - newest <= (INTERVAL if mode == "disabled" else 2 * INTERVAL)
    finish(ours, whole(size), newest)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "victim"), [("async", 1), pytest.param("disabled", 0, marks=pytest.mark.full)]
)
def test_the_others_end_by_themselves(run: Start, mode: str, victim: int) -> None:
    ours = run(2, f"--checkpoint.async_mode={mode}")
    outcome = kill(ours, SAVE["P3 half a write"].at(victim), signal_peers=False)
    assert outcome.exits[1 - victim] == 1, outcome.logs
    assert ours.committed() == [2]


# ---- errors instead of kills


FAILS: list[Case] = [
    (1, "async", [("P2 no memory", 0, 2), ("P3 half a write", 0, 6)]),
    (1, "disabled", [("P1 disk full?", 0, 2), ("P5 half of the manifest", 0, 6)]),
]


def two_per_run(size: int, modes: Sequence[str], rank: int, names: Sequence[str]) -> Iterator[Case]:
    """Errors in the saves of steps 2 and 6 of one run. The save between them must succeed."""
    for i in range(0, len(names), 2):
        two = zip(names[i : i + 2], (2, 6))
        yield size, modes[i // 2 % len(modes)], [(name, rank, step) for name, step in two]


def more_errors() -> Iterator[Case]:
    """All points on one rank, and some on two."""
    yield 1, "async", [("P1 disk full?", 0, 2), ("P2 no memory", 0, 6)]
    others = [name for name in ERRORS if name not in ("P1 disk full?", "P2 no memory")]
    yield from two_per_run(1, MODES, 0, others)
    yield 2, "async", [("P2 no memory", 1, 2), ("P4 half of .metadata", 0, 6)]
    yield 2, "disabled", [("P3 before fsync", 1, 2), ("P5 half of the manifest", 0, 6)]


def all_errors() -> Iterator[Case]:
    """Every point x the failing rank x the mode, on two ranks."""
    for mode, rank in itertools.product(MODES, (0, 1)):
        names = [name for name in ERRORS if mode == "async" or name != "P2 no memory"]
        yield from two_per_run(2, [mode], rank, [name for name in names if ERRORS[name].shared or not rank])


@pytest.mark.parametrize("case", with_tiers(FAILS, [*more_errors(), *all_errors()]), ids=label)
def test_an_error_while_saving(run: Start, whole: Whole, case: Case) -> None:
    size, mode, failing = case
    ours = run(size, f"--checkpoint.async_mode={mode}", ALL)
    points = [ERRORS[name].at(rank, step=step) for name, rank, step in failing]
    outcome = ours.start(*points)
    assert outcome.exits == [0] * size, outcome.logs
    assert sorted(outcome.fired) == sorted((point.rank, point.target) for point in points)
    for log in outcome.logs:
        assert log.count("(failure 1 of 3 in a row)") == len(points), log
        for rank, step in ((rank, step) for name, rank, step in failing if name == "P3 half a write"):
            assert f"step {step} could not be saved: rank {rank}: OSError: [Errno 5] injected" in log
    lost = {point.step for point in points if not point.commits}
    assert ours.committed() == [step for step in (2, 4, 6, 8) if step not in lost]
    assert ours.left() == set()
    assert_same(ours, whole(size))


@pytest.mark.full
def test_an_error_in_retention_fails_no_save(run: Start, whole: Whole) -> None:
    ours = run(1, TWO)
    outcome = ours.start(replace(SAVE["P8 before .trash"], action="error"))
    assert (outcome.exits, len(outcome.fired)) == ([0], 1)
    assert "old checkpoints could not be deleted" in outcome.logs[0]
    assert "in a row" not in outcome.logs[0]
    assert ours.committed() == [6, 8]  # the next save deleted the checkpoint that this one could not delete
    assert ours.left() == set()
    assert_same(ours, whole(1))


# ---- resumes


def interrupt(run: Run, whole: Run) -> Run:
    """Make `run` look as if it was killed in its save of step 8 while an old checkpoint was being deleted."""
    shutil.copytree(whole.folder, run.folder)
    (run.checkpoints / "step-8").rename(run.checkpoints / ".partial-step-8")
    (run.checkpoints / ".partial-step-8" / MANIFEST).unlink()
    shutil.copytree(run.checkpoints / "step-2", run.checkpoints / ".trash-step-0")
    return run


RESUMES = [(1, [("half cleaned", 0), ("half read", 0)])]


def more_resumes() -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """(ranks, [(point, rank)]), several kills per run: after each kill, the next start has the same work."""
    names = list(RESUME)
    for i in range(0, len(names), 6):
        yield 1, [(name, 0) for name in names[i : i + 6]]
    yield (
        2,
        [(name, 1) for name in ("half verified", "half read", "first step")],
    )


def all_resumes() -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Every point x the killed rank, on two ranks, six kills per run. A kill of rank 1 at a call of rank 0
    has a run of its own, because rank 0 may finish the work that the next kill needs."""
    shared = [name for name in RESUME if RESUME[name].shared]
    for victim, names in ((0, list(RESUME)), (1, shared)):
        for i in range(0, len(names), 6):
            yield 2, [(name, victim) for name in names[i : i + 6]]
    for name in (name for name in RESUME if name not in shared):
        yield 2, [(name, 1)]


@pytest.mark.parametrize("case", with_tiers(RESUMES, [*more_resumes(), *all_resumes()]), ids=str)
def test_a_kill_while_resuming(run: Start, whole: Whole, case: tuple[int, list[tuple[str, int]]]) -> None:
    size, kills = case
    ours = interrupt(run(size, ALL), whole(size))
    for name, victim in kills:
        kill(ours, RESUME[name].at(victim))
        assert ours.committed() == [2, 4, 6]
    finish(ours, whole(size), 6)


@pytest.mark.full
@pytest.mark.parametrize("name", with_tiers(["one moved"], [n for n in REWIND if n != "one moved"]))
def test_a_kill_while_rewinding(run: Start, whole: Whole, name: str) -> None:
    ours = run(1, "--checkpoint.load_step=2", ALL)
    shutil.copytree(whole(1).folder, ours.folder)
    kill(ours, REWIND[name])
    there = ours.committed()
    assert there == [2, 4, 6, 8][: len(there)]  # no gap
    moves = (
        (there != [2, 4, 6, 8]) + (there != [2]) + (name == "before the first")
    )  # which left an empty folder
    finish(ours, whole(1), 2, left=[f"archived-{i}" for i in range(moves)])
    moved = sorted(p.name for p in ours.checkpoints.glob("archived-*/*"))
    assert moved == ["step-4", "step-6", "step-8"]


@pytest.mark.full
@pytest.mark.parametrize(("name", "newest"), [("P5 manifest", 2), ("P6 renamed", 4)])
def test_a_kill_on_the_branch_after_a_rewind(run: Start, whole: Whole, name: str, newest: int) -> None:
    ours = run(1, "--checkpoint.load_step=2", ALL)
    shutil.copytree(whole(1).folder, ours.folder)
    assert kill(ours, SAVE[name]).resumed == [2]
    finish(ours, whole(1), newest, left=["archived-0"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("one", TRAIN),
        *(pytest.param(name, f"__0_1{SHARD}", marks=pytest.mark.full) for name in QUARANTINE),
    ],
)  # damaged shards are found while they are loaded, damaged small files before
def test_a_kill_while_damaged_checkpoints_are_quarantined(
    run: Start, whole: Whole, name: str, file: str
) -> None:
    ours = interrupt(run(1, ALL), whole(1))
    for step in (4, 6):
        path = ours.checkpoints / f"step-{step}" / file
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    kill(ours, QUARANTINE[name])
    finish(ours, whole(1), 2, left=["quarantined-step-4-0", "quarantined-step-6-0"])


# ---- controls: what the tests above say when something is wrong


@pytest.mark.parametrize("action", with_tiers(["lose_moments"], ["shift_sequence"]))
def test_control_a_lost_state_is_noticed(run: Start, whole: Whole, action: str) -> None:
    ours = interrupt(run(1, ALL), whole(1))
    outcome = ours.start(replace(RESUME["restored"], action=action))
    assert (outcome.exits, outcome.resumed, len(outcome.fired)) == ([0], [6], 1)
    assert ours.history() != whole(1).history()
    assert ours.state() != whole(1).state()
    with pytest.raises(AssertionError):
        assert_same(ours, whole(1))


def test_control_a_kill_that_never_happens_is_noticed(run: Start) -> None:
    with pytest.raises(AssertionError, match="not reached"):
        kill(run(1), replace(SAVE["P6 renamed"], step=5))


def test_control_what_is_left_is_noticed(run: Start, whole: Whole) -> None:
    ours = interrupt(run(1, ALL), whole(1))
    ours.start(Fault("commit:clean", "instead", 0, during="start", action="nothing"))
    assert ours.left() == {".trash-step-0", ".partial-step-8"}


# ---- what is saved is the state at the save

SCRIBBLE = [
    Fault("saver:Saver._save", rank=-1, action="wait_for_scribble"),
    Fault("checkpointer:Checkpointer.save", "after", during="save", rank=-1, action="scribble"),
]


@pytest.mark.parametrize("size", with_tiers([1], [2]))
def test_weights_may_change_when_save_has_returned(run: Start, whole: Whole, size: int) -> None:
    ours = run(size, ALL)
    outcome = ours.start(*SCRIBBLE)
    assert outcome.exits == [0] * size, outcome.logs
    assert len(outcome.fired) == 2 * size
    assert ours.state(4) == whole(size).state(4)
    assert_same(ours, whole(size))


def test_control_a_save_without_a_copy_is_noticed(run: Start, whole: Whole) -> None:
    ours = run(1, ALL)
    no_copy = Fault("staging:HostBuffers.copy", "instead", during="save", action="return_argument")
    assert ours.start(*SCRIBBLE, no_copy).exits == [0]
    assert ours.state(4) != whole(1).state(4)


@pytest.mark.parametrize(
    "points",
    [SAVE, ERRORS, RESUME, REWIND, QUARANTINE],
    ids=["save", "errors", "resume", "rewind", "quarantine"],
)
def test_every_point_is_a_function(points: dict[str, Fault]) -> None:
    """Part of the default tier, so that a renamed function is noticed before the full tier runs."""
    for name, point in points.items():
        owner, function = find_target(point.target)
        assert callable(getattr(owner, function)), name
