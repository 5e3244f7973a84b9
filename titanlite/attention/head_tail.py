"""Causal attention by fused kernels for context parallel with head-tail sharding.

A rank has two chunks of each sequence and attends over the gathered keys of all ranks. No fused kernel has
that mask. So each chunk takes two kernel calls: one over its own keys with a causal mask, one over all
earlier keys without a mask. The two results are merged by their log-sum-exps. In the backward, each kernel
call takes the merged output and log-sum-exps and returns its summand of the gradients (as in ring attention,
Liu et al. 2023). For torch.compile the whole computation is one opaque operator."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from titanlite.attention.base import (
    Attention,
    AttentionKind,
    AttentionNeeds,
    check_plain_softmax,
    padded_values,
)
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.sdpa import SDPA, example_inputs
from titanlite.config.component import ConfigError
from titanlite.torch_compat import attention_backward, attention_with_lse


class HeadTailAttention(Attention):
    """Attention of this rank's two chunks of each sequence over gathered keys and values. `flash`: on CUDA by
    torch's flash kernel, for which use_flash_attention_4 may have put FlashAttention 4; otherwise by
    cuDNN."""

    def __init__(self, sharding: SequenceSharding, flash: bool = False):
        self.sharding, self.flash = sharding, flash

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks_H is None, "of_kind refuses sinks"
        sharding = self.sharding
        keys, values = sharding.gather_in_order(k_BTKE), sharding.gather_in_order(v_BTKE)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, keys, padded_values(values, q_BTHE.shape[-1])))
        out_BHTE = head_tail_attention(q, k, v, *sharding.own_chunks, self.flash)[0]
        return out_BHTE.transpose(1, 2)[..., : v_BTKE.shape[-1]]

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        check_plain_softmax(self, kind)
        whole = not 0 < kind.window < self.sharding.size * tokens_BT.shape[1]
        return self if whole else super().of_kind(kind, tokens_BT)

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        keys_BSKE = self.sharding.gather_in_order(k_BTKE)
        length, device = keys_BSKE.shape[1], queries.device
        positions = self.sharding.local_positions(length, device)[queries]
        return keys_BSKE, positions[None, :, None] >= torch.arange(length, device=device)


@dataclass(frozen=True, kw_only=True)
class HeadTail(SDPA, name="head_tail"):
    """cuDNN's kernel, called chunk by chunk, for context parallel without document masks, sliding windows,
    attention sinks and soft caps: faster for long sequences."""

    supports_sinks: ClassVar[bool] = False
    supports_soft_cap: ClassVar[bool] = False
    linear_memory: ClassVar[bool] = True
    kept_ops: ClassVar[tuple[str, ...]] = ("titanlite.head_tail_attention",)
    KERNELS: ClassVar[tuple[str, ...]] = ("auto", "cudnn")

    def __post_init__(self) -> None:
        if self.sdpa_kernel not in self.KERNELS:
            raise ConfigError(f"'head_tail' runs cuDNN's kernel, not {self.sdpa_kernel!r}", "sdpa_kernel")

    @classmethod
    def works_on(cls, needs: AttentionNeeds) -> bool:
        if not needs.context_parallel or needs.masks_documents or needs.has_effective_window:
            return False
        if needs.device.type != "cuda":
            return True
        padded = replace(needs, v_head_dim=needs.head_dim)
        q, k, v = example_inputs(padded, min(needs.seq_len, 1024))  # support does not depend on the length
        gqa = needs.n_heads != needs.n_kv_heads
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, gqa)
        return torch.backends.cuda.can_use_cudnn_attention(params)

    def for_context_parallel(
        self,
        sharding: SequenceSharding,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None,
        num_documents: int,
    ) -> Attention:
        if positions_BT is not None:  # in sampling, where a chunk may be a single token
            return super().for_context_parallel(sharding, tokens_BT, positions_BT, num_documents)
        return HeadTailAttention(sharding)


@torch.library.custom_op("titanlite::head_tail_attention", mutates_args=())
def head_tail_attention(
    q_BHTE: torch.Tensor,
    k_BKTE: torch.Tensor,
    v_BKTE: torch.Tensor,
    first: int,
    last: int,
    flash: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries of chunks `first` and `last` of each sequence over keys and values of the
    whole sequence, in order. Returns the output, shaped like the queries, and log-sum-exps fp32 [B, H, T, 1].
    """
    out, lse = torch.empty_like(q_BHTE), _lse_like(q_BHTE)
    for queries, spans in _chunks(q_BHTE.shape[2], first, last):
        results = [
            _attend(q_BHTE[:, :, queries], k_BKTE[:, :, keys], v_BKTE[:, :, keys], causal, flash)
            for keys, causal in spans
        ]
        out[:, :, queries], lse[:, :, queries] = functools.reduce(_merge, results)
    return out, lse


@torch.library.custom_op("titanlite::head_tail_attention_backward", mutates_args=())
def _backward(
    grad_BHTE: torch.Tensor,
    q_BHTE: torch.Tensor,
    k_BKTE: torch.Tensor,
    v_BKTE: torch.Tensor,
    out_BHTE: torch.Tensor,
    lse_BHT1: torch.Tensor,
    first: int,
    last: int,
    flash: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q_BHTE, k_BKTE, v_BKTE))
    for queries, spans in _chunks(q_BHTE.shape[2], first, last):
        grad, q, out = (x[:, :, queries] for x in (grad_BHTE, q_BHTE, out_BHTE))
        lse = lse_BHT1[:, :, queries].contiguous()
        for keys, causal in spans:
            k, v = k_BKTE[:, :, keys], v_BKTE[:, :, keys]
            gradients = _attend_backward(grad, (q, k, v), out, lse, causal, flash)
            for total, span, gradient in zip((d_q, d_k, d_v), (queries, keys, keys), gradients):
                total[:, :, span] += gradient
    return d_q.to(q_BHTE.dtype), d_k.to(k_BKTE.dtype), d_v.to(v_BKTE.dtype)


def _chunks(tokens: int, first: int, last: int) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """For each of the two chunks: its span of the local queries, and the spans of keys to attend to, each
    with whether its mask is causal."""
    size = tokens // 2
    for i, chunk in enumerate((first, last)):
        begin = chunk * size
        spans = [(slice(begin, begin + size), True), (slice(0, begin), False)]
        yield slice(i * size, (i + 1) * size), spans if begin else spans[:1]


def _merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exps over two spans of keys, from output and log-sum-exps over each span."""
    (first_out, first_lse), (second_out, second_lse) = first, second
    second_share = torch.sigmoid(second_lse - first_lse)
    out = torch.lerp(first_out.float(), second_out.float(), second_share)
    return out, first_lse - F.logsigmoid(first_lse - second_lse)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, flash: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exps fp32 [B, H, T, 1] of one kernel call."""
    if not q.is_cuda:  # the CPU kernel needs as many key heads as query heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out, lse = attention_with_lse(q, k, v, causal, flash)
    return out, lse.reshape(*q.shape[:3], 1)


def _attend_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    flash: bool,
) -> tuple[torch.Tensor, ...]:
    """Summands of the gradients of q, k and v, from one kernel call. `inputs`: q, k and v."""
    q, k, v = inputs
    if q.is_cuda:
        return attention_backward(grad, inputs, out, lse, causal, flash)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    d_q, d_k, d_v = attention_backward(grad, (q, keys, values), out, lse, causal)
    return d_q, *(x.unflatten(1, (-1, groups)).sum(2) for x in (d_k, d_v))


def _lse_like(q_BHTE: torch.Tensor) -> torch.Tensor:
    return q_BHTE.new_empty((*q_BHTE.shape[:3], 1), dtype=torch.float32)


@head_tail_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), _lse_like(q)


@_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ctx.first, ctx.last, ctx.flash = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    gradients = _backward(grad, *ctx.saved_tensors, ctx.first, ctx.last, ctx.flash)
    return (*gradients, None, None, None)


head_tail_attention.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.titanlite.head_tail_attention)
def _flops(q: Any, k: Any, *rest: Any, **options: Any) -> int:
    """FLOPs for the compiler's memory budget. On average a query attends to half of the keys."""
    return 2 * q[0] * q[1] * q[2] * k[2] * q[3]
