"""The gradient of a step does not depend on how its sequences are split over ranks and micro-batches, even if
the sequences have different numbers of tokens that count. No transform renames a parameter."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from tests.support.gradients import SHAPE, build, gradients, on_rank, uneven_sequences
from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.data.batch import IGNORE, Batch
from titanlite.models import decoder, llama3, qwen3  # noqa: F401 -- two of these register their families
from titanlite.models.llama3 import Llama3
from titanlite.parallel import sharded_model, tensor_parallel

SPLITS = [(1, 4, 1), (4, 1, 1), (2, 2, 1), (4, 2, 2), (4, 1, 4)]  # ranks, micro-batches, replicas
LAYOUTS = ({}, {"tied": False}, {"reduce": "micro_batch"})
CASES = [((1, 4, 1), {}), ((2, 2, 1), {}), ((4, 2, 2), {"reduce": "micro_batch"})]
CASES += [full(*case) for case in itertools.product(SPLITS, LAYOUTS) if case not in CASES[:3]]


@pytest.mark.parametrize(("split", "layout"), CASES, ids=str)
def test_gradient_is_the_same_for_any_split(run_on, split, layout) -> None:
    world_size, micro_batches, replicate = split
    whole = gradients(1, 0, 1, whole_logits=True, **layout)
    if world_size == 1:
        actual = gradients(1, 0, micro_batches, **layout)
    else:
        actual = run_on(
            world_size, on_rank, world_size, micro_batches, {"dp_replicate": replicate, **layout}
        )[0]
    assert actual.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.allclose(actual[name], value, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(
    "layout", [{}, full({"tied": False}), full({"activation_checkpoint": "full"})], ids=str
)
def test_bf16_is_the_same_alone_as_sharded(run_on, layout) -> None:
    """The casts in the layers and the casts of FSDP give equal results; weights and gradients stay fp32."""
    alone, fp32 = gradients(1, 0, 2, dtype=torch.bfloat16, **layout), gradients(1, 0, 2, **layout)
    sharded = run_on(2, on_rank, 2, 1, {"dtype": torch.bfloat16, **layout})[0]
    for name, value in alone.items():
        assert value.dtype == sharded[name].dtype == torch.float32

    def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in a)

    assert distance(alone, fp32) > 5e-3
    assert distance(alone, sharded) < 0.5 * distance(alone, fp32), "FSDP only rounds the embedding's gradient"
    kept = {t.dtype for t in build(1, 0, dtype=torch.bfloat16, **layout).net.parameters()}
    assert kept == {torch.float32}


@pytest.mark.parametrize(
    ("world_size", "replicate", "layout"),
    [
        (2, 1, {}), full(2, 1, {"whole_logits": True}),
        full(2, 1, {"tied": False, "compile": "aot_eager"}), full(4, 1, {"compile": "inductor"}),
        full(4, 1, {"activation_checkpoint": "full"}),
        full(4, 1, {"activation_checkpoint": "selective", "reduce": "micro_batch"}),
        full(4, 2, {"tied": False}),
        (2, 1, {"tp": 1, "cp": 2}), full(2, 1, {"tp": 1, "cp": 2, "compile": "aot_eager"}),
        full(4, 1, {"tp": 1, "cp": 2, "compile": "inductor"}),
        full(4, 2, {"tp": 1, "cp": 2, "tied": False}),
        full(4, 1, {"cp": 2, "activation_checkpoint": "full"}),
        full(4, 1, {"tp": 1, "cp": 4}), full(4, 1, {"tp": 1, "cp": 4, "attention": "sdpa"}),
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_with_tensor_and_context_parallel(run_on, world_size, replicate, layout) -> None:
    whole = gradients(1, 0, 1, whole_logits=True, tied=layout.get("tied", True))
    layout = {"tp": 2, "dp_replicate": replicate, **layout}
    split = run_on(world_size, on_rank, world_size, 2, layout)[0]
    assert split.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.allclose(split[name], value, rtol=1e-4, atol=1e-7), name


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        *map(full, [{}, {"tp": 2, "compile": "aot_eager"}, {"tp": 2, "whole_logits": True}, {"cp": 2}]),
    ],
    ids=str,
)
def test_a_z_loss_is_the_same_on_every_layout(run_on, layout) -> None:
    """Its gradient and its reported value; the reported loss is that of the tokens."""
    whole, plain = gradients(1, 0, 1, whole_logits=True, z_loss=0.1), gradients(1, 0, 1)
    assert torch.equal(whole["loss"], gradients(1, 0, 1, whole_logits=True)["loss"])
    name = "model.embed_tokens.weight"
    assert not torch.allclose(whole[name], plain[name], rtol=1e-2, atol=1e-6), "the z-loss has no gradient"
    split = run_on(2, on_rank, 2, 2, {"z_loss": 0.1, **layout})[0]
    assert split.keys() == whole.keys() == plain.keys() | {"z_loss"}
    for name, value in whole.items():
        assert torch.allclose(split[name], value, rtol=1e-4, atol=1e-7), name


SCALES = {"residual_scale": 0.3, "attention_scale": 1.7, "logit_scale": 0.6, "matrix_init_std": 0.05}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        *map(full, [
            {}, {"cp": 2}, {"pp": 2, "tied": False}, {"tp": 2, "family": "qwen3"},
            {"tp": 2, "compile": "aot_eager"}, {"activation_checkpoint": "full", "compile": "inductor"},
            {"tp": 2, "activation_checkpoint": "selective"},
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_with_scales(run_on, layout) -> None:
    shape = {"shape": SCALES, "tied": layout.get("tied", True), "family": layout.get("family", "llama3")}
    whole = gradients(1, 0, 1, whole_logits=True, **shape)
    plain = gradients(1, 0, 1, whole_logits=True, **{**shape, "shape": {}})
    assert not torch.allclose(whole["norm"], plain["norm"], rtol=1e-2), "the scales do nothing"
    by_rank = run_on(2, on_rank, 2, 2, {**layout, **shape})
    split = {name: value for gradients_of_rank in by_rank for name, value in gradients_of_rank.items()}
    assert split.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.allclose(split[name], value, rtol=1e-4, atol=1e-7), name


def broken_on_rank(missing_sum: str) -> dict[str, torch.Tensor]:
    """The gradients without one of the sums over the tensor-parallel ranks."""
    with pytest.MonkeyPatch.context() as patch:
        if missing_sum == "loss":
            shard = tensor_parallel.vocabulary_shard
            broken = lambda *args: replace(shard(*args), all_reduce_sum=lambda x: x)  # noqa: E731
            patch.setattr(sharded_model, "vocabulary_shard", broken)
        else:
            patch.setattr(tensor_parallel, "Partial", Replicate)
        return gradients(2, torch.distributed.get_rank(), 1, tp=2)


@pytest.mark.parametrize("missing_sum", ["loss", full("hidden states")])
def test_control_a_missing_sum_is_noticed(run_on, missing_sum: str) -> None:
    whole, broken = gradients(1, 0, 1), run_on(2, broken_on_rank, missing_sum)[0]
    assert not all(torch.allclose(broken[name], whole[name], rtol=1e-4, atol=1e-7) for name in whole)


def unmatched_on_rank() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(decoder.TP_PLAN, "model.layers.*.attention", "gather")
        with pytest.raises(ConfigError) as e:
            build(2, torch.distributed.get_rank(), tp=2)
    return str(e.value)


def test_a_tp_plan_for_missing_modules_is_refused(run_on) -> None:
    assert "'model.layers.*.attention' matches no module of the model" in run_on(2, unmatched_on_rank)[0]


def test_the_norm_is_the_norm_of_all_gradients() -> None:
    result = gradients(1, 0, 1)
    squares = sum((g.double() ** 2).sum() for name, g in result.items() if name not in ("loss", "norm"))
    assert result["norm"].item() == pytest.approx(squares.sqrt().item(), rel=1e-6)


def test_a_step_without_counted_targets_is_finite() -> None:
    model, batch = build(1, 0), uneven_sequences()
    ignored = Batch(batch.inputs, torch.full_like(batch.targets, IGNORE), 0, 0)
    assert model.forward_backward([ignored], torch.tensor(0)).item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.net.parameters())


def names_on_rank(world_size: int, layout: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    model = build(world_size, torch.distributed.get_rank(), **layout)
    batch = uneven_sequences()
    model.forward_backward([batch], torch.tensor(batch.num_targets))  # use must not change names either
    model.loss_sum(batch)
    return [(name, tuple(p.shape)) for name, p in model.net.named_parameters()]


@pytest.mark.parametrize(
    "layout",
    [
        {}, full({"tp": 2}), full({"activation_checkpoint": "full", "compile": "aot_eager"}),
        full({"dp_replicate": 2}),
        full({"float8": "tensorwise"}), full({"float8": "rowwise"}), full({"activation_checkpoint": "full"}),
        full({"activation_checkpoint": "selective"}), full({"tied": False}),
    ],
    ids=str,
)  # fmt: skip
def test_no_transform_renames_a_parameter(run_on, layout) -> None:
    with torch.device("meta"):
        overrides = {**SHAPE, "tie_word_embeddings": layout.get("tied", True)}
        wanted = [
            (n, tuple(p.shape))
            for n, p in Llama3(flavor="debug", overrides=overrides).build().named_parameters()
        ]
    assert all(names == wanted for names in run_on(2, names_on_rank, 2, layout))


def gathered_on_rank(tied: bool) -> tuple[set[str], set[str]]:
    """The parameters that are gathered between forward and backward, and after the backward."""
    model, batch = build(2, torch.distributed.get_rank(), tied=tied), uneven_sequences()

    def gathered() -> set[str]:
        return {name for name, p in model.net.named_parameters() if not isinstance(p, DTensor)}

    loss = model.net(*model.model_inputs(batch))
    between = gathered()
    loss.backward()
    return between, gathered()


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_block_and_the_head_stay_gathered_after_the_forward(run_on, tied) -> None:
    for between, after in run_on(2, gathered_on_rank, tied):
        last = f"model.layers.{SHAPE['n_layers'] - 1}."
        head = {"model.norm.weight", "model.embed_tokens.weight" if tied else "lm_head.weight"}
        assert {name for name in between if not name.startswith(last)} == head
        assert any(name.startswith(last) for name in between)
        assert not after
