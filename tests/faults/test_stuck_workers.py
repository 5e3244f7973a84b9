"""A loader worker that is stopped, like a worker whose file system hangs. A run on one rank that is told to
stop saves its last finished step. With several ranks, the stuck rank reports which worker it waits for, and
the run ends in time. The resumed run equals an uninterrupted one to the bit. A worker that is only slow
changes nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Fault, Trainer
from tests.support.jobs import make_job
from tests.support.runs import history, state_of
from titanlite.checkpoint.commit import list_committed
from titanlite.job import Job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks workers")
STEPS = 8
OPTIONS = ["--data.num_workers=1", "--training.local_batch_size=2"]
WAIT = "titanlite.runtime.data_wait:DataWait.__call__"
READ = "titanlite.data.dataset:SequenceDataset.__getitems__"  # in the worker

LONG_WAIT = Fault(WAIT, when="instead", call=0, during="start", rank=-1, action="wait_for_an_hour")
until_given_up = pytest.mark.parametrize(
    ("hurry", "timeout_s"),
    [
        pytest.param([LONG_WAIT], 600, id="an hour is added", marks=pytest.mark.full),
        # The real wait; a shorter one would end healthy runs on a busy machine.
        pytest.param([], 15, id="a timeout of 15 s", marks=pytest.mark.full),
    ],
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("trainer"))


class Runs:
    """Runs of the tiny job in one folder. Each resumes from the run before it."""

    def __init__(self, trainer: Trainer, folder: Path, corpus: Path, size: int):
        self.job: Job = make_job(folder, corpus, *OPTIONS, world_size=size)
        self._trainer, self._size = trainer, size
        self._arguments = [f"--job.dump_folder={self.job.folder}", f"--data.cache_dir={corpus / 'cache'}"]
        self._toml = folder / "job.toml"

    def __call__(self, *faults: Fault, timeout_s: int = 600) -> Any:
        arguments = [*self._arguments, *OPTIONS, f"--comm.train_timeout_seconds={timeout_s}"]
        return self._trainer.run(self._toml, arguments, self._size, faults)

    @property
    def saved(self) -> list[int]:
        return [step for step, _ in list_committed(self.job.folder / "checkpoint")]

    def result(self) -> Any:
        """The numbers of every step, and the bytes of the last state."""
        return history(self.job), state_of(self.job, STEPS)


@pytest.fixture(scope="module")
def whole(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[int, Any]:
    """Results of uninterrupted runs, by number of ranks."""
    results = {}
    for size in (1, 2):
        runs = Runs(trainer, tmp_path_factory.mktemp(f"whole{size}"), corpus, size)
        assert runs().exits == [0] * size
        results[size] = runs.result()
    return results


@pytest.mark.full
def test_one_rank_that_is_told_to_stop_saves_its_last_finished_step(
    trainer: Trainer, tmp_path: Path, corpus: Path, whole: dict[int, Any]
) -> None:
    """Two of four micro-batches of step 6 have arrived; the resumed run gets them again."""
    runs = Runs(trainer, tmp_path, corpus, 1)
    stuck = Fault(READ, call=5 * 4 + 3, during="start", action="stop")
    told = Fault(WAIT, during="start", action="terminate")
    outcome = runs(stuck, told)
    assert outcome.exits == [75], outcome.logs[0]
    assert runs.saved in ([4, 5], [4])  # the one before, if the worker was stopped before it had sent all
    assert f"stopped after step {runs.saved[-1]}, which is saved" in outcome.logs[0]
    assert runs().exits == [0]
    assert runs.result() == whole[1]


@until_given_up
def test_one_rank_that_nobody_tells_saves_its_last_finished_step_and_ends(
    trainer: Trainer, tmp_path: Path, corpus: Path, whole: dict[int, Any], hurry: list[Fault], timeout_s: int
) -> None:
    runs = Runs(trainer, tmp_path, corpus, 1)
    stuck = Fault(READ, call=6 * 4 + 1, during="start", action="stop")
    outcome = runs(stuck, *hurry, timeout_s=timeout_s)
    assert outcome.exits == [1], outcome.logs[0]
    assert runs.saved in ([4, 6], [4, 5])
    assert re.search(r"rank 0: loader worker 0 \(pid \d+\) has delivered no batch for \d+ s", outcome.logs[0])
    assert runs().exits == [0]
    assert runs.result() == whole[1]


def test_nothing_is_saved_before_the_first_step(trainer: Trainer, tmp_path: Path, corpus: Path) -> None:
    runs = Runs(trainer, tmp_path, corpus, 1)
    stuck = Fault(READ, during="start", action="stop")
    outcome = runs(stuck, Fault(WAIT, during="start", action="terminate"))
    assert outcome.exits == [75], outcome.logs[0]
    assert "stopped while waiting for data; nothing is lost" in outcome.logs[0]
    assert runs.saved == []


@pytest.mark.full
@until_given_up
def test_several_ranks_end_in_time_and_the_stuck_one_names_its_worker(
    trainer: Trainer, tmp_path: Path, corpus: Path, whole: dict[int, Any], hurry: list[Fault], timeout_s: int
) -> None:
    runs = Runs(trainer, tmp_path, corpus, 2)
    stuck = Fault(READ, call=5 * 2 + 1, during="start", rank=1, action="stop")
    outcome = runs(stuck, *hurry, timeout_s=timeout_s)
    assert outcome.exits == [1, 1], outcome.logs
    assert re.search(r"rank 1: loader worker 0 \(pid \d+\) has delivered no batch for \d+ s", outcome.logs[1])
    assert "given no batch" not in outcome.logs[0]
    assert runs.saved == [4]
    again = runs()
    assert (again.exits, again.resumed) == ([0, 0], [4])
    assert runs.result() == whole[2]


@pytest.mark.full
def test_a_worker_that_is_slow_changes_nothing(
    trainer: Trainer, tmp_path: Path, corpus: Path, whole: dict[int, Any]
) -> None:
    runs = Runs(trainer, tmp_path, corpus, 2)
    slow = Fault(READ, call=9, during="start", rank=1, action="let_the_run_wait")
    waited = Fault(WAIT, call=0, during="start", rank=1, action="nothing")
    outcome = runs(slow, waited)
    assert outcome.exits == [0, 0], outcome.logs
    assert {(1, READ), (1, WAIT)} <= set(outcome.fired)
    assert runs.result() == whole[2]
