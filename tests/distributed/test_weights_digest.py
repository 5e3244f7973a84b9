"""On layouts that cut no rows, a digest of weights in metrics.jsonl is that of the checkpoint of its step.
Checkpoints are saved in the background meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden import EXPERTS
from tests.support.jobs import metrics_in
from tests.support.runs import CP, FOUR_MICRO_BATCHES, PP, UNTIED, train_on_rank
from tests.support.tiers import full
from titanlite.checkpoint.state_digest import combine, digests_of_checkpoint

KEYS = [
    "--metrics.digest_freq=1",
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=0",
    FOUR_MICRO_BATCHES,
]
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
EP = "--parallelism.expert_parallel_degree=2"
MOE = ["--model.name=qwen3_moe", *EXPERTS]


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        full(2, [PP, UNTIED]),
        full(2, [CP]),
        full(2, [REPLICAS]),
        full(4, [REPLICAS]),
        full(2, [EP, *MOE]),
        full(4, [EP, *MOE]),
        full(3, MOE),
    ],
)
def test_digests_are_those_of_the_checkpoints(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], ranks: int, keys: list[str]
) -> None:
    batch = f"--training.global_batch_size={4 * ranks}"
    keys = [*KEYS, *keys, batch, "--training.steps=3", "--checkpoint.async_mode=async"]
    run_on(ranks, train_on_rank, tmp_path, corpus, keys, "run", ranks)
    rows = metrics_in(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert len({row["train/weights_digest"] for row in rows}) == 3
    for row in rows:
        saved = digests_of_checkpoint(tmp_path / f"run/checkpoint/step-{row['step']}")
        assert row["train/weights_digest"] == combine(saved)["weights"]
