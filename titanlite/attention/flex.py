"""Attention by torch's FlexAttention: a mask is a function of positions, and blocks of the score matrix that
are fully masked are not computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from titanlite.attention.base import Attention, AttentionNeeds, document_numbers
from titanlite.attention.sdpa import SDPA
from titanlite.torch_compat import allow_many_graphs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class FlexAttention(Attention):
    """Attention with a block mask."""

    def __init__(self, block_mask: BlockMask):
        self.block_mask = block_mask

    def attend(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        gqa = q.shape[1] != k.shape[1]
        return _flex_attention(q, k, v, block_mask=self.block_mask, enable_gqa=gqa).transpose(1, 2)

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        B, S = k_BTKE.shape[:2]
        sequence = torch.arange(B, device=queries.device)[:, None, None]
        keys = torch.arange(S, device=queries.device)
        visible = self.block_mask.mask_mod(sequence, torch.zeros_like(sequence), queries[:, None], keys)
        return k_BTKE, visible.expand(B, -1, -1)


@dataclass(frozen=True, kw_only=True)
class Flex(SDPA, name="flex"):
    """Compiled FlexAttention for document masks and context parallel; CUDA only. Without masks,
    scaled_dot_product_attention runs."""

    kept_ops: ClassVar[tuple[str, ...]] = ("flex_attention",)

    @classmethod
    def works_on(cls, needs: AttentionNeeds) -> bool:
        return needs.device.type == "cuda"

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        documents_BT = document_numbers(positions_BT)

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q >= k) & (documents_BT[b, q] == documents_BT[b, k])

        B, T = positions_BT.shape
        return FlexAttention(_block_mask(visible, B, T, T, positions_BT.device))

    def masked(
        self, query_positions: torch.Tensor, key_positions: torch.Tensor, documents_BT: torch.Tensor | None
    ) -> Attention:
        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            i, j = query_positions[q], key_positions[k]
            return i >= j if documents_BT is None else (i >= j) & (documents_BT[b, i] == documents_BT[b, j])

        B = None if documents_BT is None else len(documents_BT)
        queries, keys = len(query_positions), len(key_positions)
        return FlexAttention(_block_mask(visible, B, queries, keys, query_positions.device))


# Set when the first mask is made: the import takes two seconds, because it imports the compiler.
_flex_attention: Any = None
_create_block_mask: Any = None


def _block_mask(visible: Any, B: int | None, queries: int, keys: int, device: torch.device) -> BlockMask:
    global _flex_attention, _create_block_mask
    if _flex_attention is None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Without compilation both functions would allocate [B, H, queries, keys].
        allow_many_graphs()
        _flex_attention = torch.compile(flex_attention, dynamic=False)
        _create_block_mask = torch.compile(create_block_mask, dynamic=False)
    return _create_block_mask(visible, B, None, queries, keys, device=device)
