"""Pins clipping by tensor: equality with the paper's algorithm in NumPy, norms of 0 and skipped steps that
leave the averages alone, and runs that resume to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.jobs import make_job
from tests.support.non_finite import bad_steps
from tests.support.runs import assert_same, history, run_in_hops
from tests.support.tiers import full
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.state import TrainState, optimizer_tensors
from titanlite.config.component import ConfigError
from titanlite.optim.base import guarded_step
from titanlite.parallel import clip
from titanlite.parallel.clip import Clipper, grad_norms
from titanlite.train import train

SHAPES = {"weight": (5, 3), "bias": (7,), "scale": (6,)}
TENSOR = "--training.clip=tensor"


class Gradients:
    """A model that gets its gradients from outside, its optimizer and its clipper."""

    def __init__(self, kind: str, max_norm: float = 1.0, lr: float = 0.1):
        self.net = nn.ParameterDict({name: nn.Parameter(torch.ones(s)) for name, s in SHAPES.items()})
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, fused=True)
        self.clipper = Clipper(kind, max_norm, self.net, self.optimizer)  # type: ignore[arg-type]

    def step(self, step: int, gradients: dict[str, np.ndarray], apply: bool = True) -> dict[str, np.ndarray]:
        """Take a step. Returns the gradients after clipping."""
        for name, p in self.net.items():
            p.grad = torch.from_numpy(gradients[name]).float()
        applied = torch.tensor(apply)
        divisor = self.clipper.clip(grad_norms(self.net), applied, step)
        scale = 1.0 if divisor is None else divisor.item()
        clipped = {name: p.grad.numpy() / scale for name, p in self.net.items()}
        guarded_step(self.optimizer, applied, divisor)
        return clipped

    def averages(self) -> dict[str, float]:
        state = optimizer_tensors(self.net, self.optimizer)
        return {name: state[f"{name}.clip_norm"].item() for name in SHAPES}


def gradients_of(step: int) -> dict[str, np.ndarray]:
    """Gradients of different sizes, with a spike of one parameter now and then."""
    rng = np.random.default_rng(step)
    size = rng.uniform(0.5, 1.0) if step <= 100 else rng.uniform(0.05, 1.0)
    sizes = {
        "weight": size,
        "bias": 0.1 * size,
        "scale": 10.0 if step > 100 and step % 7 == 0 else 0.01 * size,
    }
    return {name: rng.normal(0, sizes[name], shape) for name, shape in SHAPES.items()}


def by_hand(step: int, gradients: dict, averages: dict, max_norm: float) -> tuple[dict, dict]:
    """The algorithm of AdaGC (arXiv 2502.11034) in NumPy: clipped gradients and new averages."""
    norms = {name: np.linalg.norm(g) for name, g in gradients.items()}
    if step <= 100:
        factor = min(1.0, max_norm / np.sqrt(sum(norm**2 for norm in norms.values())))
        clipped = {name: factor * g for name, g in gradients.items()}
        return clipped, {name: min(averages[name], factor * norms[name]) for name in norms}
    clipped = {name: min(1.0, 1.05 * averages[name] / norms[name]) * g for name, g in gradients.items()}
    return clipped, {name: 0.98 * averages[name] + 0.02 * np.linalg.norm(g) for name, g in clipped.items()}


def test_130_steps_equal_the_paper_in_numpy() -> None:
    ours, averages = Gradients("tensor", max_norm=3.0), dict.fromkeys(SHAPES, np.inf)
    num_clipped = 0
    for step in range(1, 131):
        gradients = gradients_of(step)
        actual = ours.step(step, gradients)
        wanted, averages = by_hand(step, gradients, averages, max_norm=3.0)
        for name in SHAPES:
            np.testing.assert_allclose(actual[name], wanted[name], rtol=1e-4, err_msg=f"{name}, {step}")
        assert ours.averages() == pytest.approx(averages, rel=1e-4)
        smaller = [name for name in SHAPES if abs(wanted[name]).sum() < 0.9999 * abs(gradients[name]).sum()]
        assert ours.clipper.num_clipped == len(smaller)
        num_clipped += len(smaller) if step > 100 else 0
    assert 10 < num_clipped < 80, num_clipped


def test_global_clipping_has_no_state() -> None:
    ours = Gradients("global")
    actual = ours.step(101, gradients_of(105))
    assert np.sqrt(sum((g**2).sum() for g in actual.values())) == pytest.approx(1.0, rel=1e-5)
    assert set(optimizer_tensors(ours.net, ours.optimizer)) == {
        f"{name}.{key}" for name in SHAPES for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert ours.clipper.num_clipped is None


def test_without_a_maximum_norm_the_first_steps_do_not_clip() -> None:
    ours, gradients = Gradients("tensor", max_norm=0.0), gradients_of(105)
    actual = ours.step(1, gradients)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(actual[name], gradient, rtol=1e-6)
    assert ours.averages()["scale"] == pytest.approx(np.linalg.norm(gradients["scale"]))


@pytest.mark.parametrize("first", [1, 101])
def test_a_norm_of_zero_changes_no_average(first: int) -> None:
    """An average of 0 would scale all later gradients of the parameter to 0."""
    ours, gradients = Gradients("tensor", max_norm=0.0), gradients_of(1)
    zero = gradients | {"bias": np.zeros(7)}
    ours.step(first, zero)
    assert ours.averages()["bias"] == np.inf
    ours.step(101, gradients)
    assert ours.averages()["bias"] == pytest.approx(np.linalg.norm(gradients["bias"]))
    ours.step(102, zero)
    assert ours.averages()["bias"] == pytest.approx(np.linalg.norm(gradients["bias"]))
    actual = ours.step(103, gradients)
    np.testing.assert_allclose(actual["bias"], gradients["bias"], rtol=1e-6)


@pytest.mark.parametrize("step", [2, 102])
def test_a_skipped_step_changes_no_average(step: int) -> None:
    ours = Gradients("tensor")
    ours.step(1, gradients_of(1))
    before, weights = ours.averages(), [p.detach().clone() for p in ours.net.values()]
    ours.step(step, gradients_of(2) | {"bias": np.full(7, np.nan)}, apply=False)
    assert ours.averages() == before
    assert all(map(torch.equal, ours.net.values(), weights))
    ours.step(step, gradients_of(2))  # control
    assert ours.averages() != before


def test_the_first_step_may_be_skipped() -> None:
    ours = Gradients("tensor")
    ours.step(1, gradients_of(1) | {"bias": np.full(7, np.nan)}, apply=False)
    assert set(ours.averages().values()) == {np.inf}
    assert ours.optimizer.state[ours.net["bias"]]["exp_avg"].tolist() == [0.0] * 7


# ---- runs


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping by tensor begins after two steps."""
    monkeypatch.setattr(clip, "GLOBAL_STEPS", 2)


@pytest.mark.usefixtures("soon")
def test_a_resumed_run_clips_as_the_uninterrupted_one(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bad_steps({3}):
        whole = run_in_hops(tmp_path, corpus, [6], TENSOR, name="whole")
        assert_same(run_in_hops(tmp_path, corpus, [1, 4, 6], TENSOR), whole)

    load = Checkpointer.load  # control: the averages are lost

    def forgetful(self: Checkpointer, state: TrainState) -> None:
        load(self, state)
        for moments in state.optimizer.state.values():
            moments["clip_norm"].fill_(torch.inf)

    monkeypatch.setattr(Checkpointer, "load", forgetful)
    with bad_steps({3}):
        lost = run_in_hops(tmp_path, corpus, [4, 6], TENSOR, name="lost")
    assert history(lost)[-1] != history(whole)[-1]


@pytest.mark.parametrize(("before", "now"), [("global", "tensor"), full("tensor", "global")])
def test_another_clipping_is_told_in_words(tmp_path: Path, corpus: Path, before: str, now: str) -> None:
    train(make_job(tmp_path, corpus, "--training.steps=1", f"--training.clip={before}"))
    may_change = ["--training.steps=2", "--optimizer.lr=0.004", "--optimizer.eps=1e-6"]
    with pytest.raises(ConfigError) as error:
        train(make_job(tmp_path, corpus, *may_change, f"--training.clip={now}"))
    assert error.value.key == "training.clip"
    assert str(error.value).startswith(
        f"{tmp_path}/run/checkpoint/step-1 was saved with other optimizer state: training.clip was "
        f'"{before}", is "{now}". Undo the change, or start a new run from the weights'
    )
