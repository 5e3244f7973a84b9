"""The statistics of token losses against a plain computation on all logits in fp64."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support.fake_ranks import FakeRanks
from tests.support.logs import listening
from titanlite.losses import WHOLE_VOCABULARY
from titanlite.metrics import token_statistics
from titanlite.metrics.token_metrics import TokenMetrics
from titanlite.metrics.token_statistics import Difference, TokenStatistics, exact_losses

B, T, D, V = 4, 40, 24, 300


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, and targets of which some do not count, and most are the likeliest token."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[:, ::2] = F.linear(hidden, weight).argmax(-1)[:, ::2]
    targets[0, :7] = targets[2, 20:] = -100
    return hidden, weight, targets


def statistics(num_micro_batches: int = 1, **options: object) -> TokenStatistics:
    settings = {"seq_len": T, "sources": ["code", "web"], "is_cross_entropy": True} | options
    return TokenStatistics(num_micro_batches=num_micro_batches, device=torch.device("cpu"), **settings)


SOURCE_IDS = torch.tensor([1, 0, 1, 1])


def observed(dtype: torch.dtype = torch.float32, num_micro_batches: int = 1) -> TokenStatistics:
    hidden, weight, targets = inputs(dtype)
    result = statistics(num_micro_batches)
    for parts in zip(*(x.chunk(num_micro_batches) for x in (hidden, targets, SOURCE_IDS))):
        result.observe(parts[0], weight, parts[1], torch.arange(T), parts[2], WHOLE_VOCABULARY)
    return result


def metrics(result: TokenStatistics, loss: float = 0.0) -> dict[str, float]:
    return result.metrics(result.sums.double(), result.maxima, loss)


def test_shorter_sequences_fill_the_bins_of_their_positions() -> None:
    hidden, weight, targets = inputs()
    result, length = statistics(), T // 4
    split = targets.view(4 * B, length)
    ids = SOURCE_IDS.repeat_interleave(4)
    result.observe(hidden.view(4 * B, length, D), weight, split, torch.arange(length), ids, WHOLE_VOCABULARY)
    values, whole = metrics(result), metrics(observed())
    losses = exact_losses(hidden.flatten(0, 1), weight, targets.flatten(), WHOLE_VOCABULARY).view(-1, length)
    in_bins = [torch.arange(length) * 16 // T == i for i in range(4)]
    assert {name: value for name, value in values.items() if name.startswith("loss/position")} == {
        f"loss/position_{i:02}": pytest.approx(losses[(split != -100) & in_bin].mean().item(), rel=1e-5)
        for i, in_bin in enumerate(in_bins)
    }
    others = [name for name in whole if not name.startswith("loss/position")]
    assert [values[name] for name in others] == pytest.approx([whole[name] for name in others], rel=1e-5)


def reference() -> dict[str, float]:
    hidden, weight, targets = inputs()
    logits = F.linear(hidden.double(), weight.double())
    counts = targets != -100
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(B, T)
    values = {
        "train/accuracy": (logits.argmax(-1) == targets)[counts].double().mean(),
        "logits/max": logits[counts].abs().max(),
        "logits/mean_log_z": logits.logsumexp(-1)[counts].mean(),
        "loss/source/code": losses[1][counts[1]].mean(),
        "loss/source/web": losses[[0, 2, 3]][counts[[0, 2, 3]]].mean(),
    }
    for i in range(16):
        in_bin = counts & (torch.arange(T) * 16 // T == i)
        values[f"loss/position_{i:02}"] = losses[in_bin].mean()
    return {name: value.item() for name, value in values.items()}


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1024, 9])
def test_the_metrics_are_those_of_the_full_logits(
    num_micro_batches: int, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_statistics, "CHUNK_TOKENS", chunk_tokens)
    result = metrics(observed(num_micro_batches=num_micro_batches))
    result.pop("numerics/loss_minus_fp32")
    wanted = reference()
    assert 0.3 < wanted["train/accuracy"] < 0.8
    assert result == pytest.approx(wanted, rel=1e-5)
    assert result.keys() == wanted.keys()


def test_a_tie_is_a_hit() -> None:
    hidden, weight, targets = inputs()
    result = statistics()
    twice = torch.cat([weight, weight])  # each logit twice: the target is one of two largest
    result.observe(hidden, twice, targets, torch.arange(T), None, WHOLE_VOCABULARY)
    assert metrics(result)["train/accuracy"] == metrics(observed())["train/accuracy"]


def test_the_loss_by_source_needs_several_sources() -> None:
    hidden, weight, targets = inputs()
    result = statistics(sources=["web"])
    result.observe(
        hidden, weight, targets, torch.arange(T), torch.zeros(B, dtype=torch.int64), WHOLE_VOCABULARY
    )
    assert not [name for name in metrics(result) if name.startswith("loss/source")]


def test_groups_without_tokens_are_absent() -> None:
    hidden, weight, targets = inputs()
    result, source_ids = statistics(), torch.ones(B, dtype=torch.int64)
    targets[:, : T // 2] = -100
    result.observe(hidden, weight, targets, torch.arange(T), source_ids, WHOLE_VOCABULARY)
    names = {name for name in metrics(result) if name.startswith("loss/")}
    assert names == {"loss/source/web", *(f"loss/position_{i:02}" for i in range(8, 16))}
    assert metrics(statistics()) == {}


@pytest.mark.parametrize(("rows", "softcap"), [(2048, 0.0), (7, 2.0)])
def test_exact_losses_are_those_of_unrounded_logits(
    rows: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_statistics, "COMPARED_ROWS", rows)
    hidden, weight, targets = inputs(torch.bfloat16)
    logits = F.linear(hidden.double(), weight.double()).flatten(0, 1)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    wanted = F.cross_entropy(logits, targets.flatten(), reduction="none")
    vocabulary = replace(WHOLE_VOCABULARY, softcap=softcap)
    actual = exact_losses(hidden.flatten(0, 1), weight, targets.flatten(), vocabulary)
    assert torch.allclose(actual, wanted, rtol=1e-12)
    result = statistics()
    result.observe(hidden, weight, targets, torch.arange(T), None, vocabulary)
    counts = targets.flatten() != -100
    assert metrics(result)["logits/max"] == pytest.approx(logits[counts].abs().max().item(), rel=1e-2)


def test_the_difference_to_fp32_is_that_of_the_loss_and_that_of_the_logits() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    rounded = F.linear(hidden, weight).double().flatten(0, 1)
    exact = F.linear(hidden.double(), weight.double()).flatten(0, 1)
    counts = targets.flatten() != -100
    by_logits = [F.cross_entropy(x, targets.flatten(), reduction="none")[counts] for x in (rounded, exact)]
    result, loss = observed(torch.bfloat16), by_logits[0].mean().item()
    difference = result.difference(result.sums.double(), loss + 0.25)
    assert difference is not None
    assert difference.of_loss == pytest.approx(0.25, abs=1e-6)
    errors = by_logits[0] - by_logits[1]
    assert difference.of_logits == pytest.approx(errors.mean().item(), rel=1e-3)
    assert difference.standard_error == pytest.approx((errors.std() / len(errors) ** 0.5).item(), rel=0.02)
    total = metrics(result, loss + 0.25)["numerics/loss_minus_fp32"]
    assert total == pytest.approx(0.25 + errors.mean().item(), abs=1e-6)


def test_the_compared_tokens_are_spread_over_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_statistics, "COMPARED_TOKENS", 20)
    counts = (inputs()[2].flatten() != -100).float()
    whole, halves = observed(), observed(num_micro_batches=2)
    assert whole.sums[4] == counts[::8].sum()
    assert halves.sums[4] == counts[::8].sum()


def test_a_loss_that_is_no_cross_entropy_is_not_compared() -> None:
    hidden, weight, targets = inputs()
    result = statistics(is_cross_entropy=False)
    result.observe(hidden, weight, targets, torch.arange(T), None, WHOLE_VOCABULARY)
    assert "numerics/loss_minus_fp32" not in metrics(result)
    assert result.difference(result.sums, 0.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_inputs_stay_as_they_are(dtype: torch.dtype) -> None:
    """In fp32 the logits are overwritten; the hidden states must not be."""
    hidden, weight, targets = inputs(dtype)
    before = [x.clone() for x in (hidden, weight, targets)]
    statistics().observe(hidden, weight, targets, torch.arange(T), SOURCE_IDS, WHOLE_VOCABULARY)
    assert all(torch.equal(a, b) for a, b in zip((hidden, weight, targets), before))


def test_a_warning_says_what_to_look_at(caplog: pytest.LogCaptureFixture) -> None:
    with listening(caplog):
        warning = TokenMetrics(FakeRanks())
        for step in range(1, 12):
            warning.check(step, Difference(0.02, 0.001, 0.001))
        warning.check(12, Difference(1e-6, 0.004, 0.0))
        warning.check(13, Difference(1e-6, 0.009, 0.002))  # within three standard errors
        warning.check(14, Difference(float("nan"), float("nan"), float("nan")))
        TokenMetrics(FakeRanks()).check(15, Difference(-1e-6, -0.03, 0.002))
    lines = list(dict.fromkeys(record.message for record in caplog.records))
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 11", "step 15"]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert "+0.02 nats per token" in lines[0]
    assert "sum in fp32" in lines[0]
    assert "-0.03 nats per token" in lines[2]
    assert "logits/max" in lines[2]
