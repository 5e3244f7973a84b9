"""Causal attention for two pieces of each row, one as far from its beginning as the other from its end
(context parallel), over all keys: by the fast kernels, which know of no such mask.

A piece sees all keys before it, and its own causally. That is a call each; what the two find is merged by
their log-sum-exps, and a backward call that is given the merged result finds its share of the gradients (as
in ring attention, Liu et al. 2023). One opaque operation for the compiler. Shape suffixes as in attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

_aten = torch.ops.aten


@torch.library.custom_op("titanlite::attention_of_pieces", mutates_args=())
def attention_of_pieces(
    q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries are the pieces number `first` and `last` of a row, keys and values the whole row in order.
    Returns the output, like the queries, and log-sum-exps fp32 [B, H, T, 1]."""
    out, lse = torch.empty_like(q_BHTE), _lse_like(q_BHTE)
    for here, spans in _pieces(q_BHTE.shape[2], first, last):
        found = None
        for keys, causal in spans:
            part = _attend(q_BHTE[:, :, here], k_BKTE[:, :, keys], v_BKTE[:, :, keys], causal)
            found = part if found is None else _merged(*found, *part)
        assert found is not None
        out[:, :, here], lse[:, :, here] = found
    return out, lse


@torch.library.custom_op("titanlite::attention_of_pieces_backward", mutates_args=())
def _backward(
    grad_BHTE: torch.Tensor,
    q_BHTE: torch.Tensor,
    k_BKTE: torch.Tensor,
    v_BKTE: torch.Tensor,
    out_BHTE: torch.Tensor,
    lse_BHT1: torch.Tensor,
    first: int,
    last: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q_BHTE, k_BKTE, v_BKTE))
    for here, spans in _pieces(q_BHTE.shape[2], first, last):
        grad, q, out = (x[:, :, here] for x in (grad_BHTE, q_BHTE, out_BHTE))
        lse = lse_BHT1[:, :, here].contiguous()
        for keys, causal in spans:
            found = _attend_backward(grad, q, k_BKTE[:, :, keys], v_BKTE[:, :, keys], out, lse, causal)
            for total, at, part in zip((d_q, d_k, d_v), (here, keys, keys), found):
                total[:, :, at] += part
    return d_q.to(q_BHTE.dtype), d_k.to(k_BKTE.dtype), d_v.to(v_BKTE.dtype)


def _pieces(tokens: int, first: int, last: int) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Where each of the two pieces is among the queries, and the spans of keys that it sees, the causal one
    first."""
    size = tokens // 2
    for i, piece in enumerate((first, last)):
        begin = piece * size
        spans = [(slice(begin, begin + size), True), (slice(0, begin), False)]
        yield slice(i * size, (i + 1) * size), spans if begin else spans[:1]


def _merged(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two spans of keys, from that over each."""
    share = torch.sigmoid(other_lse - lse)
    return torch.lerp(out.float(), other_out.float(), share), lse - F.logsigmoid(lse - other_lse)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and log-sum-exps fp32 [B, H, T, 1]."""
    if q.is_cuda:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    else:  # its kernel wants as many key heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse.reshape(*q.shape[:3], 1)


def _attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v."""
    if q.is_cuda:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, of which there is none
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal
        )
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    d_q, d_k, d_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, keys, values, out, lse.squeeze(-1), 0.0, causal
    )
    return d_q, *(x.unflatten(1, (-1, groups)).sum(2) for x in (d_k, d_v))


def _lse_like(q_BHTE: torch.Tensor) -> torch.Tensor:
    return q_BHTE.new_empty((*q_BHTE.shape[:3], 1), dtype=torch.float32)


@attention_of_pieces.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), _lse_like(q)


@_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ctx.first, ctx.last = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return (*_backward(grad, *ctx.saved_tensors, ctx.first, ctx.last), None, None)


attention_of_pieces.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.titanlite.attention_of_pieces)
def _flops(q: Any, k: Any, *rest: Any, **options: Any) -> int:
    """What the compiler's memory budget holds recomputing it to cost; a piece sees half of the keys."""
    return 2 * q[0] * q[1] * q[2] * k[2] * q[3]
