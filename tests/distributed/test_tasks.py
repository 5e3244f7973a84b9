"""Tasks have the same scores on every layout, on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.gradients import build
from tests.support.tiers import full
from titanlite.evaluate import score_tasks
from titanlite.losses import VocabularyShard
from titanlite.mesh import Mesh
from titanlite.tasks.requests import OpenTask, Request
from titanlite.tasks.task import Question, Task

VOCAB_SIZE = 250  # the model's is 252
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"tp": 2}),
    "dp_shard 2": (2, {}),
    "pp 2": (2, {"pp": 2}),
    "cp 2": (2, {"cp": 2}),
    "dp_replicate 2": (2, {"dp_replicate": 2}),
    "pp 2, zero bubble": (2, {"pp": 2, "schedule": "ZBVZeroBubble", "layers": 4}),
    "tp 2, compiled": (2, {"tp": 2, "compile": "aot_eager"}),
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}),
    "cp 2 x dp_shard 2": (4, {"cp": 2}),
}
CASES = [name if name == "tp 2" else full(name) for name in LAYOUTS]


@dataclass
class Ranks:
    """The part of Runtime that validation uses."""

    mesh: Mesh
    rank: int
    device: torch.device

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Summed over all ranks, in place."""
        if dist.is_initialized():
            dist.all_reduce(value)
        return value


class Scores(OpenTask):
    """A task whose metrics are its scores."""

    def metrics(self, scores: np.ndarray) -> dict[str, float]:
        return {f"{i}/{j}": value for (i, j), value in np.ndenumerate(scores)}


def scores(world_size: int, layout: dict[str, Any]) -> dict[str, float]:
    """The scores of 23 requests. Every second one asks for the model's most likely token."""
    rank = dist.get_rank() if world_size > 1 else 0
    model = build(world_size, rank, tied=False, **layout)
    rng, requests = random.Random(0), []
    for i in range(23):
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 16))]
        if i % 2:
            last = model.logits(torch.tensor([tokens]))[0, -1, :VOCAB_SIZE]
            tokens.append(int(last.argmax()))
        requests.append(Request(tokens, 1 if i % 2 else 2))
    task = Scores(Task(name="t", path="t.jsonl"), [Question("", ("x",), None, 1)], requests)
    runtime: Any = Ranks(model.mesh, rank, torch.device("cpu"))
    return score_tasks(model, [task], VOCAB_SIZE, 64, runtime)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_has_the_scores_of_one_process(run_on: Callable[..., Any], name: str) -> None:
    world_size, layout = LAYOUTS[name]
    wanted = scores(1, {key: value for key, value in layout.items() if key == "layers"})
    results = run_on(world_size, scores, world_size, layout)
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx(wanted, rel=1e-5)
    misses = [wanted[f"{i}/1"] for i in range(23)]
    assert {0.0, 2.0} <= set(misses)


def unreduced(world_size: int, layout: dict[str, Any]) -> dict[str, float]:
    """The scores if each tensor-parallel rank knew only its own shard of the vocabulary."""
    VocabularyShard.log_sum_exp = lambda self, logits_NV: logits_NV.logsumexp(-1)  # type: ignore[method-assign]
    return scores(world_size, layout)


@pytest.mark.full
def test_control_a_missing_reduction_is_noticed(run_on: Callable[..., Any]) -> None:
    results = run_on(2, unreduced, 2, {"tp": 2})
    assert results[0] != pytest.approx(scores(1, {}), rel=1e-5)
