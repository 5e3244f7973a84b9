"""All ranks skip a step with NaN or a large gradient on one rank, on every layout: the run is bit-identical
to a run whose step changed nothing, also with two resumes in between."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import archived, shards
from tests.support.jobs import make_job, metrics_in, metrics_of
from tests.support.layouts import Part, combined
from tests.support.non_finite import FAULTS, OUTLIERS, WATCHED, bad_steps
from tests.support.runs import FOUR_MICRO_BATCHES
from tests.support.tiers import full
from titanlite.errors import Diverged
from titanlite.train import train

STEPS = 6
BASE = [
    f"--training.steps={STEPS}",
    "--checkpoint.interval=100",
    FOUR_MICRO_BATCHES,
    "--model.overrides.tie_word_embeddings=false",
]
LAYOUTS = {
    "dp_shard 2": combined("dp_shard"),
    "dp_shard 4": Part(4, ["--training.local_batch_size=1"]),
    "tp 2": combined("tp"),
    "cp 2": combined("cp"),
    "pp 2": combined("pp"),
    "pp 2 x tp 2": combined("pp", "tp"),
    "dp_replicate 2 x dp_shard 2": combined("dp_replicate", "dp_shard"),
    "compiled": Part(1, ["--compile.enable"]),
    "dp_shard 2, compiled": combined("dp_shard", "compile"),
    "CPU offload, dp_shard 2": combined("dp_shard", "CPU offload"),
    "dp_shard 2, Muon": combined("dp_shard", "Muon"),
    "dp_shard 2 x tp 2, NorMuon": Part(4, [*combined("tp", "Muon").keys, "--optimizer.normalize=neuron"]),
    "dp_shard 2, AdamW with 8-bit state": combined("dp_shard", "AdamW with 8-bit state"),
    "AdamW with bfloat16 state": Part(1, ["--optimizer.state_dtype=bfloat16"]),
    "dp_shard 2, Lion": Part(2, ['--job.imports=["tests.examples.lion"]', "--optimizer.name=lion"]),
}


def on_rank(folder: Path, corpus: Path, part: Part, fault: str, stops: tuple[int, ...]) -> None:
    """Train with bad steps 2, 3 and 5, and resume after each step of `stops`, at which a signal stops the
    run."""
    for stop in (*stops, 0):
        torch._dynamo.reset()  # after several models in a process, the compiler would use symbolic sizes
        job = make_job(folder, corpus, *BASE, *part.keys, name=fault, world_size=part.ranks)
        with bad_steps({2, 3, 5}, fault, signal_at=stop - 1):
            assert train(job) == (75 if stop else 0)


ONE_FAULT = {"pp 2 x tp 2", "dp_shard 4", "dp_replicate 2 x dp_shard 2", "CPU offload, dp_shard 2"}
ONE_FAULT |= {"compiled", "dp_shard 2, compiled"}
ONE_FAULT |= {name for name in LAYOUTS if name.endswith(("uon", "state", "Lion"))}
CASES = [full("dp_shard 2", FAULTS[:1])]
CASES += [full(name, FAULTS[:1] if name in ONE_FAULT else FAULTS) for name in LAYOUTS]


@pytest.mark.parametrize(("name", "faults"), CASES, ids=str)
def test_a_bad_step_on_one_rank_does_nothing_on_any(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str, faults: tuple[str, ...]
) -> None:
    part = LAYOUTS[name]
    for fault in ("nothing", *faults):
        stops = (3, 5) if fault == "gradient" and name != "pp 2" else ()
        run_on(part.ranks, on_rank, tmp_path, corpus, part, fault, stops)
        step = f"checkpoint/step-{STEPS}"
        actual, wanted = shards(tmp_path / fault / step), shards(tmp_path / "nothing" / step)
        assert wanted
        assert actual == wanted, fault
    steps = metrics_of(make_job(tmp_path, corpus, name="gradient"))
    assert [line["train/skipped_steps"] for line in steps] == [0, 1, 2, 2, 3, 3]


def diverging(folder: Path, corpus: Path, name: str, steps: Collection[int]) -> str:
    """Train on two ranks, with a checkpoint of every step and bad `steps`. Returns the error."""
    job = make_job(folder, corpus, *BASE, "--checkpoint.interval=1", name=name, world_size=2)
    with bad_steps(steps):
        try:
            train(job)
        except Diverged as e:
            return str(e)
    return ""


@pytest.mark.full
def test_all_ranks_go_back_to_the_healthy_checkpoint(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any]
) -> None:
    """The same command, then without bad steps, equals a run that never diverged."""
    errors = run_on(2, diverging, tmp_path, corpus, "diverged", range(5, STEPS + 1))
    assert [re.search("goes back to step (.),", error)[1] for error in errors] == ["3", "3"]
    assert archived(tmp_path / "diverged") == [[4, STEPS]]
    for name in ("diverged", "never"):
        assert run_on(2, diverging, tmp_path, corpus, name, ()) == ["", ""]
    ours, never = (shards(tmp_path / f"{name}/checkpoint/step-{STEPS}") for name in ("diverged", "never"))
    assert ours == never != shards(tmp_path / f"diverged/checkpoint/archived-0/step-{STEPS}")


def on_rank_with_outliers(folder: Path, corpus: Path, part: Part, *keys: str) -> None:
    """Train with bad steps 14, 15 and 17 of each kind; those of random tokens with a resume in a streak, and
    another one soon after it."""
    for fault in ("nothing", *OUTLIERS):
        for last in (14, 16, 20) if fault == "random tokens" else (20,):
            every = [*BASE, *WATCHED, *part.keys, f"--training.steps={last}", *keys]
            with bad_steps({14, 15, 17}, fault):
                train(make_job(folder, corpus, *every, name=fault, world_size=part.ranks))


@pytest.mark.full  # tests/unit/metrics/test_outliers.py is in the default tier
@pytest.mark.parametrize(
    "name",
    [
        "dp_shard 2",
        "dp_shard 4",
        "dp_replicate 2 x dp_shard 2",
        "tp 2",
        "cp 2",
        "pp 2 x tp 2",
        "CPU offload, dp_shard 2",
    ],
)
def test_an_outlier_does_nothing_on_any_rank(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str
) -> None:
    """The large gradient is in one replica's copy alone: its ranks have another norm than the others."""
    part = LAYOUTS[name]
    run_on(part.ranks, on_rank_with_outliers, tmp_path, corpus, part)
    wanted = shards(tmp_path / "nothing/checkpoint/step-20")
    for fault in OUTLIERS:
        assert shards(tmp_path / fault / "checkpoint/step-20") == wanted != {}, fault
        counts = [line["train/skipped_steps"] for line in metrics_in(tmp_path / fault)]
        assert counts == [0] * 13 + [1, 2, 2, 3, 3, 3, 3]


@pytest.mark.full
def test_control_a_run_that_admits_outliers_differs(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any]
) -> None:
    run_on(2, on_rank_with_outliers, tmp_path, corpus, LAYOUTS["dp_shard 2"], "--guard.skip_sigma=0")
    wanted = shards(tmp_path / "nothing/checkpoint/step-20")
    for fault in OUTLIERS:
        assert shards(tmp_path / fault / "checkpoint/step-20") != wanted, fault
