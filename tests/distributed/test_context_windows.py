"""Sliding windows under context parallel: neighbouring chunks exchange keys, and outputs and gradients are
those of the whole sequences."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run
from tests.support.tiers import full
from titanlite.attention import context_parallel
from titanlite.attention.base import AttentionKind
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.sdpa import SDPA, ChunkAttention

B, H, K, E, SIZE = 2, 4, 2, 8, 6


def tensors(num_chunks: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, fp64, and the positions in documents."""
    generator = torch.Generator().manual_seed(0)
    T = num_chunks * SIZE
    shapes = [(B, T, heads, E) for heads in (H, K, K, H)]
    positions = torch.arange(T).repeat(B, 1)
    for sequence, start in ((0, 4), (0, 5), (1, 9), (1, T - 3)):
        positions[sequence, start:] = torch.arange(T - start)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] + [positions]


def outputs(
    attention: Any, inputs: list[torch.Tensor], gradient: torch.Tensor, kind: AttentionKind
) -> list[torch.Tensor]:
    """Output and gradients."""
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    sinks = [torch.linspace(-1, 1, H, dtype=torch.float64)] * kind.has_sinks
    out = attention.attend(q, k, v, *sinks)
    return [out, *torch.autograd.grad(out, (q, k, v), gradient)]


def errors_on_rank(
    ranks: int, kind: AttentionKind, documents: bool, sharding_type: Any = SequenceSharding
) -> float:
    """The largest difference of this rank's outputs and gradients from those of the whole sequences."""
    sharding = sharding_type(init_device_mesh("cpu", (ranks,)))
    *inputs, gradient, positions = tensors(2 * ranks)
    backend = SDPA()
    tokens = positions
    whole = backend.for_documents(positions, 9) if documents else backend.for_sequences(tokens)
    wanted = outputs(whole.of_kind(kind, tokens), inputs, gradient, kind)
    own = sharding.local_positions(tokens.shape[1], tokens.device)
    attention = backend.for_context_parallel(sharding, tokens, positions if documents else None, 9)
    attention = attention.of_kind(kind, tokens[:, own])
    assert isinstance(attention, ChunkAttention) == (1 < kind.window <= SIZE)
    actual = outputs(attention, [x[:, own] for x in inputs], gradient[:, own], kind)
    seen, by_whole = (
        a.visible_keys(k, torch.arange(len(own)) if a is attention else own)
        for a, k in ((attention, inputs[1][:, own]), (whole.of_kind(kind, tokens), inputs[1]))
    )
    assert seen is not None
    assert by_whole is not None
    assert torch.equal(seen[1].sum(-1).expand(B, -1), by_whole[1].sum(-1).expand(B, -1))
    return max((a - b[:, own]).abs().max().item() for a, b in zip(actual, wanted))


@pytest.mark.parametrize("documents", [full(False), True])
@pytest.mark.parametrize(
    ("ranks", "window"),
    [(2, 4), full(2, 1), full(2, 2), full(2, SIZE), full(2, SIZE + 1), full(3, SIZE), full(4, 3)],
)
def test_outputs_and_gradients_are_those_of_whole_sequences(ranks: int, window: int, documents: bool) -> None:
    assert max(run(ranks, errors_on_rank, ranks, AttentionKind(window), documents)) < 1e-12


@pytest.mark.full
def test_with_sinks_and_a_soft_cap() -> None:
    assert max(run(3, errors_on_rank, 3, AttentionKind(4, True, 1.5), True)) < 1e-12


class WithTheOwnEnds(SequenceSharding):
    """Each chunk gets the end of this rank's other chunk."""

    def chunks_with_previous(self, x: torch.Tensor, num: int) -> torch.Tensor:
        chunks = self.chunks(x)
        return torch.cat((chunks[:, chunks.shape[1] - num :].roll(B, 0), chunks), 1)


def test_control_other_ends_are_noticed() -> None:
    assert min(run(2, errors_on_rank, 2, AttentionKind(4), False, WithTheOwnEnds)) > 1e-3


def sent_on_rank(window: int) -> int:
    """The number of values that this rank sends in a forward."""
    sharding = SequenceSharding(init_device_mesh("cpu", (2,)))
    *inputs, _, positions = tensors(4)
    own = sharding.local_positions(positions.shape[1], positions.device)
    attention = SDPA().for_context_parallel(sharding, positions, None, 0)
    attention = attention.of_kind(AttentionKind(window), positions[:, own])
    num_sent = 0
    exchange = context_parallel.all_to_all_with_gradient

    def counted(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal num_sent
        num_sent += tensor.numel()
        return exchange(tensor, *args)

    with patch.object(context_parallel, "all_to_all_with_gradient", counted), torch.no_grad():
        attention.attend(*(x[:, own] for x in inputs))
    return num_sent


def test_only_the_ends_of_chunks_are_sent() -> None:
    assert run(2, sent_on_rank, 4) == [2 * B * 3 * K * E] * 2  # keys and values
