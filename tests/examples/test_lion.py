"""The example of an optimizer: it is Lion, and it trains, saves and resumes on one rank and on two.

Runs train in processes of their own, so that the example is registered in no other test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.examples.lion import Lion, LionOptimizer
from tests.support.runs import FOUR_MICRO_BATCHES, PP, TP, UNTIED, train_on_rank
from tests.support.tiers import full
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.reader import read_metadata
from titanlite.checkpoint.state import TrainState
from titanlite.mesh import ALONE
from titanlite.models.llama3 import Llama3
from titanlite.optim.base import ParamGroup
from titanlite.optim.hyperparameters import HyperparameterSchedule

ALLOWED = "--checkpoint.allow_changed=['optimizer']"
LION = ["--job.imports=['tests.examples.lion']", "--optimizer.name=lion", "--optimizer.lr=1e-3"]


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


def train_without_momentum(*args: Any) -> None:
    """One rank's part of a run whose resume loses the optimizer's state."""
    load = Checkpointer.load

    def forgetful(self: Checkpointer, state: TrainState) -> None:
        load(self, state)
        for tensors in state.optimizer.state.values():
            tensors["exp_avg"].zero_()

    with patch.object(Checkpointer, "load", forgetful):
        train_on_rank(*args)


def test_its_steps_are_those_of_the_paper() -> None:
    lr, beta1, beta2, decay = 0.1, 0.8, 0.9, 0.5
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5, generator=generator))
    group = {"params": [p], "lr": lr, "weight_decay": decay, "beta1": beta1, "beta2": beta2}
    optimizer = LionOptimizer([group])
    weight, momentum = p.detach().double(), torch.zeros(5, dtype=torch.float64)
    for _ in range(4):
        p.grad = torch.randn(5, generator=generator)
        gradient = p.grad.double()
        update = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
        weight = weight - lr * (update + decay * weight)
        momentum = beta2 * momentum + (1 - beta2) * gradient
        optimizer.step()
    torch.testing.assert_close(p.detach(), weight.float())


def test_its_hyperparameters_follow_groups_and_schedules() -> None:
    net = Llama3(flavor="debug", overrides={"n_layers": 1}).build()
    schedules = [
        HyperparameterSchedule(key="weight_decay", factors=[[0, 1.0], [4, 0.0]]),
        HyperparameterSchedule(key="beta2", factors=[[0, 1.0], [4, 0.5]]),
    ]
    config = Lion(param_groups=[ParamGroup(pattern="*.up_proj.weight", beta2=0.8)], schedules=schedules)
    optimizer = config.build(net, ALONE)
    config.check(net)
    config.check_scheduled(optimizer, net)
    config.set_scheduled(optimizer, 2)
    settings = [(group["weight_decay"], group["beta2"]) for group in optimizer.param_groups]
    assert sorted(settings) == [(0.0, 0.75 * 0.99), (0.05, 0.75 * 0.8), (0.05, 0.75 * 0.99)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The run folder of 8 steps on one rank."""
    from tests.support.ranks import run

    folder = tmp_path_factory.mktemp("lion")
    run(1, train_on_rank, folder, corpus, LION, "whole", 1)
    return folder / "whole"


@pytest.mark.full
def test_it_learns_on_two_ranks_as_on_one(whole: Path, tmp_path: Path, corpus: Path, run_on: Any) -> None:
    run_on(2, train_on_rank, tmp_path, corpus, LION, "two", 2)
    assert losses(tmp_path / "two") == pytest.approx(losses(whole), abs=1e-4)
    assert losses(whole)[-1] < losses(whole)[0] - 0.1
    names = read_metadata(whole / "checkpoint/step-8").state_dict_metadata
    assert "optimizer.model.norm.weight.exp_avg" in names
    assert not [name for name in names if name.endswith("exp_avg_sq")]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [(2, 1), full((1, 2))])
def test_it_resumes_on_another_number_of_ranks(
    whole: Path, tmp_path: Path, corpus: Path, run_on: Any, ranks: tuple[int, int]
) -> None:
    first, second = ranks
    run_on(first, train_on_rank, tmp_path, corpus, [*LION, "--training.steps=4"], "hops", first)
    run_on(second, train_on_rank, tmp_path, corpus, LION, "hops", second)
    assert losses(tmp_path / "hops") == pytest.approx(losses(whole), abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "keys"), [(2, []), (2, [TP]), (2, [PP, UNTIED]), (4, [TP, FOUR_MICRO_BATCHES])]
)
def test_a_run_changes_its_optimizer_and_back(
    tmp_path: Path, corpus: Path, run_on: Any, ranks: int, keys: list[str]
) -> None:
    """From AdamW to Lion to AdamW: on every layout as on one rank."""
    model = [UNTIED] if UNTIED in keys else []
    for name, world_size, layout in (("one", 1, model), ("other", ranks, keys)):
        for steps, optimizer in ((4, []), (6, LION), (8, [])):
            options = [ALLOWED, f"--training.steps={steps}", *layout, *optimizer]
            run_on(world_size, train_on_rank, tmp_path, corpus, options, name, world_size)
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    names = read_metadata(tmp_path / "other/checkpoint/step-8").state_dict_metadata
    assert "optimizer.model.norm.weight.exp_avg_sq" in names


@pytest.mark.full
def test_control_a_resume_without_the_momentum_is_noticed(
    whole: Path, tmp_path: Path, corpus: Path, run_on: Any
) -> None:
    run_on(1, train_on_rank, tmp_path, corpus, [*LION, "--training.steps=4"], "hops", 1)
    run_on(1, train_without_momentum, tmp_path, corpus, LION, "hops", 1)
    assert losses(tmp_path / "hops")[:4] == losses(whole)[:4]
    assert losses(tmp_path / "hops") != pytest.approx(losses(whole), abs=1e-4)
