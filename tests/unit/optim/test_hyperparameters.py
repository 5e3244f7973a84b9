"""Hyperparameters of groups of parameters, and their schedules: the updates equal an own calculation in fp64,
and what has no effect is refused. The calculation has the bias correction of torch's AdamW: 1 - beta^step,
with the beta of the step, and not 1 - the product of the betas of all steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import assert_same, run_in_hops, state_of
from titanlite.config.component import ConfigError
from titanlite.job import load_job
from titanlite.mesh import ALONE, Mesh
from titanlite.models.base import Decoder
from titanlite.models.llama3 import Llama3
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import Optimizer, ParamGroup, make_state, set_lr
from titanlite.optim.hyperparameters import HyperparameterSchedule
from titanlite.optim.muon import Muon
from titanlite.optim.orthogonalize import coefficients_of

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
BETA2, DECAY = [[2.0, 0.9], [6.0, 0.98]], [[0.0, 1.0], [8.0, 0.0]]
MOMENTUM = [[1.0, 0.85], [4.0, 0.97], [8.0, 0.9]]
STEPS = 8
SCHEDULES = [
    HyperparameterSchedule(key="beta2", values=BETA2),
    HyperparameterSchedule(key="weight_decay", factors=DECAY, interpolation="cosine"),
]


def linear(points: list[list[float]], step: int) -> float:
    (a, x), (b, y) = next(
        ((p, q) for p, q in pairwise(points) if p[0] <= step <= q[0]),
        (points[0], points[0]) if step < points[0][0] else (points[-1], points[-1]),
    )
    return x if a == b else x + (y - x) * (step - a) / (b - a)


def trained(config: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[Any]]:
    """The first weights, those after all steps, and the gradients by step. The learning rate rises."""
    net = Llama3(flavor="debug", overrides={"n_layers": 1, "dim": 64, "hidden_dim": 96}).build()
    g = torch.Generator().manual_seed(0)
    for p in net.parameters():
        nn.init.normal_(p, std=0.1, generator=g)
    parameters = dict(net.named_parameters())
    first = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer, gradients = config.build(net, ALONE), []
    for step in range(1, STEPS + 1):
        gradients.append({name: torch.randn(p.shape, generator=g) for name, p in parameters.items()})
        for name, p in parameters.items():
            p.grad = gradients[-1][name].clone()
        set_lr(optimizer, step / STEPS)
        config.set_scheduled(optimizer, step)
        optimizer.step()
    return first, {name: p.detach() for name, p in parameters.items()}, gradients


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_adamw_follows_betas_of_groups_and_schedules(state_dtype: str) -> None:
    group = ParamGroup(pattern="*.up_proj.weight", beta1=0.7, lr_multiplier=2.0)
    config = AdamW(lr=0.02, param_groups=[group], schedules=SCHEDULES, state_dtype=state_dtype)
    first, weights, gradients = trained(config)
    for name, beta1, lr, decay in ((UP, 0.7, 0.04, 0.1), (NORM, 0.9, 0.02, 0.0)):
        w = first[name].double()
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step in range(1, STEPS + 1):
            g, beta2, rate = gradients[step - 1][name].double(), linear(BETA2, step), lr * step / STEPS
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
            w = w * (1 - rate * decay * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
            w = w - rate * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + 1e-8)
        moved, error = (w - first[name]).norm(), (weights[name] - w).norm()
        assert error <= (1e-5 if state_dtype == "float32" else 1e-2) * moved, name


@pytest.mark.parametrize("normalize", ["none", "neuron"])
def test_muon_follows_its_momentum_and_decay(normalize: Any) -> None:
    momentum = HyperparameterSchedule(key="momentum", values=MOMENTUM)
    config = Muon(lr=0.02, schedules=[*SCHEDULES, momentum], normalize=normalize, cautious_weight_decay=True)
    first, weights, gradients = trained(config)
    w = first[UP].double()
    m, rows = torch.zeros_like(w), torch.zeros(len(w), 1, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        g, kept, rate = gradients[step - 1][UP].double(), linear(MOMENTUM, step), 0.02 * step / STEPS
        m = kept * m + (1 - kept) * g
        update = (kept * m + (1 - kept) * g).mT
        update = update / update.norm()
        for a, b, c in coefficients_of("polar_express", 5):
            gram = update @ update.mT
            update = a * update + (b * gram + c * gram @ gram) @ update
        update = update.mT
        if normalize == "neuron":
            beta2 = linear(BETA2, step)
            rows = beta2 * rows + (1 - beta2) * update.square().mean(-1, keepdim=True)
            scaled = update / (rows.sqrt() + 1e-8)
            update = scaled * update.norm() / scaled.norm()
        decay = rate * 0.1 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        w = w * torch.where(update * w >= 0, 1 - decay, 1.0) - rate * 0.2 * math.sqrt(96) * update
    assert (weights[UP] - w).norm() <= 1e-4 * (w - first[UP]).norm()
    constant = Muon(lr=0.02, schedules=SCHEDULES, normalize=normalize, cautious_weight_decay=True)
    _, others, _ = trained(constant)
    assert (others[UP] - w).norm() > 1e-2 * (w - first[UP]).norm()  # control: constant momentum


def test_values_without_schedules_are_those_of_the_configuration() -> None:
    net = Llama3(flavor="debug", overrides={"n_layers": 1}).build()
    config = Muon(param_groups=[ParamGroup(pattern="*.up_proj.weight", momentum=0.5)], beta1=0.8)
    optimizer = config.build(net, ALONE)
    config.set_scheduled(optimizer, 1)
    make_state(optimizer)
    found = {(group.get("momentum"), group.get("betas")) for group in optimizer.param_groups}
    assert found == {(0.5, None), (0.95, None), (None, (0.8, 0.95))}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["param_groups=[{pattern='*', momentum=0.9}]"], "0.momentum: the update rule adamw has no momentum"),
        (["param_groups=[{pattern='*', beta1=1.0}]"], "0.beta1: 1.0 is not in [0, 1)"),
        (["schedules=[{key='momentum', values=[[0, 0.9]]}]"], "schedules.0.key: no parameter has 'momentum'"),
        (["schedules=[{key='beta1'}]"], "schedules.0.factors: set either `factors` or `values`"),
        (["schedules=[{key='beta1', values=[[0, 1.5]]}]"], "the value 1.5 of step 0 is not in [0, 1)"),
        (["schedules=[{key='beta1', factors=[[0, 1.5]]}]"], "beta1 would be 1.35, which is not in [0, 1)"),
        (
            ["schedules=[{key='weight_decay', values=[[0, 0.1]]}]"],
            "0.values: norms and biases have",
        ),
        (
            ["schedules=[{key='beta1', values=[[0, 0.9]]}, {key='beta1', values=[[0, 0.9]]}]"],
            "schedules.1.key",
        ),
        (
            ["schedules=[{key='beta2', values=[[0, 0.999]]}]", "state_dtype=bfloat16"],
            'optimizer.schedules.0.values: state_dtype = "bfloat16" needs beta2 of at most 0.99, not 0.999',
        ),
        (
            ["param_groups=[{pattern='*', beta2=0.999}]", "state_dtype=bfloat16"],
            "optimizer.param_groups.0.beta2",
        ),
        (["beta2=0.999", "state_dtype=bfloat16"], "optimizer.beta2: state_dtype"),
        (
            ["param_groups=[{pattern='*', beta1=0.8}]", "schedules=[{key='beta1', values=[[0, 0.9]]}]"],
            "schedules.0.values: param_groups.0 sets beta1",
        ),
        (["schedules=[{key='beta2', factors=[[0, 1.0], [0, 0.9]]}]"], "step 0 does not come after step 0"),
    ],
)
def test_what_has_no_effect_or_is_out_of_range_is_refused(words: list[str], message: str) -> None:
    def check() -> None:
        job = load_job("debug", [f"--optimizer.{word}" for word in words], world_size=1)
        job.optimizer.check(job.build_on_meta())

    with pytest.raises(ConfigError) as e:
        check()
    assert message in f"{e.value.key}: {e.value}"


def test_steps_may_be_amounts_and_the_log_names_schedules() -> None:
    words = [
        "--training.steps=40",
        "--optimizer.schedules=[{key='beta1', values=[[0, 0.9], ['64K tokens', 0.8]]}]",
    ]
    job = load_job("debug", words, world_size=1)
    assert (
        job.optimizer.schedules[0].describe()
        == "beta1: 0.9 at step 0, 0.8 after 64K tokens, linear between them"
    )
    tokens = job.training.seq_len * job.training.global_batch_size
    resolved = job.resolved(1)
    assert resolved.optimizer.schedules[0].values == [[0, 0.9], [64_000 // tokens, 0.8]]
    lines = resolved.optimizer.describe(resolved.build_on_meta())
    assert lines[-1] == f"beta1: 0.9 at step 0, 0.8 at step {64_000 // tokens}, linear between them"


def test_the_loop_sets_the_values_of_each_step_also_after_a_resume(tmp_path: Path, corpus: Path) -> None:
    rising = "--optimizer.schedules=[{key='beta1', values=[[1, 0.5], [4, 0.9]]}]"
    whole = run_in_hops(tmp_path, corpus, [4], rising, name="whole")
    assert_same(run_in_hops(tmp_path, corpus, [2, 4], rising), whole)
    jump = "[{key='beta1', values=[[0, 0.9], [1, 0.5]], interpolation='constant'}]"
    scheduled = run_in_hops(tmp_path, corpus, [4], f"--optimizer.schedules={jump}", name="scheduled")
    constant = run_in_hops(tmp_path, corpus, [4], "--optimizer.beta1=0.5", name="constant")
    assert_same(scheduled, constant)
    assert state_of(constant, 4) != state_of(whole, 4)  # control


@dataclass(frozen=True, kw_only=True)
class WithoutGroups(Optimizer):
    """An optimizer whose parameter groups have weight decay and `betas`, but no beta1."""

    def hyperparameters(self, rule: str) -> dict[str, float]:
        return {"beta1": 0.9}

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)


def test_a_schedule_of_what_a_foreign_optimizer_does_not_keep_is_refused() -> None:
    net = Llama3(flavor="debug", overrides={"n_layers": 1}).build()
    decays = WithoutGroups(schedules=SCHEDULES[1:])
    optimizer = decays.build(net, ALONE)
    decays.check(net)
    decays.check_scheduled(optimizer, net)
    decays.set_scheduled(optimizer, STEPS)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]
    config = WithoutGroups(schedules=[HyperparameterSchedule(key="beta1", factors=[[0, 0.5]])])
    config.check(net)
    with pytest.raises(ConfigError, match="parameter groups of AdamW have no 'beta1'") as e:
        config.check_scheduled(optimizer, net)
    assert e.value.key == "optimizer.schedules.0.key"


def test_rows_of_muon_and_bfloat16_state_go_with_any_beta2() -> None:
    """NorMuon's second moments are in fp32."""
    net = Llama3(flavor="debug", overrides={"n_layers": 1}).build_on_meta()
    rows = ParamGroup(pattern="*.up_proj.weight", beta2=0.999)
    Muon(normalize="neuron", state_dtype="bfloat16", param_groups=[rows]).check(net)
    with pytest.raises(ConfigError, match="needs beta2 of at most"):
        AdamW(state_dtype="bfloat16", param_groups=[rows]).check(net)


def test_the_noise_scale_is_unknown_while_a_beta_has_a_schedule() -> None:
    net = Llama3(flavor="debug", overrides={"n_layers": 1}).build()
    state = {"step": 5, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    for schedules, is_known in ((SCHEDULES, False), (SCHEDULES[1:], True)):
        config = AdamW(schedules=schedules)
        optimizer = config.build(net, ALONE)
        config.set_scheduled(optimizer, 5)
        estimates = config.signal_and_noise(state, optimizer.param_groups[0])
        assert (estimates is not None) == is_known
