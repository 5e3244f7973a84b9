"""Head-tail attention of two chunks equals attention over the whole sequence at their positions, forward and
backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.tiers import full
from titanlite.attention.base import AttentionKind
from titanlite.attention.head_tail import HeadTailAttention, head_tail_attention
from titanlite.config.component import ConfigError

B, H, K, E, SIZE = 2, 4, 2, 8, 16


def tensors(chunks: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, for sequences of `chunks` chunks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, n, chunks * SIZE, E) for n in (H, K, K, H)]
    return [(2 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def at(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The chunks `first` and `last` of a sequence, concatenated."""
    chunks = x.split(SIZE, 2)
    return torch.cat((chunks[first], chunks[last]), 2)


@pytest.mark.parametrize("compiled", [False, full(True)])
@pytest.mark.parametrize(("first", "last"), [(1, 6), full(0, 7), full(3, 4)])
def test_two_chunks_equal_the_whole_sequence_at_their_positions(
    first: int, last: int, compiled: bool
) -> None:
    q, k, v, grad = tensors(8)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(at(out, first, last), whole, at(grad, first, last))
    part = [x.clone().requires_grad_() for x in (at(q, first, last), k, v)]
    attend = torch.compile(head_tail_attention, fullgraph=True) if compiled else head_tail_attention
    actual = attend(*part, first, last)[0]
    assert torch.allclose(actual, at(out, first, last), rtol=1e-4, atol=1e-4)
    d_q, d_k, d_v = torch.autograd.grad(actual, part, at(grad, first, last))
    assert torch.allclose(d_q, at(wanted[0], first, last), rtol=1e-4, atol=1e-4)
    assert torch.allclose(d_k, wanted[1], rtol=1e-4, atol=1e-4)
    assert torch.allclose(d_v, wanted[2], rtol=1e-4, atol=1e-4)


def test_control_another_chunk_is_noticed() -> None:
    q, k, v, _ = tensors(8)
    right, wrong = (head_tail_attention(at(q, 1, 6), k, v, *chunks)[0] for chunks in ((1, 6), (2, 6)))
    assert torch.equal(right[:, :, SIZE:], wrong[:, :, SIZE:])
    assert not torch.allclose(right[:, :, :SIZE], wrong[:, :, :SIZE], atol=1e-2)


class TwoRanks:
    """What HeadTailAttention.within needs of a SequenceSharding."""

    size = 2


def test_a_window_that_hides_no_token_changes_nothing() -> None:
    attention = HeadTailAttention(TwoRanks())  # type: ignore[arg-type]
    tokens = torch.zeros(1, SIZE)  # of a sequence of twice as many
    assert attention.of_kind(AttentionKind(2 * SIZE), tokens) is attention
    with pytest.raises(ConfigError, match="HeadTailAttention does not support a sliding window"):
        attention.of_kind(AttentionKind(2 * SIZE - 1), tokens)


def test_bf16_is_as_precise_as_for_the_whole_sequence() -> None:
    q, k, v, _ = tensors(8, torch.float64)
    exact = at(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 1, 6)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    whole = at(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 1, 6)
    actual = head_tail_attention(at(q, 1, 6), k, v, 1, 6)[0]
    assert actual.dtype == torch.bfloat16
    assert (actual - exact).norm() < 1.1 * (whole - exact).norm()


def test_the_operation_is_well_formed() -> None:
    """torch's check of custom operators: shapes, gradients and the implementation for the compiler."""
    q, k, v, _ = (x.requires_grad_() for x in tensors(4))
    torch.library.opcheck(head_tail_attention, (at(q, 1, 2).detach().requires_grad_(), k, v, 1, 2))
