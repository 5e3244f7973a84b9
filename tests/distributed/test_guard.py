"""A step with NaN on one rank is skipped by all ranks, on every layout: the run equals, bit for bit, one
whose step did nothing, with two resumes in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import shards
from tests.support.jobs import make_job, metrics_of
from tests.support.layouts import Part, combined
from tests.support.non_finite import FAULTS, bad_steps
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
    "shard 2": combined("dp_shard"),
    "shard 4": Part(4, ["--training.local_batch_size=1"]),
    "tensor 2": combined("tp"),
    "context 2": combined("cp"),
    "pipeline 2": combined("pp"),
    "pipeline 2 x tensor 2": combined("pp", "tp"),
    "replicate 2 x shard 2": combined("dp_replicate", "dp_shard"),
    "compiled": Part(1, ["--compile.enable"]),
    "shard 2, compiled": combined("dp_shard", "compile"),
    "CPU offload, shard 2": combined("dp_shard", "CPU offload"),
}


def on_rank(folder: Path, corpus: Path, part: Part, fault: str, stops: tuple[int, ...]) -> None:
    """A run with bad steps 2, 3 and 5; it is resumed after each step of `stops`."""
    for last in (*stops, STEPS):
        torch._dynamo.reset()  # a process trains one model; after several, sizes are symbols to the compiler
        keys = [*BASE, *part.keys, f"--training.steps={last}"]
        with bad_steps({2, 3, 5}, fault):
            try:
                train(make_job(folder, corpus, *keys, name=fault, world_size=part.ranks))
            except Diverged:  # its last step was skipped; it is saved all the same
                assert last == 3


ONE_FAULT = {"pipeline 2 x tensor 2", "shard 4", "replicate 2 x shard 2", "CPU offload, shard 2"}
ONE_FAULT |= {"compiled", "shard 2, compiled"}
DEFAULT_TIER = {"shard 2", "pipeline 2"}


@pytest.mark.parametrize("name", [name if name in DEFAULT_TIER else full(name) for name in LAYOUTS])
def test_a_bad_step_on_one_rank_does_nothing_on_any(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str
) -> None:
    part = LAYOUTS[name]
    faults = FAULTS[:1] if name in ONE_FAULT else FAULTS
    for fault in ("nothing", *faults):
        stops = (3, 4) if fault == "gradient" and name != "pipeline 2" else ()
        run_on(part.ranks, on_rank, tmp_path, corpus, part, fault, stops)
        step = f"checkpoint/step-{STEPS}"
        found, wanted = shards(tmp_path / fault / step), shards(tmp_path / "nothing" / step)
        assert wanted
        assert found == wanted, fault
    steps = metrics_of(make_job(tmp_path, corpus, name="gradient"))
    assert [line["train/skipped_steps"] for line in steps] == [0, 1, 2, 2, 3, 3]
