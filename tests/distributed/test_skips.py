"""A run that skips sequences for good trains on all others in their order: on one rank and on several, and
after a resume whose configuration does not name the skipped ranges any more. It equals, to the bit, a run
whose order was made number by number."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.jobs import make_job, metrics_of
from tests.support.non_finite import bad_steps
from tests.support.runs import (
    FOUR_MICRO_BATCHES,
    assert_same,
    assert_same_run,
    history,
    run_in_hops,
    train_on_rank,
    weights_sha,
)
from tests.support.tiers import full
from titanlite.checkpoint.state import TrainState, read_train
from titanlite.config.component import ConfigError
from titanlite.data.batch import sequence_hash
from titanlite.data.dataset import MicroBatch
from titanlite.data.loader import MicroBatches
from titanlite.job import Job
from titanlite.train import train

STEPS, BATCH = 8, 8
RANGES = [[8, 11], [18, 18], [30, 50], [52, 53], [500, 600]]  # a step's start, inside, more than a step
SKIP = f"--data.skip_sequences={RANGES}"


def wanted_numbers() -> Iterator[int]:
    return (n for n in count() if not any(first <= n <= last for first, last in RANGES))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The uninterrupted run."""
    return run_in_hops(tmp_path_factory.mktemp("whole"), corpus, [STEPS], SKIP, name="whole")


def test_each_step_has_the_next_sequences_that_are_not_skipped(whole: Job) -> None:
    sequences = whole.data.build(whole.tokenizer.build(), seq_len=whole.training.seq_len, seed=0)
    numbers = wanted_numbers()
    for line in metrics_of(whole):
        step = list(islice(numbers, BATCH))
        hashes = [sequence_hash(n, sequences.training(np.array([n]))[0].tokens) for n in step]
        assert line["data/batch_sha"] == f"{sum(hashes) % 2**64:016x}"
        passed = [n for first, last in RANGES for n in range(first, last + 1) if n <= step[-1]]
        assert line["data/skipped_sequences"] == len(passed)


def test_it_equals_a_run_in_an_order_that_was_made_number_by_number(
    whole: Job, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def number_by_number(order: MicroBatches) -> Iterator[MicroBatch]:
        numbers = wanted_numbers()
        while True:
            yield MicroBatch(list(islice(numbers, order.micro_batch_size)))

    monkeypatch.setattr(MicroBatches, "__iter__", number_by_number)
    reference = run_in_hops(tmp_path, corpus, [STEPS])
    assert history(reference) == history(whole)
    assert weights_sha(reference, STEPS) == weights_sha(whole, STEPS)


def test_control_a_run_that_skips_nothing_differs(whole: Job, tmp_path: Path, corpus: Path) -> None:
    plain = run_in_hops(tmp_path, corpus, [2])
    assert history(plain)[0] == history(whole)[0]
    assert history(plain)[1] != history(whole)[1]
    assert all("data/skipped_sequences" not in line for line in metrics_of(plain))


def test_a_checkpoint_keeps_what_is_skipped(
    whole: Job, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second start does not name the ranges any more, and the last one names them again. The first loses
    a step, as if it had been killed."""
    job = run_in_hops(tmp_path, corpus, [3, 4], SKIP)
    shutil.rmtree(job.folder / "checkpoint/step-4")
    capsys.readouterr()
    run_in_hops(tmp_path, corpus, [6])
    total = sum(last - first + 1 for first, last in RANGES)
    log = capsys.readouterr().err
    assert f"skipped for good: sequences 8 to 11, 18, 30 to 50 (and 2 more); {total} in all\n" in log
    assert_same(run_in_hops(tmp_path, corpus, [STEPS], SKIP, "--data.num_workers=1"), whole)


def test_control_ranges_that_are_lost_on_resume_are_noticed(
    whole: Job, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = TrainState.restore
    monkeypatch.setattr(
        TrainState, "restore", lambda state, values: restore(state, {**values, "skipped": []})
    )
    hops = run_in_hops(tmp_path, corpus, [2], SKIP)
    run_in_hops(tmp_path, corpus, [4])
    assert [a == b for a, b in zip(history(hops), history(whole))] == [True, True, True, False]


@pytest.mark.full
@pytest.mark.parametrize("path", [((STEPS, 2),), full(((2, 4), (5, 1), (STEPS, 2)))], ids=str)
def test_any_number_of_ranks_skips_the_same(
    whole: Job, tmp_path: Path, corpus: Path, run_on, path: tuple[tuple[int, int], ...]
) -> None:
    for i, (steps, world_size) in enumerate(path):
        overrides = [FOUR_MICRO_BATCHES, f"--training.steps={steps}", *([SKIP] if i == 0 else [])]
        run_on(world_size, train_on_rank, tmp_path, corpus, overrides, "ranks", world_size)
    assert_same_run(make_job(tmp_path, corpus, name="ranks"), whole, STEPS)


def test_the_guard_names_the_sequences_of_a_skipped_step(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bad_steps({2}):
        train(make_job(tmp_path, corpus, SKIP, "--training.steps=3", "--checkpoint.enable=false"))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "step 2 is skipped" in line)
    assert "its sequences are 12 to 20 " in line, "8 to 11 and 18 are skipped"


# ---- ranges that come too late


def test_sequences_that_were_trained_on_cannot_be_skipped(whole: Job, tmp_path: Path, corpus: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "run")
    steps = f"--training.steps={STEPS + 1}"
    more = f"--data.skip_sequences={[*RANGES, [51, 60], [85, 95], [700, 700]]}"
    position = next(islice(wanted_numbers(), STEPS * BATCH - 1, None)) + 1
    assert position == 92
    with pytest.raises(ConfigError) as error:
        train(make_job(tmp_path, corpus, more, steps))
    assert str(error.value) == (
        "the run has already trained on sequences 51, 54 to 60, 85 to 91: after step 8 it continues with "
        "sequence 92. Name later sequences only, or go back to a step before them with --checkpoint.load_step"
    )
    assert error.value.key == "data.skip_sequences"
    with pytest.raises(
        ConfigError, match="sequences 51, 54 to 59: after step 4 it continues with sequence 60"
    ):
        train(make_job(tmp_path, corpus, more, steps, "--checkpoint.load_step=4"))
    assert train(make_job(tmp_path, corpus, "--data.skip_sequences=[[92, 92]]", steps)) == 0
    assert read_train(tmp_path / "run/checkpoint/step-9")["sequences"] == 92 + 1 + BATCH


def test_epochs_count_skipped_sequences(tmp_path: Path, corpus: Path) -> None:
    """A run that jumps over sequences comes to a source's next epoch earlier."""
    limit = "--data.sources.1.max_epochs=2"
    with pytest.raises(ConfigError, match=r"would read 2\.08 epochs, more than max_epochs = 2"):
        train(make_job(tmp_path, corpus, limit, SKIP))
    assert train(make_job(tmp_path, corpus, limit)) == 0


def train_with_own_ranges(folder: Path, corpus: Path) -> str:
    """Train on one of two ranks, each with another range. Returns the error."""
    job = make_job(folder, corpus, f"--data.skip_sequences=[[{dist.get_rank()}, 9]]", world_size=2)
    with pytest.raises(ConfigError) as error:
        train(job)
    return str(error.value)


def test_ranks_must_skip_the_same(tmp_path: Path, corpus: Path, run_on) -> None:
    errors = run_on(2, train_with_own_ranges, tmp_path, corpus)
    assert (
        errors
        == ["data, tokenizer or model differ: data.skip_sequences is [[1, 9]] on rank 1, [[0, 9]] on rank 0"]
        * 2
    )
