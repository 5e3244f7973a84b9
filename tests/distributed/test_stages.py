"""Runs in stages: the sequences, the learning rate and the batch of every step are those of its place in the
data order, however often the run stops, is killed or changes its ranks; stages that lie in the future may
change, those in the past may not."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Fault, Trainer
from tests.support.jobs import make_job, metrics_of, tiny_arguments
from tests.support.runs import (
    CP,
    PP,
    TP,
    assert_same,
    assert_same_run,
    run_in_hops,
    train_on_rank,
)
from tests.support.staged import STAGED, STEPS, assert_no_repeats, opened, sha_of
from tests.support.tiers import full
from titanlite.checkpoint.state import read_train
from titanlite.job import Job, load_job
from titanlite.train import train

FIRSTS = [0, 4, 8, 12, 20, 36, 52, 68, 76, 84, 92, 100]  # positions before the steps, and after the last one
SIZES = [4, 4, 4, 8, 16, 16, 16, 8, 8, 8, 8]
FACTORS = [0.5 * 0.5, 0.5, 0.5, 0.5**0.5 * 13 / 14]  # of the ramp and of two steps of warmup
FACTORS += [12 / 14, 11 / 14, 10 / 14, 0.5, 0.4, 0.3, 0.2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The uninterrupted run."""
    return run_in_hops(tmp_path_factory.mktemp("whole"), corpus, [STEPS], *STAGED, name="whole")


@pytest.mark.full
def test_every_step_has_the_batch_and_the_rate_of_its_place(whole: Job) -> None:
    lines, sequences = metrics_of(whole), opened(whole)
    assert [line["progress/sequences"] for line in lines] == FIRSTS[1:]
    assert [line["train/learning_rate"] for line in lines] == pytest.approx([3e-3 * f for f in FACTORS])
    assert [line["data/batch_sha"] for line in lines] == [
        sha_of(sequences, *range(first, first + size)) for first, size in zip(FIRSTS, SIZES)
    ]
    paths = [sequences.origin(n)[0].shards.path for n in range(FIRSTS[-1])]
    assert len(set(paths[:30])) == len(set(paths[60:])) == 1 < len(set(paths[30:60]))
    assert_no_repeats(sequences, FIRSTS[-1])


def test_the_guard_compares_losses_of_one_stage(whole: Job) -> None:
    """The last stage begins with step 8 and has other sources."""
    train_json = read_train(whole.folder / "checkpoint" / f"step-{STEPS}")
    assert train_json["guard"]["spikes"]["steps"] == [8, 9, 10, 11]


HOPS = [
    [5, 8, STEPS],
    full([4, 5, 7, 8, STEPS]),
    full([1, 2, 3, 5, 6, 7, 9, STEPS]),
    full(list(range(1, STEPS + 1))),
]


@pytest.mark.parametrize("workers", [0, full(2)])
@pytest.mark.parametrize("hops", HOPS, ids=str)
def test_stops_at_the_edges_of_stages_change_nothing(
    whole: Job, tmp_path: Path, corpus: Path, hops: list[int], workers: int
) -> None:
    job = run_in_hops(tmp_path, corpus, hops, *STAGED, f"--data.num_workers={workers}")
    assert_same(job, whole)


@pytest.mark.full
def test_a_recorded_job_continues_the_run(whole: Job, tmp_path: Path, corpus: Path) -> None:
    run_in_hops(tmp_path, corpus, [5], *STAGED, name="run")
    job = load_job(tmp_path / "run/job.toml", [f"--training.steps={STEPS}"])
    assert [stage.until for stage in job.stages] == ["30 sequences", "60 sequences", "end"]
    assert train(job) == 0
    assert_same(job, whole)


HSDP = "--parallelism.data_parallel_replicate_degree=2"
ON_LAYOUTS = [
    [(4, 1, []), (5, 2, []), (7, 4, []), (8, 1, ["--training.local_batch_size=4"]), (STEPS, 2, [])],
    [(5, 2, [TP]), (8, 4, [HSDP]), (STEPS, 2, ["--training.local_batch_size=2"])],
    [(4, 2, [CP]), (7, 2, [PP]), (STEPS, 4, [PP, TP])],
    [(6, 4, [CP, HSDP]), (9, 2, ["--data.num_workers=2"]), (STEPS, 1, ["--training.local_batch_size=2"])],
]


@pytest.mark.full
@pytest.mark.parametrize("path", ON_LAYOUTS, ids=str)
def test_layouts_may_change_at_the_edges_of_stages(
    whole: Job, tmp_path: Path, corpus: Path, run_on: Callable[..., Any], path: list[Any]
) -> None:
    for steps, world_size, layout in path:
        overrides = [*STAGED, *layout, f"--training.steps={steps}"]
        run_on(world_size, train_on_rank, tmp_path, corpus, overrides, "layouts", world_size)
    job = make_job(tmp_path, corpus, *STAGED, name="layouts")
    assert_same_run(job, whole, STEPS)
    for key in ("train/learning_rate", "progress/sequences"):
        assert [line[key] for line in metrics_of(job)] == [line[key] for line in metrics_of(whole)]


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "seed"), [(1, 0), (1, 1), (1, 2), (2, 3)])
def test_kills_at_random_change_nothing(tmp_path: Path, corpus: Path, world_size: int, seed: int) -> None:
    """Each start of the program is killed before one of its next steps or in a save."""
    rng, trainer = random.Random(seed), Trainer(tmp_path / "trainer")
    keys = [*STAGED, f"--training.steps={STEPS}", "--checkpoint.interval=1"]
    path, *where = tiny_arguments(tmp_path, corpus, "whole")
    assert set(trainer.run(Path(path), [*where, *keys], world_size).exits) == {0}
    _, *where = tiny_arguments(tmp_path, corpus, "killed")
    num_kills = 0
    for _ in range(40):
        step = Fault("titanlite.data.loader:SequenceLoader.next_step", call=rng.randint(2, 4), during="start")
        save = Fault("commit:commit", call=rng.randint(1, 3), during="start")
        outcome = trainer.run(Path(path), [*where, *keys], world_size, [rng.choice([step, save])])
        num_kills += len(outcome.fired)
        if outcome.exits[0] == 0:
            break
    assert num_kills >= 3
    killed, whole = (make_job(tmp_path, corpus, *keys, name=name) for name in ("killed", "whole"))
    assert_same(killed, whole)


SKIPPED = [[26, 40], [56, 59], [60, 61], [75, 75]]  # over an edge, up to an edge and beyond it, in a stage


@pytest.mark.full
def test_skipped_sequences_at_the_edges_of_stages(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any]
) -> None:
    keys = [*STAGED, f"--data.skip_sequences={SKIPPED}"]
    whole = run_in_hops(tmp_path, corpus, [STEPS], *keys, name="whole")
    numbers = (n for n in count() if not any(first <= n <= last for first, last in SKIPPED))
    # The step after position 20 takes 20 to 25 and 41 to 50, so the next one begins in the stage "main".
    steps = [list(islice(numbers, size)) for size in [4, 4, 4, 8, 16, 16, 8, 8, 8, 8, 8]]
    assert [(step[0], step[-1]) for step in steps[4:7]] == [(20, 50), (51, 72), (73, 81)]
    sequences = opened(whole)
    lines = metrics_of(whole)
    assert [line["data/batch_sha"] for line in lines] == [sha_of(sequences, *step) for step in steps]
    assert lines[-1]["progress/remaining_tokens"] == 0
    left = sum(len(step) for step in steps[4:]) + sum(last - first + 1 for first, last in SKIPPED)
    assert lines[3]["progress/remaining_tokens"] == left * 32
    assert_same(run_in_hops(tmp_path, corpus, [4, 5, 6, 7, 9, STEPS], *keys), whole)
    run_on(2, train_on_rank, tmp_path, corpus, [*keys, f"--training.steps={STEPS}"], "two", 2)
    assert_same_run(make_job(tmp_path, corpus, *keys, name="two"), whole, STEPS)
