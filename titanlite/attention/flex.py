"""Attention by torch's FlexAttention: a mask is a function of positions, and blocks of the score matrix that
are fully masked are not computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from titanlite.attention.base import (
    Attention,
    AttentionBackend,
    AttentionKind,
    AttentionNeeds,
    document_numbers,
)
from titanlite.attention.sdpa import SDPA, SDPAttention
from titanlite.torch_compat import allow_many_graphs, deterministic_options

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Mask(NamedTuple):
    """Which keys a query sees: of the keys at its own position and before, those in its document and within
    the window. `documents_BT` int32: the number of the document at each position; None: the sequence is one.
    `positions` int64: the positions of the queries and of the keys in the sequence; None: their indices.
    `window` in tokens; 0: none."""

    num_queries: int
    num_keys: int
    device: torch.device
    documents_BT: torch.Tensor | None = None
    positions: tuple[torch.Tensor, torch.Tensor] | None = None
    window: int = 0

    def block_mask(self) -> BlockMask:
        documents_BT, window = self.documents_BT, self.window
        queries, keys = self.positions or (None, None)

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            i, j = q if queries is None else queries[q], k if keys is None else keys[k]
            seen = i >= j
            if documents_BT is not None:
                seen = seen & (documents_BT[b, i] == documents_BT[b, j])
            return seen & (i - j < window) if window else seen

        B = None if documents_BT is None else len(documents_BT)
        return _block_mask(visible, B, self.num_queries, self.num_keys, self.device)


class FlexAttention(Attention):
    """Attention with a block mask, which `prepared` makes outside of compiled blocks, otherwise the first
    call of `attend`. `soft_cap`: as in AttentionKind."""

    def __init__(self, mask: Mask, soft_cap: float = 0.0):
        self.mask, self.score_mod = mask, _capped(soft_cap) if soft_cap else None

    @cached_property
    def block_mask(self) -> BlockMask:
        return self.mask.block_mask()

    def prepared(self) -> FlexAttention:
        """This object, with its block mask."""
        self.block_mask  # noqa: B018 -- cached
        return self

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        options = {"block_mask": self.block_mask, "enable_gqa": q.shape[1] != k.shape[1]}
        if self.score_mod is not None:
            options["score_mod"] = self.score_mod
        if sinks_H is None:
            return _flex_attention(q, k, v, **options).transpose(1, 2)
        out_BHTE, aux = _flex_attention(q, k, v, **options, return_aux=_with_lse)
        # The share of the softmax that the keys have, and the sink does not.
        share_BHT1 = torch.sigmoid(aux.lse[..., None].float() - sinks_H.float()[:, None, None])
        return (out_BHTE.float() * share_BHT1).to(q.dtype).transpose(1, 2)

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        hides_keys = 0 < kind.window < self.mask.num_keys
        if not hides_keys and not kind.soft_cap:
            return self.prepared()
        mask = self.mask._replace(window=kind.window) if hides_keys else self.mask
        return FlexAttention(mask, kind.soft_cap).prepared()

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        B, S = k_BTKE.shape[:2]
        sequence = torch.arange(B, device=queries.device)[:, None, None]
        keys = torch.arange(S, device=queries.device)
        visible = self.block_mask.mask_mod(sequence, torch.zeros_like(sequence), queries[:, None], keys)
        return k_BTKE, visible.expand(B, -1, -1)


def _capped(soft_cap: float) -> Callable[..., torch.Tensor]:
    """The function of scores that caps them. Made outside of compiled blocks, as the mask is."""

    def capped(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return capped


class Causal(SDPAttention):
    """Causal attention over whole sequences by scaled_dot_product_attention; with a window, sinks or a soft
    cap, by FlexAttention."""

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        T, device = tokens_BT.shape[1], tokens_BT.device
        window = kind.window if kind.window < T else 0
        if not window and not kind.changes_softmax:
            return self
        return FlexAttention(Mask(T, T, device, window=window), kind.soft_cap).prepared()


@dataclass(frozen=True, kw_only=True)
class Flex(SDPA, name="flex"):
    """Compiled FlexAttention for document masks, sliding windows, attention sinks, soft caps and context
    parallel; CUDA only, head dims from 16."""

    linear_memory: ClassVar[bool] = True
    kept_ops: ClassVar[tuple[str, ...]] = ("flex_attention",)

    @classmethod
    def works_on(cls, needs: AttentionNeeds) -> bool:
        return needs.device.type == "cuda" and min(needs.head_dim, needs.v_head_dim or 16) >= 16

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        super().build(needs)
        calls_of_kind = needs.has_effective_window or needs.changes_softmax
        return WindowedFlex(sdpa_kernel=self.sdpa_kernel) if calls_of_kind else self

    def for_sequences(self, tokens_BT: torch.Tensor) -> Attention:
        return Causal()

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        T = positions_BT.shape[1]
        return self.attention(Mask(T, T, positions_BT.device, document_numbers(positions_BT)))

    def masked(
        self, query_positions: torch.Tensor, key_positions: torch.Tensor, documents_BT: torch.Tensor | None
    ) -> Attention:
        positions, device = (query_positions, key_positions), query_positions.device
        return self.attention(Mask(len(query_positions), len(key_positions), device, documents_BT, positions))

    def attention(self, mask: Mask) -> Attention:
        """Attention with this mask. The model calls `attend` on it."""
        return FlexAttention(mask).prepared()


class WindowedFlex(Flex):
    """FlexAttention for a model with sliding windows, sinks or soft caps, whose forward calls `of_kind`: this
    makes the block mask of each kind, and no other."""

    def attention(self, mask: Mask) -> Attention:
        return FlexAttention(mask)


# Set when the first mask is made: the import takes two seconds, because it imports the compiler.
_flex_attention: Any = None
_create_block_mask: Any = None
_with_lse: Any = None  # asks for the log-sum-exps, which have gradients


def _block_mask(visible: Any, B: int | None, queries: int, keys: int, device: torch.device) -> BlockMask:
    global _flex_attention, _create_block_mask, _with_lse
    if _flex_attention is None:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        # Without compilation both functions would allocate [B, H, queries, keys].
        allow_many_graphs()
        options = deterministic_options("inductor")
        _flex_attention = torch.compile(flex_attention, dynamic=False, options=options)
        _with_lse = AuxRequest(lse=True)
        _create_block_mask = torch.compile(create_block_mask, dynamic=False, options=options)
    return _create_block_mask(visible, B, None, queries, keys, device=device)
