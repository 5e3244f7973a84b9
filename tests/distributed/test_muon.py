"""Muon takes the same steps on every layout: bit by bit for equal gradients, within rounding for real ones. A
checkpoint of one layout goes on on any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.optimizer_layouts import (
    LAYOUTS,
    LR,
    assert_equal,
    distance_moved,
    merged,
    set_real_gradients,
    train,
)
from tests.support.tiers import full
from titanlite.optim import muon_optimizer
from titanlite.optim.base import ParamGroup
from titanlite.optim.hyperparameters import HyperparameterSchedule
from titanlite.optim.muon import Muon
from titanlite.optim.orthogonalize import orthogonalize

MUON = Muon(lr=LR)
# torch's fused AdamW on CPU rounds the last elements of a shard differently if their number is odd.
ADAMW_ROUNDS = ("norm.weight", "norm.weight.exp_avg", "norm.weight.exp_avg_sq")
VARIANTS = {
    "default": MUON,
    "bfloat16": Muon(lr=LR, ns_dtype="bfloat16"),
    "normalize": Muon(lr=LR, normalize="neuron"),
    "split_heads": Muon(lr=LR, split_heads=True, cautious_weight_decay=True, adjust_lr_fn="original"),
    "groups": Muon(
        lr=LR,
        adamw_lr_multiplier=0.5,
        param_groups=[
            ParamGroup(pattern="*.down_proj.weight", lr_multiplier=0.5, momentum=0.5),
            ParamGroup(pattern="*.k_proj.weight", rule="adamw", beta1=0.8),
        ],
        schedules=[
            HyperparameterSchedule(key="momentum", factors=[[1.0, 1.0], [4.0, 0.9]]),
            HyperparameterSchedule(key="beta2", values=[[1.0, 0.9], [4.0, 0.98]]),
            HyperparameterSchedule(key="weight_decay", factors=[[0.0, 1.0], [4.0, 0.0]]),
        ],
    ),
}
CASES = [
    ("default", "fsdp 3"),
    *(full("default", name) for name in LAYOUTS if name != "fsdp 3"),
    *(full(variant, name) for variant in VARIANTS if variant != "default" for name in LAYOUTS),
]


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_equal_gradients_give_equal_bits_on_every_layout(
    run_on: Callable[..., Any], variant: str, layout: str
) -> None:
    optimizer, (world_size, options) = VARIANTS[variant], LAYOUTS[layout]
    alone = train(1, {}, optimizer, range(4))
    actual = merged(run_on(world_size, train, world_size, options, optimizer, range(4)))
    assert_equal(actual, alone, ADAMW_ROUNDS if layout == "fsdp 3" else ())
    momentum = [name for name in alone if name.endswith("momentum_buffer")]
    assert len(momentum) == (28 if variant == "normalize" else 12 if variant == "groups" else 14)


@pytest.mark.full
def test_weights_that_fsdp_gathers_in_float8_move_as_others_do(run_on: Callable[..., Any]) -> None:
    optimizer = VARIANTS["normalize"]
    actual = merged(run_on(2, train, 2, {"float8": "tensorwise"}, optimizer, range(4)))
    assert_equal(actual, train(1, {}, optimizer, range(4)))


def test_orthogonalising_shards_is_found() -> None:
    """The mistake that a sharded Muon invites: each rank orthogonalises its shard of a matrix."""

    def of_shards(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.cat([orthogonalize(shard, *args) for shard in x.chunk(2, dim=-2)], dim=-2)

    start, alone = train(1, {}, MUON, range(0)), train(1, {}, MUON, range(4))
    with patch.object(muon_optimizer, "orthogonalize", of_shards):
        wrong = train(1, {}, MUON, range(4))
    assert distance_moved(wrong, alone, start) > 0.3


def train_with_bucket_of(num_bytes: int, *args: Any) -> dict[str, torch.Tensor]:
    with patch.object(muon_optimizer, "BUCKET_BYTES", num_bytes):
        return train(*args)


@pytest.mark.full
def test_weights_that_fsdp_gathers_in_float8_move_as_in_bfloat16(run_on: Callable[..., Any]) -> None:
    alone = train(1, {}, MUON, range(3))
    actual = merged(run_on(2, train, 2, {"float8": "tensorwise"}, MUON, range(3)))
    assert_equal(actual, alone)


@pytest.mark.full
def test_the_size_of_buckets_changes_nothing(run_on: Callable[..., Any]) -> None:
    alone = train(1, {}, MUON, range(3))
    for num_bytes in (1, 5000):
        actual = run_on(4, train_with_bucket_of, num_bytes, 4, {"tp": 2}, MUON, range(3))
        assert_equal(merged(actual), alone)


@pytest.mark.full
@pytest.mark.parametrize("normalize", ["none", "neuron"])
@pytest.mark.parametrize("layout", ["fsdp 2", "fsdp 3", "hsdp 2 x 2", "fsdp 2 x tp 2", "tp 2 x pp 2"])
def test_a_checkpoint_goes_on_on_another_layout(
    tmp_path: Path, run_on: Callable[..., Any], layout: str, normalize: str
) -> None:
    optimizer, (world_size, options) = Muon(lr=LR, normalize=normalize), LAYOUTS[layout]
    whole = train(1, {}, optimizer, range(6))
    run_on(4, train, 4, {"tp": 2}, optimizer, range(3), None, tmp_path)
    resumed = run_on(world_size, train, world_size, options, optimizer, range(3, 6), tmp_path)
    assert_equal(merged(resumed), whole, ADAMW_ROUNDS if layout == "fsdp 3" else ())
    again = train(1, {}, optimizer, range(3, 6))  # without the checkpoint
    assert any(not torch.equal(again[name], tensor) for name, tensor in whole.items())


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_real_gradients_differ_by_rounding_only(run_on: Callable[..., Any], dtype: str, bound: float) -> None:
    optimizer = Muon(lr=1e-3, ns_dtype=dtype)
    start, alone = (train(1, {}, optimizer, range(n), None, None, set_real_gradients) for n in (0, 8))
    other = Muon(lr=1e-3, ns_dtype=dtype, ns_coefficients="jordan")
    assert distance_moved(train(1, {}, other, range(8), None, None, set_real_gradients), alone, start) > 0.05
    for options in ({}, {"tp": 2}):
        args = (4, options, optimizer, range(8), None, None, set_real_gradients)
        assert distance_moved(merged(run_on(4, train, *args)), alone, start) < bound


def collectives_of_a_step(world_size: int, optimizer: Muon) -> tuple[dict[str, int], int]:
    """The collectives of one step of `optimizer` with buckets of one matrix per owner, and the number of
    buckets."""
    from torch.distributed.tensor.debug import CommDebugMode

    from tests.support.gradients import build
    from tests.support.optimizer_layouts import set_equal_gradients

    model = build(world_size, torch.distributed.get_rank(), tied=False)
    with patch.object(muon_optimizer, "BUCKET_BYTES", 5000):
        built = optimizer.build(model.net, model.mesh)
    set_equal_gradients(model, 0)
    with CommDebugMode() as mode:
        built.step()
    counts = {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items() if n}
    return counts, len(built.ownership.buckets)  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize(("normalize", "per_bucket"), [("none", 2), ("neuron", 4)])
def test_a_step_has_two_collectives_per_bucket(
    run_on: Callable[..., Any], normalize: str, per_bucket: int
) -> None:
    counts, num_buckets = run_on(2, collectives_of_a_step, 2, Muon(lr=LR, normalize=normalize))[0]
    assert num_buckets > 2
    assert sum(counts.values()) == per_bucket * num_buckets, counts


@pytest.mark.full
def test_the_owners_share_the_work(run_on: Callable[..., Any]) -> None:
    shares = run_on(4, numbers_of_orthogonalised, 4)
    assert sum(shares) == 14
    assert max(shares) <= 5


def numbers_of_orthogonalised(world_size: int) -> int:
    """The number of matrices that this rank orthogonalises in a step."""
    seen = []

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(len(x))
        return orthogonalize(x, *args)

    with patch.object(muon_optimizer, "orthogonalize", counted):
        train(world_size, {}, MUON, range(1))
    return sum(seen)
