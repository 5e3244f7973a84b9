"""Attention by torch's varlen kernel: FlashAttention over the concatenated documents of a micro-batch."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from titanlite.attention.base import Attention, AttentionNeeds
from titanlite.attention.sdpa import SDPA


class VarlenAttention(Attention):
    """Attention within documents. `cu_seqlens` int32 [documents + 1]: the index among the B * T tokens at
    which each document begins, then B * T. Trailing documents may be empty. `max_seqlen`: an upper bound of
    the documents' lengths."""

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int):
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen

    def attend(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q_BTHE, k_BTKE, v_BTKE))
        options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
        if _varlen_takes_gqa and q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        cu_seqlens, max_seqlen = self.cu_seqlens, self.max_seqlen
        out: Any = _varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
        return out.unflatten(0, q_BTHE.shape[:2])


@dataclass(frozen=True, kw_only=True)
class Varlen(SDPA, name="varlen"):
    """FlashAttention for document masks; CUDA and bf16 or fp16 only, not with context parallel. Without
    masks, scaled_dot_product_attention runs."""

    @classmethod
    def works_on(cls, needs: AttentionNeeds) -> bool:
        on_cuda = needs.device.type == "cuda" and needs.dtype in (torch.bfloat16, torch.float16)
        return on_cuda and not needs.context_parallel and _load_varlen()

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        _load_varlen()
        B, T = positions_BT.shape
        capacity = 1 << (num_documents - 1).bit_length()  # few different sizes, so few recompilations
        is_start = positions_BT.flatten() == 0
        starts = torch.nonzero_static(is_start, size=capacity, fill_value=B * T).flatten()
        return VarlenAttention(F.pad(starts.to(torch.int32), (0, 1), value=B * T), max_seqlen=T)


# Set when a run may need the kernel: the import takes two seconds, because it imports the compiler.
_varlen_attn: Any = None
_varlen_takes_gqa = False  # torch 2.11 has no enable_gqa and always takes fewer key heads


def _load_varlen() -> bool:
    """Import the kernel. Returns False if this torch lacks it."""
    global _varlen_attn, _varlen_takes_gqa
    if _varlen_attn is None:
        with suppress(ImportError):  # not on every platform
            from torch.nn.attention.varlen import varlen_attn

            _varlen_attn = varlen_attn
            _varlen_takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return _varlen_attn is not None
