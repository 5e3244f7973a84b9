"""Attention by torch's varlen kernel: FlashAttention over the concatenated documents of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from titanlite.attention.base import (
    Attention,
    AttentionKind,
    AttentionNeeds,
    check_plain_softmax,
    padded_values,
)
from titanlite.attention.sdpa import SDPA, SDPAttention
from titanlite.torch_compat import load_varlen_attention, mark_dynamic


class Causal(SDPAttention):
    """Causal attention over whole sequences by scaled_dot_product_attention; with a window by the varlen
    kernel, for which each sequence is a document."""

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        check_plain_softmax(self, kind)
        B, T = tokens_BT.shape
        if not 0 < kind.window < T:
            return self
        _load_varlen()
        starts = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=tokens_BT.device)
        return VarlenAttention(starts, T, kind.window)


class VarlenAttention(Attention):
    """Attention within documents. `cu_seqlens` int32 [documents + 1]: the index among the B * T tokens at
    which each document begins, then B * T. Trailing documents may be empty. `max_seqlen`: an upper bound of
    the documents' lengths. `window`: the sliding window in tokens; 0: none."""

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int, window: int = 0):
        self.cu_seqlens, self.max_seqlen, self.window = cu_seqlens, max_seqlen, window

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks_H is None, "of_kind refuses sinks"
        values = padded_values(v_BTKE, q_BTHE.shape[-1])
        q, k, v = (x.flatten(0, 1) for x in (q_BTHE, k_BTKE, values))
        out = _varlen_attention(q, k, v, self.cu_seqlens, self.max_seqlen, self.window)
        return out.unflatten(0, q_BTHE.shape[:2])[..., : v_BTKE.shape[-1]]

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        check_plain_softmax(self, kind)
        if not 0 < kind.window < self.max_seqlen:
            return self
        return VarlenAttention(self.cu_seqlens, self.max_seqlen, kind.window)

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        B, T = k_BTKE.shape[:2]
        tokens = torch.arange(B * T, device=queries.device, dtype=self.cu_seqlens.dtype)
        documents_BT = torch.searchsorted(self.cu_seqlens, tokens, right=True).view(B, T)
        same = documents_BT[:, queries, None] == documents_BT[:, None]
        distance = queries[:, None] - torch.arange(T, device=queries.device)
        return k_BTKE, same & (distance >= 0) & (distance < (self.window or T))


@dataclass(frozen=True, kw_only=True)
class Varlen(SDPA, name="varlen"):
    """FlashAttention for document masks and sliding windows; CUDA and bf16 or fp16 only, not with context
    parallel, attention sinks and soft caps."""

    supports_sinks: ClassVar[bool] = False
    supports_soft_cap: ClassVar[bool] = False
    linear_memory: ClassVar[bool] = True
    kept_ops: ClassVar[tuple[str, ...]] = ("varlen_attn",)

    @classmethod
    def works_on(cls, needs: AttentionNeeds) -> bool:
        on_cuda = needs.device.type == "cuda" and needs.dtype in (torch.bfloat16, torch.float16)
        return on_cuda and not needs.context_parallel and _load_varlen()

    def for_sequences(self, tokens_BT: torch.Tensor) -> Attention:
        return Causal()

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        _load_varlen()
        B, T = positions_BT.shape
        capacity = 1 << (num_documents - 1).bit_length()  # few sizes, should a compiler specialise on them
        is_start = positions_BT.flatten() == 0
        starts = torch.nonzero_static(is_start, size=capacity, fill_value=B * T).flatten()
        cu_seqlens = F.pad(starts.to(torch.int32), (0, 1), value=B * T)
        mark_dynamic(cu_seqlens, 0)  # one graph of a compiled block serves all sizes
        return VarlenAttention(cu_seqlens, max_seqlen=T)


# Set when a run may need the kernel: the import takes two seconds, because it imports the compiler.
_varlen_attention: Any = None


def _load_varlen() -> bool:
    """Import the kernel. Returns False if this torch lacks it."""
    global _varlen_attention
    _varlen_attention = _varlen_attention or load_varlen_attention()
    return _varlen_attention is not None
