"""Linear attention under context parallel: each rank's outputs, and the gradients of its inputs, equal those
of whole sequences, also within documents that begin anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run
from tests.support.tiers import full
from titanlite.attention.base import Attention
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.gated_delta_rule_kernels import RuleInputs, torch_rule
from titanlite.attention.linear import LinearAttention, LinearBackend, ShardedLinearAttention
from titanlite.attention.sdpa import SDPA
from titanlite.models.base import AttentionKind

B, K, H, E, V = 2, 2, 4, 8, 6
KIND = AttentionKind(is_linear=True)


def tensors(num_chunks: int, size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The inputs of the convolution and of the rule for whole sequences, and positions within documents. Some
    documents begin at a chunk, at its last token, and in every chunk."""
    g, T = torch.Generator().manual_seed(0), num_chunks * size
    shapes = [(B, T, 5), (5, 4), (B, T, K, E), (B, T, K, E), (B, T, H, V), (B, T, H), (B, T, H)]
    x, weight, q, k, v, decay, beta = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[:, 0] = True
    starts[0, [size, 2 * size - 1, min(3 * size + 1, T - 1)]] = True
    starts[1, min(2 * size + 2, T - 1)] = True
    indices = torch.arange(T).expand(B, -1)
    positions = indices - torch.where(starts, indices, 0).cummax(1).values
    return [x, weight, q, k, v, -decay.exp() * 0.3, beta.sigmoid()], positions


def results(attention: Any, inputs: list[torch.Tensor], own: torch.Tensor, length: int) -> list[torch.Tensor]:
    """The outputs for the tokens `own`, and the gradients of all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    x, weight, *rule = leaves
    outs = [attention.convolve(x, weight), attention.attend_linearly(RuleInputs(*rule))]
    loss = torch.zeros((), dtype=torch.float64)
    for out in outs:
        g = torch.Generator().manual_seed(1)
        weights = torch.randn(B, length, *out.shape[2:], generator=g, dtype=torch.float64)
        loss = loss + (out * weights[:, own]).sum()
    return [*(x.detach() for x in outs), *torch.autograd.grad(loss, leaves)]


class _Lost(ShardedLinearAttention):
    """Control: each chunk begins with an empty state."""

    def _states_before(self, chunks: RuleInputs) -> torch.Tensor:
        return torch.zeros_like(super()._states_before(chunks))


class _OtherOrder(ShardedLinearAttention):
    """Control: the two chunks of a rank change their states."""

    def _states_before(self, chunks: RuleInputs) -> torch.Tensor:
        return super()._states_before(chunks).roll(B, 0)


def errors_on_rank(
    world_size: int, documents: bool, kind: type[ShardedLinearAttention], size: int = 6
) -> list[float]:
    """The largest errors of the outputs and gradients of this rank. `size`: tokens of a chunk."""
    sharding = SequenceSharding(init_device_mesh("cpu", (world_size,)))
    inputs, positions = tensors(2 * world_size, size)
    length = positions.shape[1]
    backend = LinearBackend(softmax=SDPA(), rule=torch_rule)
    given = positions if documents else None
    number = int((positions == 0).sum())
    whole = backend.for_documents(positions, number) if documents else backend.for_sequences(positions)
    own = sharding.local_positions(length, positions.device)

    def linear(attention: Attention) -> LinearAttention:
        chosen = attention.of_kind(KIND, positions)
        assert isinstance(chosen, LinearAttention)
        return chosen

    expected = results(linear(whole), inputs, torch.arange(length), length)
    sharded = linear(backend.for_context_parallel(sharding, positions, given, number))
    assert isinstance(sharded, ShardedLinearAttention)
    sharded = kind(sharded.rule, sharding, sharded.starts, sharded.documents)
    actual = results(sharded, [x[:, own] if x.ndim > 2 else x for x in inputs], own, length)
    # The gradient of the convolution's weight is a sum over ranks.
    torch.distributed.all_reduce(actual[3])
    return [
        float((ours - (theirs if i == 3 else theirs[:, own])).abs().max())
        for i, (ours, theirs) in enumerate(zip(actual, expected))
    ]


@pytest.mark.parametrize(("world_size", "documents"), [(2, True), full(2, False), full(3, True)])
def test_equal_to_whole_sequences(world_size: int, documents: bool) -> None:
    for errors in run(world_size, errors_on_rank, world_size, documents, ShardedLinearAttention):
        assert max(errors) < 1e-12


@pytest.mark.parametrize(("world_size", "size"), [(2, 1), full(2, 2), full(3, 1)])
@pytest.mark.parametrize("documents", [False, full(True)])
def test_chunks_that_are_shorter_than_the_convolution(world_size: int, size: int, documents: bool) -> None:
    for errors in run(world_size, errors_on_rank, world_size, documents, ShardedLinearAttention, size):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("kind", [_Lost, full(_OtherOrder)])
def test_control_states_are_passed_along_the_ranks(kind: type[ShardedLinearAttention]) -> None:
    assert min(errors[1] for errors in run(2, errors_on_rank, 2, False, kind)) > 1e-3
