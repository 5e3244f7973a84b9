"""The average of the weights in one process: its arithmetic, skipped steps, and its exchange with the
weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlite.config.component import ConfigError
from titanlite.optim.ema import EMA, WeightAverage

APPLIED, SKIPPED = torch.tensor(True), torch.tensor(False)


def moving_net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 7)


def move(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p))


def bits(tensors: dict[str, torch.Tensor]) -> list[list[int]]:
    return [tensor.view(torch.int32).flatten().tolist() for tensor in tensors.values()]


def values(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("start_step", "freq", "updates"),
    [(0, 1, [1, 2, 3, 4, 5, 6, 7]), (3, 1, [4, 5, 6, 7]), (0, 3, [3, 6]), (2, 4, [6]), (9, 1, [])],
)
def test_the_average_equals_one_kept_by_hand(start_step: int, freq: int, updates: list[int]) -> None:
    net = moving_net()
    average = WeightAverage(EMA(enable=True, decay=0.9, start_step=start_step, freq=freq), net)
    wanted = values(net)
    for step in range(1, 8):
        move(net)
        average.update(step, APPLIED)
        if step <= start_step:
            wanted = values(net)
        elif step in updates:
            wanted = {n: torch.lerp(wanted[n], p, 1 - 0.9**freq) for n, p in values(net).items()}
        assert bits(average.tensors) == bits(wanted), step


def test_the_reach_of_the_average_does_not_depend_on_freq() -> None:
    """Weights that jump once: the distance that is left after 30 steps is 0.9^30 of the jump."""
    for freq in (1, 3, 10):
        net = nn.Linear(1, 1, bias=False)
        average = WeightAverage(EMA(enable=True, decay=0.9, freq=freq), net)
        start = net.weight.item()
        with torch.no_grad():
            net.weight.add_(1)
        for step in range(1, 31):
            average.update(step, APPLIED)
        assert average.tensors["weight"].item() - start == pytest.approx(1 - 0.9**30, abs=1e-6)


def test_a_skipped_step_leaves_the_average_bit_identical() -> None:
    net = moving_net()
    average = WeightAverage(EMA(enable=True, decay=0.9), net)
    move(net)
    average.update(1, APPLIED)
    before = bits(average.tensors)
    average.update(2, SKIPPED)
    assert bits(average.tensors) == before
    average.update(3, APPLIED)
    assert bits(average.tensors) != before


def test_frozen_parameters_and_buffers_are_not_averaged() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[0].bias.requires_grad_(False)
    assert set(WeightAverage(EMA(enable=True), net).tensors) == {"0.weight", "1.weight", "1.bias"}
    assert WeightAverage(EMA(), net).tensors == {}


def test_weights_of_16_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight is torch.bfloat16; only float32 weights") as e:
        WeightAverage(EMA(enable=True), nn.Linear(2, 2).bfloat16())
    assert e.value.key == "ema.enable"


def test_weights_and_average_are_exchanged_and_exchanged_back_also_after_an_error() -> None:
    net = moving_net()
    average = WeightAverage(EMA(enable=True, decay=0.5), net)
    move(net)
    average.update(1, APPLIED)
    weights, averages = values(net), {name: t.clone() for name, t in average.tensors.items()}
    assert bits(weights) != bits(averages)

    def fail() -> None:
        with average.as_weights():
            assert bits(values(net)) == bits(averages)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert bits(values(net)) == bits(weights)
    assert bits(average.tensors) == bits(averages)


def test_the_log_says_how_the_average_is_kept() -> None:
    line = "exponential moving average of the weights: decay 0.99, updated every "
    assert EMA().describe() == []
    assert EMA(enable=True, decay=0.99).describe() == [f"{line}step"]
    assert EMA(enable=True, decay=0.99, start_step=7, freq=5).describe() == [f"{line}5 steps after step 7"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("decay", 1.0, "not in [0, 1)"),
        ("decay", -0.1, "not in [0, 1)"),
        ("decay", float("nan"), "not in [0, 1)"),
        ("start_step", -1, "below 0"),
        ("freq", 0, "below 1"),
    ],
)
def test_impossible_values_are_refused(key: str, value: float, reason: str) -> None:
    with pytest.raises(ConfigError) as e:
        EMA(**{key: value})
    assert reason in str(e.value)
    assert e.value.key == key
