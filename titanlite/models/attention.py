"""Attention behind one call. Today: causal attention within a row, through torch's
scaled_dot_product_attention.

Shape suffixes: B batch, T tokens, H query heads, K key/value heads (H is a multiple of K), E head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_attention(q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor) -> torch.Tensor:
    """Each token attends to itself and the tokens before it: [B, T, H, E]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    out_BHTE = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out_BHTE.transpose(1, 2)
