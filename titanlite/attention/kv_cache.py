"""Attention with a cache of keys and values, or of states, for generation: each forward takes only the new
tokens."""

from __future__ import annotations

import torch

from titanlite.attention.base import Attention, AttentionKind, previous_of
from titanlite.attention.linear import CachedLinearAttention
from titanlite.attention.sdpa import SDPAttention


class KVCache(Attention):
    """Keys and values of up to `length` tokens per sequence, and the states of layers of linear attention.

    The cache tells layers apart by the order of their calls, which is the same in every forward.
    """

    def __init__(self, length: int):
        self.length = length
        self.filled = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next_layer = 0
        self._mask: torch.Tensor | None = None
        self._linear = CachedLinearAttention()
        self._last_B1: torch.Tensor | None = None

    def previous_tokens(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        earlier, self._last_B1 = self._last_B1, tokens_BT[:, -1:]
        shifted = previous_of(tokens_BT)
        return shifted if earlier is None else torch.cat((earlier, shifted[:, 1:]), 1)

    def advance(self, num_new: int, device: torch.device) -> torch.Tensor:
        """Begin a forward of `num_new` tokens per sequence. Returns their positions, int64 [num_new]."""
        positions = torch.arange(self.filled + num_new, device=device)
        new = positions[self.filled :]
        # The first forward is plain causal attention, which SDPA computes without a mask.
        self._mask = (new[:, None] >= positions)[None, None] if self.filled else None
        self.filled, self._next_layer = len(positions), 0
        self._linear.begin_forward()
        return new

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = self.append(k_BTKE, v_BTKE)
        return SDPAttention(self._mask).attend(q_BTHE, keys, values, sinks_H)

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        if kind.is_linear:
            return self._linear
        positions = torch.arange(self.filled, device=tokens_BT.device)
        new = positions[self.filled - tokens_BT.shape[1] :]
        return _Cached(self, SDPAttention(self._mask, (new, positions)).of_kind(kind, tokens_BT))

    def append(self, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens' keys and values to the cache of the next layer. Returns the keys and values
        of all tokens so far."""
        if self._next_layer == len(self._layers):
            keys, values = (x.new_empty((len(x), self.length, *x.shape[2:])) for x in (k_BTKE, v_BTKE))
            self._layers.append((keys, values))
        keys, values = self._layers[self._next_layer]
        self._next_layer += 1
        new = slice(self.filled - k_BTKE.shape[1], self.filled)
        keys[:, new], values[:, new] = k_BTKE, v_BTKE
        return keys[:, : self.filled], values[:, : self.filled]


class _Cached(Attention):
    """Attention over the keys and values of all tokens so far. `attention` has the mask."""

    def __init__(self, cache: KVCache, attention: Attention):
        self.cache, self.attention = cache, attention

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.attention.attend(q_BTHE, *self.cache.append(k_BTKE, v_BTKE), sinks_H)
