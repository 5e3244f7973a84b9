"""Attention that is measured while it runs: the largest logit and the entropy of some queries, per head."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from titanlite.attention.base import Attention, AttentionKind


class RecordingAttention(Attention):
    """Passes each call on to `attention`. `record` gets the statistics of the queries at the indices
    `queries` int64 [Q], as `attention_statistics` returns them, and the number of these queries in all
    sequences. It is not called if `attention` does not tell which keys a query sees."""

    def __init__(
        self,
        attention: Attention,
        queries: torch.Tensor,
        record: Callable[[torch.Tensor, torch.Tensor, int], None],
        soft_cap: float = 0.0,
    ):
        self.attention, self.queries, self.record, self.soft_cap = attention, queries, record, soft_cap

    def previous_tokens(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.attention.previous_tokens(tokens_BT)

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        with torch.compiler.set_stance("default"):  # FlexAttention's mask is dense without the compiler
            attention = self.attention.of_kind(kind, tokens_BT)
        if kind.is_linear:  # it has no attention probabilities
            return attention
        return RecordingAttention(attention, self.queries, self.record, kind.soft_cap)

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        visible_keys = self.attention.visible_keys(k_BTKE, self.queries)
        if visible_keys is not None:
            statistics = attention_statistics(q_BTHE[:, self.queries], *visible_keys, self.soft_cap, sinks_H)
            self.record(*statistics, len(q_BTHE) * len(self.queries))
        sinks = () if sinks_H is None else (sinks_H,)
        # A kernel that needs the compiler, such as FlexAttention, would keep all scores in memory without it.
        with torch.compiler.set_stance("default"):
            return self.attention.attend(q_BTHE, k_BTKE, v_BTKE, *sinks)


def attention_statistics(
    q_BQHE: torch.Tensor,
    k_BSKE: torch.Tensor,
    visible_BQS: torch.Tensor,
    soft_cap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest attention logit of each head over the visible keys, fp32 [H], and the sum over sequences
    and queries of the entropy of each head's attention probabilities in nats, fp32 [H]. Without queries: -inf
    and 0. Logits are those that enter the softmax, after the soft cap. The probabilities are of the keys and
    of the head's sink, if it has one; the sink's logit does not count as the largest."""
    E, K = k_BSKE.shape[3], k_BSKE.shape[2]
    if q_BQHE.shape[1] == 0:
        zeros = q_BQHE.new_zeros(q_BQHE.shape[2], dtype=torch.float32)
        return zeros - math.inf, zeros
    largest, entropies = [], []
    # One key head at a time bounds the memory for the logits.
    sinks = [None] * K if sinks_H is None else sinks_H.float().view(K, -1, 1, 1).unbind()
    for q_BQGE, k_BSE, sinks_G11 in zip(q_BQHE.unflatten(2, (K, -1)).unbind(2), k_BSKE.unbind(2), sinks):
        logits_BGQS = torch.einsum("bqge,bse->bgqs", q_BQGE.float(), k_BSE.float()) / math.sqrt(E)
        if soft_cap:
            logits_BGQS = soft_cap * torch.tanh(logits_BGQS / soft_cap)
        logits_BGQS = logits_BGQS.masked_fill(~visible_BQS[:, None], -math.inf)
        largest.append(logits_BGQS.amax((0, 2, 3)))
        if sinks_G11 is not None:
            logits_BGQS = torch.cat((logits_BGQS, sinks_G11.expand(*logits_BGQS.shape[:-1], 1)), -1)
        entropies.append(torch.special.entr(logits_BGQS.softmax(-1)).sum((0, 2, 3)))
    return torch.cat(largest), torch.cat(entropies)
