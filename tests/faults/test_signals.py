"""A run that is told to stop at any place: all ranks stop after the same step, save it, and exit with 75, and
the resumed run equals the uninterrupted run to the bit.

The tests run on two ranks. An event in a rank happens before a certain call of a certain function, not after
a certain time."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.jobs import make_job, metrics_of, write_corpus
from tests.support.ranks import Ranks, leave, write_output_to
from tests.support.runs import assert_same, history, state_of
from tests.support.tiers import full, sampled
from titanlite import cli
from titanlite.checkpoint import resume
from titanlite.checkpoint.commit import list_committed
from titanlite.checkpoint.reader import SafeReader
from titanlite.checkpoint.staging import HostBuffers
from titanlite.checkpoint.state import TrainState
from titanlite.checkpoint.writer import ShardWriter
from titanlite.data.dataset import Data, SequenceDataset
from titanlite.data.loader import SequenceLoader
from titanlite.job import Job
from titanlite.optim.adamw import AdamW
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.runtime import signals
from titanlite.tokenizers.base import Tokenizer

RANKS, STEPS = 2, 8

PLACES: dict[str, tuple[Any, str]] = {
    "tokenising": (Tokenizer, "encode_documents"),
    "opening the data": (Data, "build"),
    "choosing a checkpoint": (resume, "newest"),
    "reading a checkpoint": (SafeReader, "read_data"),
    "reading sequences": (SequenceDataset, "__getitems__"),  # in a loader worker
    "loading": (SequenceLoader, "__next__"),  # twice a step: two micro-batches
    "accumulating": (ShardedModel, "model_inputs"),  # twice a step; and in each batch of a validation
    "sampling": (ShardedModel, "logits"),  # once a token
    "saving": (HostBuffers, "wait"),  # in the thread, before it writes
    "writing": (ShardWriter, "write_file"),
}


@dataclass(frozen=True)
class Event:
    """An event in `rank` before the `call`-th call of `place`: a signal to itself, a file, or a function
    call."""

    place: str
    call: int
    action: str = "SIGTERM"
    rank: int = 1


# ---- in a rank


def _group() -> None:
    """Signal the whole process group, as a terminal or a batch system does, which do not know ranks."""
    workers = multiprocessing.active_children()
    assert [os.getpgid(worker.pid or 0) for worker in workers] == [os.getpgrp()] * 2
    os.killpg(0, signal.SIGTERM)
    for worker in workers:
        ignored = int(_status(worker.pid, "SigIgn"), 16)
        assert ignored >> (signal.SIGTERM - 1) & 1, "a loader worker would end"
    assert len(multiprocessing.active_children()) == 2, "the loader's workers are gone"


def _status(pid: int | None, key: str) -> str:
    """A value of the main thread's /proc/PID/status."""
    lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t") for line in lines)[key].strip()


def _until_it_waits(pid: int) -> None:
    """Wait until the main thread of a process has slept without a break for 0.1 s."""
    seen, until = "", time.monotonic() + 300
    while seen != (seen := _status(pid, "voluntary_ctxt_switches")) or _status(pid, "State")[0] != "S":
        assert time.monotonic() < until, f"process {pid} does not wait"
        time.sleep(0.1)


def _parent() -> None:
    """Signal the rank that waits for this loader worker."""
    _until_it_waits(os.getppid())
    os.kill(os.getppid(), signal.SIGTERM)


def _peer() -> None:
    """Signal, from rank 0, the rank that waits for it in a collective."""
    _until_it_waits(pid := int(Path("pid-1").read_text()))
    os.kill(pid, signal.SIGTERM)


def _twice() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)


def _in_flight() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    _until_it_waits(os.getpid())  # the status of the main thread, which has written nothing yet


def _disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _lose_update() -> None:
    """Count step 6 without applying its update."""
    adamw: Any = AdamW
    build = adamw.build

    def lazy(*args: Any) -> Any:
        optimizer, steps = build(*args), itertools.count(1)
        update = optimizer.step
        optimizer.step = lambda: update() if next(steps) != 6 else None
        return optimizer

    adamw.build = lazy


def _lose_sequence() -> None:
    """Let the resumed run begin one sequence too early."""
    state: Any = TrainState
    restore = state.restore
    state.restore = lambda self, values: restore(self, {**values, "sequences": values["sequences"] - 8})


ACTS: dict[str, Callable[[], None]] = {
    "file": lambda: Path("run/STOP").touch(),
    "group": _group,
    "parent": _parent,
    "peer": _peer,
    "twice": _twice,
    "in flight": _in_flight,
    "disk full": _disk_full,
    "lose update": _lose_update,
    "lose a sequence": _lose_sequence,
}


def _before(event: Event) -> None:
    act = ACTS.get(event.action) or (lambda: os.kill(os.getpid(), getattr(signal, event.action)))
    owner, name = PLACES[event.place]
    original, calls = getattr(owner, name), itertools.count(1)

    def planted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == event.call:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, planted)


def _train(folder: Path, arguments: list[str], events: list[Event]) -> None:
    os.setpgid(0, 0)  # a process group of this rank and its loader workers
    rank = dist.get_rank()
    write_output_to(folder / f"log-{rank}")
    os.chdir(folder)
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOG_RANK": "0,1"}
    signals.LOOK_S = 0.0  # the run takes only a second
    for event in events:
        if event.rank == rank:
            _before(event)
    leave(cli.run(["train", *arguments]))


# ---- runs


class Runs:
    """Runs of the tiny job in one folder. Each resumes from the run before it."""

    def __init__(self, folder: Path, corpus: Path, *overrides: str):
        overrides = ("--training.local_batch_size=2", *overrides)  # two micro-batches per step and rank
        self.folder, self.job = folder, make_job(folder, corpus, *overrides, world_size=RANKS)
        self._arguments = [
            str(folder / "job.toml"),
            f"--job.dump_folder={self.job.folder}",
            f"--data.cache_dir={self.job.data.cache_dir}",
            *overrides,
        ]

    def __call__(self, *events: Event) -> list[int]:
        """Exit codes, or negative signals, by rank."""
        try:
            return Ranks(RANKS, _train, self.folder, self._arguments, list(events)).exits()
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.log}") from None

    @property
    def log(self) -> str:
        """The logs of all ranks."""
        return "".join((self.folder / f"log-{rank}").read_text() for rank in range(RANKS))

    @property
    def saved(self) -> list[int]:
        """The saved steps."""
        return [step for step, _ in list_committed(self.job.folder / "checkpoint")]

    def stopped(self) -> int:
        """The step after which all ranks report to have stopped, and which is saved."""
        said = [int(step) for step in re.findall(r"stopped after step (\d+), which is saved", self.log)]
        assert said == [said[0]] * RANKS, self.log
        assert self.saved[-1] == metrics_of(self.job)[-1]["step"] == said[0]
        return said[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The uninterrupted run."""
    runs = Runs(tmp_path_factory.mktemp("whole"), corpus)
    assert runs() == [0, 0], runs.log
    assert len(state_of(runs.job, STEPS)) == RANKS
    assert [row["step"] for row in metrics_of(runs.job)] == list(range(1, STEPS + 1))
    return runs.job


WORKERS = "--data.num_workers=2"
VALIDATION = ("--validation.enable=true", "--validation.freq=5")
SAMPLES = ("--generation.freq=5", '--generation.prompts=["ab"]', "--generation.max_new_tokens=4")
STOPS = {
    # the vote of a step begins when its batch has arrived; a later event ends the step after it
    "loading, with workers": (Event("loading", 11), 6, (WORKERS,)),
    "waiting for a worker": (Event("reading sequences", 11, "parent"), 6, ("--data.num_workers=1",)),
    "waiting for a rank": (Event("accumulating", 10, "peer", rank=0), 6, ()),
    "the first step": (Event("loading", 1), 1, ()),
    "between two micro-batches": (Event("accumulating", 10), 6, ()),
    "validation": (Event("accumulating", 12), 6, VALIDATION),
    "sampling": (Event("sampling", 3), 6, SAMPLES),
    "SIGUSR1": (Event("accumulating", 9, "SIGUSR1"), 6, ()),
    "SIGINT, validation": (Event("accumulating", 12, "SIGINT"), 6, VALIDATION),
    "twice": (Event("accumulating", 10, "twice"), 6, ()),
    "a synchronous save": (Event("saving", 1, "in flight"), 5, ("--checkpoint.async_mode=disabled",)),
    "a file": (Event("accumulating", 10, "file"), 6, ()),
}


@pytest.mark.parametrize("name", sampled(STOPS, {"waiting for a rank"}))
def test_one_rank_is_told(whole: Job, tmp_path: Path, corpus: Path, name: str) -> None:
    event, step, overrides = STOPS[name]
    runs = Runs(tmp_path, corpus, *overrides)
    assert runs(event) == [75, 75], runs.log
    if name == "waiting for a worker":  # which reads up to twelve micro-batches ahead
        step = runs.stopped()
        assert 1 <= step <= 6
    assert runs.stopped() == step
    assert history(runs.job) == history(whole)[:step]
    assert not (runs.job.folder / "STOP").exists()
    assert runs() == [0, 0], runs.log
    assert f"resumed from {runs.job.folder}/checkpoint/step-{step}\n" in runs.log
    assert_same(runs.job, whole)


@pytest.mark.full
def test_a_save_in_flight_becomes_whole_and_so_does_the_step_that_was_reached(
    whole: Job, tmp_path: Path, corpus: Path
) -> None:
    runs = Runs(tmp_path, corpus)
    assert runs(Event("saving", 1, "in flight")) == [75, 75], runs.log
    step = runs.stopped()
    assert runs.saved == [4, step]
    assert step in (5, 6)
    assert runs() == [0, 0], runs.log
    assert_same(runs.job, whole)


@pytest.mark.full
def test_a_whole_process_group_is_told(whole: Job, tmp_path: Path, corpus: Path) -> None:
    """Loader workers get the signal, too, and have to survive it: the step may still need them."""
    runs = Runs(tmp_path, corpus, WORKERS)
    group = [Event("loading", 11, "group", rank) for rank in range(RANKS)]
    assert runs(*group) == [75, 75], runs.log
    assert runs.stopped() == 6
    assert runs() == [0, 0], runs.log
    assert_same(runs.job, whole)


@pytest.mark.full
def test_sigusr2_saves_and_goes_on(whole: Job, tmp_path: Path, corpus: Path) -> None:
    runs = Runs(tmp_path, corpus)
    assert runs(Event("loading", 3, "SIGUSR2"), Event("accumulating", 10, "SIGUSR2")) == [0, 0], runs.log
    assert runs.saved == [2, 4, 6, 8]
    assert_same(runs.job, whole)


@pytest.mark.full
def test_too_late_to_stop_is_done(whole: Job, tmp_path: Path, corpus: Path) -> None:
    """In the last step there is nothing left to stop."""
    runs = Runs(tmp_path, corpus)
    assert runs(Event("accumulating", 2 * STEPS)) == [0, 0], runs.log
    assert_same(runs.job, whole)


@pytest.mark.full
def test_a_stop_in_every_run(whole: Job, tmp_path: Path, corpus: Path) -> None:
    """Each run gets the signal in its first step, and takes that step."""
    runs = Runs(tmp_path, corpus, WORKERS)
    for step in (1, 2):
        assert runs(Event("loading", 1)) == [75, 75], runs.log
        assert runs.saved[-1] == step
    assert runs() == [0, 0], runs.log
    assert_same(runs.job, whole)


# ---- a stop that cannot be saved


@pytest.mark.parametrize("mode", [full("async"), full("disabled")])
def test_a_stop_whose_save_fails_is_3(whole: Job, tmp_path: Path, corpus: Path, mode: str) -> None:
    runs = Runs(tmp_path, corpus, f"--checkpoint.async_mode={mode}")
    codes = runs(Event("loading", 11), Event("writing", 2, "disk full"))
    assert runs.saved == [4], runs.log
    assert "No space left on device" in runs.log
    assert codes == [3, 3], runs.log
    assert "which is saved" not in runs.log
    assert runs() == [0, 0], runs.log
    assert_same(runs.job, whole)


# ---- before the first step


EARLY = {
    "tokenising": Event("tokenising", 1, rank=0),
    "opening the data": Event("opening the data", 1),
    "choosing a checkpoint": Event("choosing a checkpoint", 1, rank=0),
}


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(EARLY, {"tokenising"}))
def test_before_the_first_step_the_rank_that_is_told_ends(whole: Job, tmp_path: Path, name: str) -> None:
    """The other ranks end later: the launcher reports the exit code of the rank that ends first."""
    runs, event = Runs(tmp_path, write_corpus(tmp_path)), EARLY[name]
    codes = runs(event)
    assert codes[event.rank] == 75, runs.log
    assert codes[1 - event.rank] in (1, 75), runs.log
    assert not runs.saved
    assert runs() == [0, 0], runs.log
    assert_same(runs.job, whole)


@pytest.mark.full
def test_while_a_checkpoint_is_read(whole: Job, tmp_path: Path, corpus: Path) -> None:
    runs = Runs(tmp_path, corpus)
    assert runs(Event("loading", 11)) == [75, 75], runs.log
    codes = runs(Event("reading a checkpoint", 1))
    assert codes[1] == 75, runs.log
    assert codes[0] in (1, 75), runs.log
    assert runs() == [0, 0], runs.log
    assert_same(runs.job, whole)


# ---- controls


@pytest.mark.full
@pytest.mark.parametrize("loss", ["lose update", "lose a sequence"])
def test_control_a_resume_that_loses_one_step_is_noticed(
    whole: Job, tmp_path: Path, corpus: Path, loss: str
) -> None:
    runs = Runs(tmp_path, corpus)
    lost = [Event("opening the data", 1, loss, rank) for rank in range(RANKS)]
    assert runs(Event("loading", 11), *(lost if loss == "lose update" else [])) == [75, 75], runs.log
    assert runs.stopped() == 6
    assert history(runs.job) == history(whole)[:6]
    assert runs(*(lost if loss == "lose a sequence" else [])) == [0, 0], runs.log
    assert [row["step"] for row in metrics_of(runs.job)] == list(range(1, STEPS + 1))
    assert all(a != b for a, b in zip(history(runs.job)[6:], history(whole)[6:]))
    assert state_of(runs.job, STEPS) != state_of(whole, STEPS)
