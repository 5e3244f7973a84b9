"""The balance of experts on one process: counts, gradients of the losses, the bias, and the settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.load_balance import (
    BALANCE,
    COEFFICIENT,
    LENGTH,
    NUM_CHOSEN,
    NUM_EXPERTS,
    NUM_SEQUENCES,
    by_autograd,
    largest_difference,
    moe_model,
    sequences,
    step,
)
from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.metrics.experts import load_metrics
from titanlite.metrics.sinks.console import console_line
from titanlite.models.load_balance import COEFFICIENTS, LoadBalance
from titanlite.models.moe import MoE
from titanlite.parallel.sharded_model import ShardedModel

NUM_TOKENS = NUM_SEQUENCES * LENGTH
COMPILED = {"compile": "aot_eager"}
FULL = {"activation_checkpoint": "full"}


def layers_of(model: ShardedModel) -> list[MoE]:
    return list(model.net.moe_layers().values())


@pytest.mark.parametrize(
    ("kind", "num", "layout"),
    [
        ("global", 3, FULL),
        ("sequence", 3, {}),
        ("z_loss", 3, {}),
        full("global", 1, {}),
        full("sequence", 1, FULL),
        full("z_loss", 1, FULL),
        full("global", 3, COMPILED),
        full("sequence", 3, COMPILED | FULL),
        full("z_loss", 3, COMPILED | {"activation_checkpoint": "selective"}),
    ],
)
def test_losses_and_counts_equal_those_of_autograd_on_the_whole_batch(
    kind: str, num: int, layout: dict[str, Any]
) -> None:
    expected, counts = by_autograd(BALANCE[kind])
    result = step(1, 0, num, BALANCE[kind], layout)
    assert largest_difference(result["gradients"], expected) < 1e-5
    for name, tokens in counts.items():
        assert result["counts"][name].tolist() == tokens.tolist() == result["table"][name]
        assert tokens.sum() == NUM_TOKENS * NUM_CHOSEN


def test_controls_no_loss_and_each_micro_batchs_own_loads_are_other_gradients() -> None:
    expected, _ = by_autograd(BALANCE["global"])
    without = step(1, 0, 1, LoadBalance(load_balance="none"), {})
    assert largest_difference(without["gradients"], expected) > 0.5
    assert largest_difference(by_autograd(BALANCE["global"], own_shares=True)[0], expected) > 0.5


def test_control_counting_in_the_forward_counts_repeated_forwards_twice() -> None:
    model, batch = moe_model(1, 0, BALANCE["global"], **FULL), sequences()
    loads = model.expert_loads
    assert loads is not None
    loads.counts_in_forward = True
    loads.enable(model.net)
    model.forward_backward([batch], torch.tensor(batch.num_targets))
    model.after_step(torch.tensor(True))
    assert layers_of(model)[0].gate.load.tokens_per_expert.sum() == 2 * NUM_TOKENS * NUM_CHOSEN


def test_the_bias_moves_after_applied_steps_only_and_evaluations_do_not_count() -> None:
    model, batch = moe_model(1, 0, BALANCE["bias"], family="biased_moe"), sequences()
    gate = layers_of(model)[0].gate
    bias, tokens = gate.get_buffer("e_score_correction_bias"), gate.load.tokens_per_expert
    states = []
    for applied in (True, False):
        model.forward_backward([batch], torch.tensor(batch.num_targets))
        model.loss_sum(batch)
        model.logits(batch.inputs[:1])
        model.after_step(torch.tensor(applied))
        states.append((tokens.tolist(), bias.tolist()))
    assert states[0] == states[1]
    assert tokens.sum() == NUM_TOKENS * NUM_CHOSEN
    assert torch.equal(bias, 0.001 * (tokens.mean() - tokens).sign())
    assert bias.unique().tolist() == pytest.approx([-0.001, 0.001])
    before = gate.load.tokens_per_expert.clone()
    model.forward_backward([batch], torch.tensor(batch.num_targets))
    model.after_step(torch.tensor(True))
    assert not torch.equal(before, gate.load.tokens_per_expert), "the bias chooses"


def test_losses_of_sigmoid_routers_see_probabilities() -> None:
    loads = {kind: step(1, 0, 1, BALANCE[kind], {"family": "biased_moe"}) for kind in ("global", "bias")}
    assert loads["global"]["metrics"]["moe/router_entropy"] < torch.tensor(NUM_EXPERTS).log()
    assert largest_difference(loads["global"]["gradients"], loads["bias"]["gradients"]) > 0.1


def test_the_loss_of_each_sequence_beside_the_bias() -> None:
    """DeepSeek-V3 uses both: the gradient is that of the loss alone, and the bias moves."""
    both = LoadBalance(load_balance="bias", sequence_loss_coeff=COEFFICIENT)
    alone, beside = (step(1, 0, 1, moe, {"family": "biased_moe"}) for moe in (BALANCE["sequence"], both))
    bias = step(1, 0, 1, LoadBalance(load_balance="bias"), {"family": "biased_moe"})
    assert largest_difference(beside["gradients"], alone["gradients"]) == 0
    assert largest_difference(beside["gradients"], bias["gradients"]) > 0.1
    model, batch = moe_model(1, 0, both, family="biased_moe"), sequences()
    model.forward_backward([batch], torch.tensor(batch.num_targets))
    model.after_step(torch.tensor(True))
    assert layers_of(model)[0].gate.get_buffer("e_score_correction_bias").abs().max() > 0
    (line,) = both.describe(NUM_EXPERTS)
    assert line == "load balance of experts: bias, coefficient 0.001; loss of each sequence, coefficient 3"
    assert both.identity()["sequence_loss_coeff"] == COEFFICIENT


def test_the_first_step_has_no_gradient_of_the_loss_global() -> None:
    gradients = []
    for moe in (BALANCE["global"], LoadBalance(load_balance="none")):
        model, batch = moe_model(1, 0, moe), sequences()
        for layer in layers_of(model):
            layer.gate.load.tokens_per_expert.zero_()
        model.forward_backward([batch], torch.tensor(batch.num_targets))
        gradients.append(layers_of(model)[0].gate.weight.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_metrics_of_uneven_loads() -> None:
    model = moe_model(1, 0, LoadBalance(z_loss_coeff=0.5))
    loads = model.expert_loads
    assert loads is not None
    loads.begin_step([sequences()])
    tokens = torch.tensor([NUM_TOKENS] * NUM_CHOSEN + [0.0] * (NUM_EXPERTS - NUM_CHOSEN))
    for layer in layers_of(model):
        layer.gate.load.statistics.grad = torch.cat(
            (tokens, tokens / NUM_CHOSEN, torch.tensor([NUM_TOKENS * 4.0]))
        )
    loads.expert_ranks = 4
    loads.after_step(torch.tensor(True))
    assert load_metrics(loads) == {
        "moe/max_violation": NUM_EXPERTS / NUM_CHOSEN - 1,
        "moe/max_violation_mean": NUM_EXPERTS / NUM_CHOSEN - 1,
        "moe/dead_experts": 2 * (NUM_EXPERTS - NUM_CHOSEN),
        "moe/router_entropy": pytest.approx(0.693147, rel=1e-5),
        "moe/balance_loss": NUM_EXPERTS / NUM_CHOSEN,
        "moe/z_loss": 0.5 * 4 * 2,
        "moe/max_rank_load": 4,
    }


def test_forced_balance_gives_every_expert_the_same_number_of_tokens() -> None:
    result = step(1, 0, 3, LoadBalance(force_load_balance=True), {})
    assert result["metrics"]["moe/max_violation"] == 0
    assert "forced load balance" in console_line(1, 2, result["metrics"])
    free = step(1, 0, 3, LoadBalance(), {})["metrics"]
    assert free["moe/max_violation"] > 0
    assert "forced" not in console_line(1, 2, free)
    (line, forced) = LoadBalance(force_load_balance=True).describe(NUM_EXPERTS)
    assert line == "load balance of experts: global, coefficient 0.01"
    assert "learns no routing" in forced


def test_a_model_with_forced_balance_is_not_exported() -> None:
    LoadBalance().check_export()
    with pytest.raises(ConfigError, match="learned no routing") as error:
        LoadBalance(force_load_balance=True).check_export()
    assert error.value.key == "moe.force_load_balance"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"load_balance_coeff": -1.0}, "load_balance_coeff"),
        ({"z_loss_coeff": float("inf")}, "z_loss_coeff"),
        ({"load_balance_coeff": 1e39}, "load_balance_coeff"),
        ({"sequence_loss_coeff": -0.1}, "sequence_loss_coeff"),
        ({"load_balance": "sequence", "sequence_loss_coeff": 0.1}, "sequence_loss_coeff"),
        ({"load_balance": "none", "load_balance_coeff": 0.1}, "load_balance_coeff"),
    ],
)
def test_wrong_values_are_refused(keys: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        LoadBalance(**keys)
    assert error.value.key == key


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    LoadBalance().check(0, trains_adapters=True)
    with pytest.raises(ConfigError, match="no experts"):
        LoadBalance(z_loss_coeff=0.1).check(0, trains_adapters=False)
    BALANCE["sequence"].check(NUM_EXPERTS, trains_adapters=True)
    BALANCE["bias"].check(NUM_EXPERTS, trains_adapters=False)
    with pytest.raises(ConfigError, match=r"lora\.enable"):
        BALANCE["bias"].check(NUM_EXPERTS, trains_adapters=True)
    with pytest.raises(ConfigError, match="have no e_score_correction_bias") as error:
        moe_model(1, 0, BALANCE["bias"])
    assert error.value.key == "moe.load_balance"


def test_default_coefficients_depend_on_the_balance_and_zero_is_kept() -> None:
    assert {kind: LoadBalance(load_balance=kind).coefficient for kind in COEFFICIENTS} == COEFFICIENTS
    assert LoadBalance(load_balance_coeff=0.0).coefficient == 0.0
