"""A fingerprint changes with every single bit, is the same with FSDP as in a single process, and making it
changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.probes import batch, model
from titanlite.parallel.fingerprint import INTEGERS, bit_sum
from titanlite.parallel.sharded_model import ShardedModel

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]
NUM_TARGETS = torch.tensor(100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_changes_with_each_bit(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype).t()  # not contiguous
    bits = tensor.view(INTEGERS[tensor.element_size()])
    for shift in range(8 * tensor.element_size()):
        flipped = bits.clone()
        flipped[3, 2] ^= torch.ones((), dtype=bits.dtype) << shift
        assert bit_sum(flipped.view(dtype)) != bit_sum(tensor)
    assert bit_sum(tensor.contiguous()) == bit_sum(tensor)


def numbers(sharded: ShardedModel) -> dict[str, int]:
    return {name: int(digest) for name, digest in sharded.fingerprint(batch(), NUM_TARGETS).items()}


def test_the_fingerprint_of_a_single_process_is_that_of_its_gradients() -> None:
    net = (sharded := model()).net
    digests = numbers(sharded)
    assert numbers(sharded) == digests
    assert all(parameter.grad is None for parameter in net.parameters())
    loss = sharded.forward_backward([batch()], NUM_TARGETS)
    assert digests["loss"] == bit_sum(loss)
    of_gradients = {"gradient of other parameters": 0} | {f"gradient of {block}": 0 for block in blocks(net)}
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        block = next((block for block in blocks(net) if name.startswith(f"{block}.")), "other parameters")
        of_gradients[f"gradient of {block}"] += int(bit_sum(parameter.grad))
    assert digests == {"loss": digests["loss"]} | of_gradients


def blocks(net: Any) -> list[str]:
    return [f"model.layers.{name}" for name in net.blocks()]


def fingerprint_and_gradients() -> tuple[dict[str, int], bool, list[float]]:
    """The fingerprint on one rank, whether it left gradients, and the gradients of a step after it."""
    sharded = model(2)
    digests = numbers(sharded)
    is_left = any(parameter.grad is not None for parameter in sharded.net.parameters())
    sharded.forward_backward([batch()], NUM_TARGETS)
    return digests, is_left, [float(p.grad.full_tensor().sum()) for p in sharded.net.parameters()]


def gradients_alone() -> list[float]:
    sharded = model(2)
    sharded.forward_backward([batch()], NUM_TARGETS)
    return [float(p.grad.full_tensor().sum()) for p in sharded.net.parameters()]


def test_fsdp_has_the_fingerprint_of_a_single_process(run_on: Any) -> None:
    digests = numbers(model())
    gradients = run_on(2, gradients_alone)
    assert run_on(2, fingerprint_and_gradients) == [(digests, False, rank) for rank in gradients]


def test_a_bit_of_a_weight_changes_the_fingerprint() -> None:
    sharded = model()
    before = numbers(sharded)
    weight = sharded.net.get_parameter("model.layers.1.mlp.up_proj.weight")
    weight.data.view(torch.int32)[0, 0] ^= 1 << 14
    assert all(value != before[name] for name, value in numbers(sharded).items())
