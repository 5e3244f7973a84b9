"""The metrics of detailed reports and clipping by tensor are equal on every layout within rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import make_job, metrics_of
from tests.support.layouts import Part, combined
from tests.support.runs import FOUR_MICRO_BATCHES
from tests.support.tiers import full
from titanlite import mesh
from titanlite.job import Job
from titanlite.metrics import parameters
from titanlite.parallel import clip
from titanlite.train import train

KEYS = [
    "--training.steps=4",
    "--training.clip=tensor",
    "--metrics.detail_freq=1",
    "--model.overrides.tie_word_embeddings=false",  # for pipeline parallel
    "--model.overrides.head_dim=16",  # float8 needs multiples of 16
    FOUR_MICRO_BATCHES,
]
LAYOUTS = {
    "dp_shard": combined("dp_shard"),
    "dp_shard 4": Part(4, []),
    "dp_replicate": combined("dp_replicate"),
    "dp_replicate 2 x dp_shard 2": combined("dp_replicate", "dp_shard"),
    "tp": combined("tp"),
    "tp 2 x dp_shard 2": combined("tp", "dp_shard"),
    "tp, compile": combined("tp", "compile"),
    "cp": combined("cp"),
    "pp": combined("pp"),
    "pp 2 x tp 2": combined("pp", "tp"),
    "pp 2 x dp_shard 2, interleaved": combined("pp interleaved", "dp_shard"),
    "CPU offload, dp_shard": combined("dp_shard", "CPU offload"),
    "CPU offload": combined("CPU offload"),
    "float8 tensorwise, dp_shard": combined("dp_shard", "float8 tensorwise"),
}


def train_on_rank(folder: Path, corpus: Path, part: Part, name: str) -> None:
    """Train with clipping by tensor from the third step on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "GLOBAL_STEPS", 2)
        train(make_job(folder, corpus, *KEYS, *part.keys, name=name, world_size=part.ranks))


def count_copies(*args: Any) -> None:
    """Train, and count each copy of a replicated weight as if it were another shard."""
    with pytest.MonkeyPatch.context() as patch:
        ranks_and_copies = mesh.num_ranks_and_copies
        patch.setattr(parameters, "num_ranks_and_copies", lambda p: (ranks_and_copies(p)[0], 1))
        train_on_rank(*args)


def table_of(job: Job) -> list[dict[str, Any]]:
    """The lines of parameters.jsonl, in the order of names."""
    lines = (job.folder / "parameters.jsonl").read_text().splitlines()
    return [dict(sorted(json.loads(line)["parameters"].items())) for line in lines]


def assert_equal(job: Job, alone: Job) -> None:
    for step, (ours, theirs) in enumerate(zip(table_of(job), table_of(alone), strict=True), 1):
        assert ours.keys() == theirs.keys()
        for name, numbers in theirs.items():
            assert ours[name] == pytest.approx(numbers, rel=2e-3), f"{name} in step {step}"
    for ours, theirs in zip(metrics_of(job), metrics_of(alone), strict=True):
        detailed = [key for key in theirs if key.startswith("norms/") or "noise" in key or "clipped" in key]
        for key in detailed:
            expected = theirs[key]
            if isinstance(expected, float):
                # The signal is a small difference of two sums.
                expected = pytest.approx(expected, rel=1e-2, abs=1e-3 if "noise" in key else 0)
            assert ours[key] == expected, key
        assert len(detailed) >= 9
    assert any(0 < line["train/clipped_tensors"] < 1 for line in metrics_of(alone)), "tests no mixture"


@pytest.mark.full
@pytest.mark.parametrize("name", [*list(LAYOUTS)[:1], *map(full, list(LAYOUTS)[1:])])
def test_details_and_clipping_by_tensor_are_those_of_one_process(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str
) -> None:
    part = LAYOUTS[name]
    same = [key for key in part.keys if key.startswith(("--model", "--float8", "--compile"))]
    run_on(1, train_on_rank, tmp_path, corpus, Part(1, same), "alone")
    run_on(part.ranks, train_on_rank, tmp_path, corpus, part, "ranks")
    alone = make_job(tmp_path, corpus, *KEYS, name="alone")
    assert_equal(make_job(tmp_path, corpus, *KEYS, name="ranks"), alone)
    if name == "dp_replicate":
        run_on(part.ranks, count_copies, tmp_path, corpus, part, "copies")
        with pytest.raises(AssertionError, match="in step 1"):
            assert_equal(make_job(tmp_path, corpus, *KEYS, name="copies"), alone)
