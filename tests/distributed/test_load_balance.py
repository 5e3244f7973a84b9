"""Experts are counted and balanced alike on every layout, and a resumed run continues exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import make_job, metrics_of
from tests.support.load_balance import (
    BALANCE,
    by_autograd,
    largest_difference,
    step,
    step_on_rank,
    steps_on_rank,
)
from tests.support.runs import history, run_in_hops, train_on_rank, weights_sha
from tests.support.tiers import full
from titanlite import cli
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import TrainState, model_tensors
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.models.load_balance import is_load
from titanlite.parallel.expert_loads import ExpertLoads

TWO_STAGES = {"pp": 2, "layers": 4}


@pytest.mark.parametrize(
    ("kind", "ranks", "num", "layout"),
    [
        ("global", 2, 3, {}),
        *(
            full(kind, ranks, num, {})
            for kind in ("sequence", "sequence_too", "z_loss")
            for ranks in (2, 4)
            for num in (1, 3)
        ),
        full("global", 2, 1, {}),
        *(full("global", 4, num, {}) for num in (1, 3)),
        full("global", 4, 3, {"dp_replicate": 2, "activation_checkpoint": "full"}),
        ("sequence", 2, 3, {"cp": 2}),
        *(
            full("sequence", ranks, num, layout)
            for ranks, num, layout in [
                (2, 1, {"tp": 2}),
                (4, 3, {"cp": 2, "tp": 2}),
                (4, 3, {"cp": 2, "ep": 4}),
                (4, 3, {"tp": 2, "activation_checkpoint": "full"}),
                (2, 3, {"cp": 2, "compile": "aot_eager", "activation_checkpoint": "full"}),
                (2, 3, {"tp": 2, "compile": "aot_eager"}),
            ]
        ),
        full("global", 2, 3, {"cp": 2}),
        full("global", 2, 3, {"tp": 2}),
        full("z_loss", 2, 3, {"cp": 2}),
        full("global", 2, 3, {"compile": "aot_eager", "activation_checkpoint": "full"}),
    ],
)
def test_losses_and_counts_equal_those_of_autograd_on_the_whole_batch(
    run_on, kind: str, ranks: int, num: int, layout: dict[str, Any]
) -> None:
    expected, counts = by_autograd(BALANCE[kind])
    for result in run_on(ranks, step_on_rank, ranks, num, BALANCE[kind], layout):
        assert largest_difference(result["gradients"], expected) < 1e-5
        for name, tokens in counts.items():
            assert result["counts"][name].tolist() == tokens.tolist() == result["table"][name]


def step_with_shares_of_each_rank(world_size: int, layout: dict[str, Any]) -> dict[str, Any]:
    """step_on_rank with the loss `sequence`, whose shares are of each rank's tokens of a sequence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertLoads, "_sum_over_sequence_ranks", lambda self: None)
        return step_on_rank(world_size, 3, BALANCE["sequence"], layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}])
def test_control_shares_of_the_tokens_of_one_rank(run_on, layout: dict[str, Any]) -> None:
    expected, _ = by_autograd(BALANCE["sequence"])
    for result in run_on(2, step_with_shares_of_each_rank, 2, layout):
        assert largest_difference(result["gradients"], expected) > 1e-2


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
def test_pipeline_stages_count_and_balance_their_own_layers(run_on, schedule: str) -> None:
    """Zero-bubble schedules take the backward apart, and would leave a count out of the gradients' path."""
    one = step(1, 0, 1, BALANCE["global"], {"layers": 4})
    results = run_on(2, step_on_rank, 2, 3, BALANCE["global"], {**TWO_STAGES, "schedule": schedule})
    assert {name for result in results for name in result["counts"]} == one["counts"].keys()
    for result in results:
        assert largest_difference(result["gradients"], one["gradients"]) < 1e-5
        assert result["table"] == one["table"], "every rank knows all layers"
        assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
        for name, tokens in result["counts"].items():
            assert torch.equal(tokens, one["counts"][name])


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {}), (4, {"dp_replicate": 2}), (2, {"cp": 2}), (2, {**TWO_STAGES, "schedule": "1F1B"}),
        (2, {**TWO_STAGES, "schedule": "ZBVZeroBubble"}), (2, {"activation_checkpoint": "full"}),
        (2, {"ep": 2}), (4, {"ep": 2}), (4, {"cp": 2, "ep": 4}),
    ],
)  # fmt: skip
def test_the_bias_has_the_same_bits_on_every_layout(run_on, ranks: int, layout: dict[str, Any]) -> None:
    layers = {"layers": layout.get("layers", 2)}
    (expected,) = run_on(1, steps_on_rank, 1, 1, BALANCE["bias"], {"family": "biased_moe", **layers})
    results = run_on(ranks, steps_on_rank, ranks, 3, BALANCE["bias"], {"family": "biased_moe", **layout})
    assert any(result["biases"] for result in results)
    for result in results:  # a stage without experts has no biases, but all metrics
        metrics = {key: result["metrics"][key] for key in expected["metrics"]}
        assert metrics == pytest.approx(expected["metrics"], rel=1e-5)
        assert metrics["moe/z_loss"] > 0
        for name, bias in result["biases"].items():
            assert torch.equal(bias, expected["biases"][name])
            assert 1e-4 < bias.abs().max() < 0.004


EXPERTS = ["n_experts=8", "n_experts_per_token=2", "moe_hidden_dim=24"]
MODEL = ["--model.name=qwen3_moe", *(f"--model.overrides.{field}" for field in EXPERTS)]


def loads(job: Job, step: int) -> list[list[float]]:
    """The loads in a checkpoint, by layer."""
    tensors = model_tensors(job.model.build())
    load_tensors(job.folder / f"checkpoint/step-{step}", {"model": tensors})
    return [tensor.tolist() for name, tensor in tensors.items() if is_load(name)]


def test_a_resumed_run_balances_as_if_it_had_not_stopped(tmp_path: Path, corpus: Path) -> None:
    balance = "--moe.load_balance_coeff=3.0"
    whole = run_in_hops(tmp_path, corpus, [4], *MODEL, balance, name="whole")
    hops = run_in_hops(tmp_path, corpus, [2, 4], *MODEL, balance, name="hops")
    assert history(hops) == history(whole)
    assert weights_sha(hops, 4) == weights_sha(whole, 4)
    assert loads(hops, 4) == loads(whole, 4)
    rows = metrics_of(whole)
    for key in ("moe/max_violation", "moe/router_entropy", "moe/balance_loss", "moe/dead_experts"):
        assert [row[key] for row in metrics_of(hops)] == [row[key] for row in rows]
    lines = (whole.folder / "expert_loads.jsonl").read_text().splitlines()
    assert list(json.loads(lines[-1])["tokens"].values()) == loads(whole, 4)

    with pytest.raises(ConfigError, match=r"moe.load_balance_coeff was 3.0, is 0.01"):
        run_in_hops(tmp_path, corpus, [5], *MODEL, name="hops")
    other = [*MODEL, "--moe.load_balance=none", '--checkpoint.allow_changed=["moe"]']
    changed = run_in_hops(tmp_path, corpus, [5], *other, name="hops")
    assert len(metrics_of(changed)) == 5

    start = f"--checkpoint.initial_load_path={whole.folder / 'checkpoint/step-4'}"
    begun = run_in_hops(tmp_path, corpus, [1], *MODEL, balance, start, name="begun")
    assert metrics_of(begun)[0]["train/loss"] < rows[0]["train/loss"]


@pytest.mark.full
def test_control_a_run_that_forgets_the_loads_continues_otherwise(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    balance = "--moe.load_balance_coeff=3.0"
    whole = run_in_hops(tmp_path, corpus, [4], *MODEL, balance, name="whole")
    run_in_hops(tmp_path, corpus, [2], *MODEL, balance, name="hops")
    load = Checkpointer.load

    def forgetful(self: Checkpointer, state: TrainState) -> None:
        load(self, state)
        for layer in state.net.moe_layers().values():
            layer.gate.load.tokens_per_expert.zero_()

    monkeypatch.setattr(Checkpointer, "load", forgetful)
    hops = run_in_hops(tmp_path, corpus, [4], *MODEL, balance, name="hops")
    assert history(hops)[:2] == history(whole)[:2]
    assert history(hops)[2] != history(whole)[2]


@pytest.mark.full
def test_a_run_resumes_on_other_ranks(run_on, tmp_path: Path, corpus: Path) -> None:
    balance = "--moe.load_balance_coeff=3.0"
    whole = run_in_hops(tmp_path, corpus, [4], *MODEL, balance, name="whole")
    run_in_hops(tmp_path, corpus, [2], *MODEL, balance, name="two")
    run_on(2, train_on_rank, tmp_path, corpus, [*MODEL, balance, "--training.steps=4"], "two", 2)
    two = make_job(tmp_path, corpus, *MODEL, balance, name="two")
    for key in ("train/loss", "moe/router_entropy", "moe/balance_loss"):
        wanted = [row[key] for row in metrics_of(whole)]
        assert [row[key] for row in metrics_of(two)] == pytest.approx(wanted, rel=1e-4)
    tokens = [sum(row) for row in loads(two, 4)]
    assert tokens == [sum(row) for row in loads(whole, 4)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--moe.z_loss_coeff=0.1"], "the model has no experts"),
        ([*MODEL, "--moe.load_balance=sequence", "--moe.sequence_loss_coeff=0.1"], "is the coefficient"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, corpus: Path, keys: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job(tmp_path, corpus, *keys, world_size=2)


def test_a_model_with_forced_balance_is_not_exported(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = run_in_hops(tmp_path, corpus, [1], *MODEL, "--moe.force_load_balance")
    assert metrics_of(job)[0]["moe/forced"] == 1
    assert cli.run(["export", str(job.folder), str(tmp_path / "exported")]) == 2
    assert "trained with moe.force_load_balance has learned no routing" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()
