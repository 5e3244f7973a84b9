"""All ranks skip a step with NaN or a large gradient on one rank, on every layout: the run is bit-identical
to a run whose step changed nothing, also with two resumes in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import shards
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
    """Train with bad steps 2, 3 and 5, and resume after each step of `stops`."""
    for last in (*stops, STEPS):
        torch._dynamo.reset()  # after several models in a process, the compiler would use symbolic sizes
        keys = [*BASE, *part.keys, f"--training.steps={last}"]
        with bad_steps({2, 3, 5}, fault):
            try:
                train(make_job(folder, corpus, *keys, name=fault, world_size=part.ranks))
            except Diverged:  # the last step was skipped, but the run saves a checkpoint
                assert last == 3


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
        stops = (3, 4) if fault == "gradient" and name != "pp 2" else ()
        run_on(part.ranks, on_rank, tmp_path, corpus, part, fault, stops)
        step = f"checkpoint/step-{STEPS}"
        actual, wanted = shards(tmp_path / fault / step), shards(tmp_path / "nothing" / step)
        assert wanted
        assert actual == wanted, fault
    steps = metrics_of(make_job(tmp_path, corpus, name="gradient"))
    assert [line["train/skipped_steps"] for line in steps] == [0, 1, 2, 2, 3, 3]


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
