"""A probe gives the same statistics on every layout, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoints import shards
from tests.support.jobs import make_job, metrics_of
from tests.support.layouts import Part, combined
from tests.support.probes import BLOCK, HEAD, probed, same
from tests.support.runs import FOUR_MICRO_BATCHES, history
from tests.support.tiers import full
from titanlite.metrics.probe import probe_metrics
from titanlite.parallel import probe
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.train import train

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"tp": 2}),
    "dp_shard 2": (2, {}),
    "pp 2": (2, {"pp": 2}),
    "cp 2": (2, {"cp": 2}),
    "dp_replicate 2": (2, {"dp_replicate": 2}),
    "pp 2, interleaved": (2, {"pp": 2, "schedule": "Interleaved1F1B", "layers": 4}),
    "pp 2, zero bubble": (2, {"pp": 2, "schedule": "ZBVZeroBubble", "layers": 4}),
    "tp 2, compiled": (2, {"tp": 2, "compile": "aot_eager"}),
    "tp 2, compiled, activation checkpointing": (
        2,
        {"tp": 2, "compile": "aot_eager", "activation_checkpoint": "full"},
    ),
    "dp_shard 2, compiled": (2, {"compile": "aot_eager"}),
    "dp_shard 4": (4, {}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}),
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}),
    "cp 2 x dp_shard 2": (4, {"cp": 2}),
    "cp 4": (4, {"cp": 4}),  # a chunk has 12 tokens: the last 64 are on all ranks
}
DEFAULT_TIER = {"tp 2"}
CASES = [((name, True) if name in DEFAULT_TIER else full(name, True)) for name in LAYOUTS]
CASES += [full(name, False) for name in LAYOUTS if "cp" in name]  # attention without masks is another class


@pytest.mark.parametrize(("name", "with_documents"), CASES)
def test_a_layout_has_the_statistics_of_one_process(
    run_on: Callable[..., Any], name: str, with_documents: bool
) -> None:
    world_size, layout = LAYOUTS[name]
    wanted = probed(1, with_documents, {key: value for key, value in layout.items() if key == "layers"})
    results = run_on(world_size, probed, world_size, with_documents, layout)
    assert all(result == results[0] for result in results)
    assert same(results[0], wanted)
    metrics = probe_metrics(results[0])
    assert metrics["probe/attention_logit_max_head"] == f"{BLOCK} head {HEAD}"
    assert metrics["probe/dead_units_pct_block"] == BLOCK


FAULTS = {
    "heads and units without their rank": {"tp": 2},
    "maxima of one rank": {"tp": 2},
    "sums of one rank": {},
    "queries of the whole sequence": {"cp": 2},
}


def probed_with(fault: str) -> list[probe.BlockStatistics]:
    """The statistics of a probe on two ranks with a mistake."""
    reduce = dist.all_reduce

    def without(op: Any) -> Callable[..., None]:
        return lambda x, used=dist.ReduceOp.SUM: reduce(x, used) if used != op else None

    with pytest.MonkeyPatch.context() as patch:
        if fault == "heads and units without their rank":
            patch.setattr(probe.BlockRecorder, "_columns", lambda self, local, num: slice(0, local))
        if fault == "maxima of one rank":
            patch.setattr(probe.dist, "all_reduce", without(dist.ReduceOp.MAX))
        if fault == "sums of one rank":
            patch.setattr(probe.dist, "all_reduce", without(dist.ReduceOp.SUM))
        if fault == "queries of the whole sequence":  # a rank has 48 of the 96 tokens
            patch.setattr(ShardedModel, "_last_queries", lambda self, batch: torch.arange(48))
        return probed(2, True, FAULTS[fault])


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_mistake_is_noticed(run_on: Callable[..., Any], fault: str) -> None:
    wanted = probed(1, True, {})
    assert not any(same(result, wanted) for result in run_on(2, probed_with, fault))


COMBINATIONS = {
    "dp_shard 2, offload, always resharded": combined(
        "dp_shard", "CPU offload", "fsdp_reshard_after_forward always"
    ),
    "dp_shard 2, float8": combined("dp_shard", "float8 tensorwise"),
    "tp 2, float8": combined("tp", "float8 rowwise"),
    "cp 2, document masks": combined("cp", "document masks"),
    "pp 2": combined("pp"),
    "dp_shard 2, compiled, activation checkpointing": combined(
        "dp_shard", "compile, op activation checkpointing"
    ),
}


def train_with(folder: Path, corpus: Path, part: Part, probe_freq: int) -> None:
    """Train with untied embeddings and heads that are large enough for float8."""
    torch._dynamo.reset()
    keys = [f"--metrics.probe_freq={probe_freq}", "--training.steps=4", FOUR_MICRO_BATCHES, *part.keys]
    keys += ["--model.overrides.tie_word_embeddings=false", "--model.overrides.head_dim=16"]
    train(make_job(folder, corpus, *keys, name=f"run-{probe_freq}", world_size=part.ranks))


@pytest.mark.full
@pytest.mark.parametrize("name", COMBINATIONS)
def test_training_is_the_same_with_and_without_probes(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], name: str
) -> None:
    part = COMBINATIONS[name]
    for probe_freq in (0, 1):
        run_on(part.ranks, train_with, tmp_path, corpus, part, probe_freq)
    plain, probed = (make_job(tmp_path, corpus, name=f"run-{freq}") for freq in (0, 1))
    assert history(probed) == history(plain)
    assert shards(probed.folder / "checkpoint/step-4") == shards(plain.folder / "checkpoint/step-4") != {}
    assert all("probe/dead_units_pct" in line for line in metrics_of(probed))
