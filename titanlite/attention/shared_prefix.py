"""Attention of sequences that hold several continuations of one prefix, as the choices of a question."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.attention.base import previous_of
from titanlite.attention.sdpa import SDPAttention

# Without cuDNN, which prepares each shape for long: questions have many lengths.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SharedPrefixAttention(SDPAttention):
    """Causal attention in which each token sees the prefix and its own continuation. Runs in any process,
    whichever kernels of scaled_dot_product_attention training has switched off."""

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        repeats = q_BTHE.shape[2] // k_BTKE.shape[2]  # with a mask, few kernels take grouped queries
        keys, values = (x.repeat_interleave(repeats, 2) for x in (k_BTKE, v_BTKE))
        with sdpa_kernel(KERNELS):
            return super().attend(q_BTHE, keys, values, sinks_H)


def for_shared_prefix(
    tokens_BT: torch.Tensor, segments_BT: torch.Tensor, positions_BT: torch.Tensor
) -> SharedPrefixAttention:
    """Return the attention of one micro-batch. `segments_BT`: 0 for tokens of the prefix and padding at the
    end, the number of the continuation for others. `positions_BT` int64: positions of the tokens as if each
    continuation followed the prefix."""
    queries, keys = segments_BT[:, :, None], segments_BT[:, None, :]
    visible_BTT = ((keys == 0) | (keys == queries)).tril()
    attention = SharedPrefixAttention(visible_BTT[:, None], (positions_BT, positions_BT))
    before_BT = F.pad(segments_BT, (1, 0))[:, :-1]
    begins_BT = (segments_BT > 0) & (segments_BT != before_BT)
    last_B1 = (begins_BT.int().argmax(1, keepdim=True) - 1).clamp(min=0)  # of the prefix
    attention.previous_BT = torch.where(begins_BT, tokens_BT.gather(1, last_B1), previous_of(tokens_BT))
    return attention
