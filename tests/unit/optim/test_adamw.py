"""Pins the AdamW choice: equality with AdamW as its paper writes it, weight decay on matrices alone, the
learning rate set from outside through `peak_lr`, and what its section refuses.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.models import Parameters
from titanlite.config.component import ConfigError
from titanlite.mesh import ALONE
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import Optimizer, set_lr


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    """A matrix, a stack of matrices, a bias and a scalar."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"weight": (4, 3), "experts": (2, 3, 3), "bias": (4,), "scale": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=g)) for name, shape in shapes.items()}


def gradients(params: dict[str, nn.Parameter], seed: int) -> dict[str, torch.Tensor]:
    """A gradient for each parameter."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=g) for name, p in params.items()}


def adamw_by_hand(w, gradient, m, v, step, *, lr, beta1, beta2, eps, weight_decay):
    """One step of Loshchilov & Hutter 2019, algorithm 2, in float64; returns w, m and v."""
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient**2
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    return w - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * w), m, v


def test_five_steps_equal_adamw_written_by_hand():
    config = AdamW(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3)
    params = parameters()
    expected = {name: p.detach().double() for name, p in params.items()}
    m = {name: torch.zeros_like(w) for name, w in expected.items()}
    v = {name: torch.zeros_like(w) for name, w in expected.items()}
    optimizer = config.build(Parameters(params), ALONE)
    for step in range(1, 6):
        set_lr(optimizer, step / 5)
        for name, gradient in gradients(params, seed=step).items():
            params[name].grad = gradient
            expected[name], m[name], v[name] = adamw_by_hand(
                expected[name], gradient.double(), m[name], v[name], step,
                lr=1e-2 * step / 5, beta1=0.8, beta2=0.9, eps=1e-3,
                weight_decay=0.3 if gradient.ndim >= 2 else 0.0,
            )  # fmt: skip
        optimizer.step()
    for name, p in params.items():
        torch.testing.assert_close(p.detach(), expected[name].float(), rtol=1e-5, atol=1e-6)


def test_vectors_and_scalars_do_not_decay():
    params = parameters()
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer = AdamW(lr=0.1, weight_decay=0.5).build(Parameters(params), ALONE)
    for p in params.values():
        p.grad = torch.zeros_like(p)  # with zero gradients, only weight decay changes weights
    optimizer.step()
    for name in ("bias", "scale"):
        assert torch.equal(params[name], before[name])
    for name in ("weight", "experts"):
        torch.testing.assert_close(params[name].detach(), before[name] * (1 - 0.1 * 0.5))


def test_every_parameter_is_in_one_group():
    params = parameters()
    optimizer = AdamW().build(Parameters(params), ALONE)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in params.values())


def test_frozen_parameters_are_left_out():
    params = parameters()
    params["experts"].requires_grad_(False)
    optimizer = AdamW().build(Parameters(params), ALONE)
    assert not any(p is params["experts"] for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("names", [["weight"], ["bias"]])
def test_a_group_without_parameters_is_left_out(names):
    params = parameters()
    optimizer = AdamW().build(Parameters({name: params[name] for name in names}), ALONE)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_set_lr_scales_the_peak_and_not_the_previous_rate():
    optimizer = AdamW(lr=0.2).build(Parameters(parameters()), ALONE)
    set_lr(optimizer, 0.5)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])


def test_groups_keep_their_own_peaks():
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters().values(), (0.2, 0.8))]
    )
    for _ in range(2):
        set_lr(optimizer, 0.25)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.2])


def test_an_optimizer_that_was_built_without_groups_has_a_peak_too():
    optimizer = torch.optim.SGD(parameters().values(), lr=0.4)
    for factor in (0.5, 1.0):
        set_lr(optimizer, factor)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4 * factor)


def test_it_is_chosen_by_name():
    assert Optimizer.choices["adamw"] is AdamW


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", math.nan),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("weight_decay", math.nan),
    ],
)
def test_values_that_cannot_train_are_refused(key, value):
    with pytest.raises(ConfigError) as e:
        AdamW(**{key: value})
    assert e.value.key == key


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_update_is_recomputed_from_the_state(decay):
    config = AdamW(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=decay)
    params = parameters()
    optimizer = config.build(Parameters(params), ALONE)
    for step in range(1, 4):
        set_lr(optimizer, step / 3)
        before = {name: p.detach().clone() for name, p in params.items()}
        for name, gradient in gradients(params, seed=step).items():
            params[name].grad = gradient
        optimizer.step()
        for group in optimizer.param_groups:
            for p in group["params"]:
                (name,) = (name for name, other in params.items() if other is p)
                state = {key: tensor.clone() for key, tensor in optimizer.state[p].items()}
                update = config.update_of(p.detach(), {**state, "step": step}, group)
                torch.testing.assert_close(update, before[name] - p.detach(), rtol=1e-3, atol=1e-6)
                assert all(torch.equal(state[key], optimizer.state[p][key]) for key in state)
        optimizer.zero_grad()


def measured_noise_scale(config, first, last, batch_size=64):
    """Noise scales of a problem with a known one: by the means of signal and noise over steps, the truth, and
    by the moments without the correction. A sequence's gradient is G plus noise of known variances."""
    g = torch.Generator().manual_seed(0)
    expected, sigma = torch.randn(2000, generator=g) * 0.05, torch.rand(2000, generator=g) + 0.5
    p = nn.Parameter(torch.zeros(2000))
    optimizer = torch.optim.AdamW([p], lr=1e-6, betas=(config.beta1, config.beta2), fused=True)
    estimates, naive = torch.zeros(2), []
    for step in range(1, last + 1):
        p.grad = expected + sigma / math.sqrt(batch_size) * torch.randn(2000, generator=g)
        optimizer.step()
        if step >= first:
            state = optimizer.state[p]
            group = optimizer.param_groups[0]
            estimates += torch.stack(config.signal_and_noise({**state, "step": step}, group))
            m, v = state["exp_avg"], state["exp_avg_sq"]
            naive.append((batch_size * (v - m**2).sum() / (m**2).sum()).item())
    signal, noise = estimates.tolist()
    truth = (sigma.square().sum() / expected.square().sum()).item()
    return batch_size * noise / signal, truth, sum(naive) / len(naive)


def test_the_noise_scale_of_a_known_problem():
    ours, truth, naive = measured_noise_scale(AdamW(), first=200, last=800)
    assert truth == pytest.approx(407.8, abs=0.1)
    assert ours == pytest.approx(truth, rel=0.02)
    assert naive < 0.8 * truth  # control: without the correction


def test_the_noise_scale_is_unbiased_in_early_steps():
    runs = [measured_noise_scale(AdamW(beta1=beta1), first=2, last=12)[:2] for beta1 in (0.5, 0.9)]
    for ours, truth in runs:
        assert ours == pytest.approx(truth, rel=0.25)


def test_one_step_or_no_momentum_tells_nothing_of_the_noise():
    for config, step in ((AdamW(), 1), (AdamW(beta1=0.0), 5)):
        state = {"step": step, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
        assert config.signal_and_noise(state, {"betas": (config.beta1, config.beta2)}) is None


def test_the_noise_scale_has_the_betas_of_the_group():
    state = {"step": 3, "exp_avg": torch.full((3,), 0.2), "exp_avg_sq": torch.ones(3)}
    ours, same, other = (
        config.signal_and_noise(state, {"betas": betas})
        for config, betas in (
            (AdamW(), (0.5, 0.8)),
            (AdamW(beta1=0.5, beta2=0.8), (0.5, 0.8)),
            (AdamW(), (0.9, 0.95)),
        )
    )
    assert ours == same != other
