"""Attention with a cache of keys and values, for generation: a forward of new tokens only, as if of all so
far.

Prompts of unequal lengths are padded on the left, so that the next token of each is in the same column;
positions count from the first real token of each prompt.
"""

from __future__ import annotations

import torch

from titanlite.attention.base import Attention
from titanlite.attention.sdpa import SDPAttention


class KVCache(Attention):
    """Keys and values of up to `length` tokens per sequence. `padding` int64 [B]: how many of the first
    tokens of each sequence are padding.

    Layers are told apart by the order of their calls, which is the same in every forward.
    """

    def __init__(self, padding: torch.Tensor, length: int):
        self.padding, self.length = padding, length
        self.filled = 0
        self._is_padded = bool(padding.any())
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next_layer = 0
        self._mask: torch.Tensor | None = None

    def advance(self, num_new: int) -> torch.Tensor:
        """Begin a forward of `num_new` tokens per sequence. Returns their positions, int64 [B, num_new]."""
        columns = torch.arange(self.filled + num_new, device=self.padding.device)
        new, padding = columns[self.filled :], self.padding[:, None]
        self._mask = None
        if self._is_padded or self.filled:
            before, own = new[:, None] >= columns, new[:, None] == columns
            # Padding sees itself: a softmax over no key at all is NaN, which would spread.
            self._mask = (before & (columns >= padding)[:, None] | own)[:, None]
        self.filled, self._next_layer = len(columns), 0
        return (new - padding).clamp(min=0)

    def attend(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor) -> torch.Tensor:
        keys, values = self.append(k_BTKE, v_BTKE)
        return SDPAttention(self._mask).attend(q_BTHE, keys, values)

    def append(self, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens' keys and values to the next layer's. Returns those of all tokens so far."""
        if self._next_layer == len(self._layers):
            B, _, K, E = k_BTKE.shape
            shape = (B, self.length, K, E)
            self._layers.append((k_BTKE.new_empty(shape), v_BTKE.new_empty(shape)))
        keys, values = self._layers[self._next_layer]
        self._next_layer += 1
        new = slice(self.filled - k_BTKE.shape[1], self.filled)
        keys[:, new], values[:, new] = k_BTKE, v_BTKE
        return keys[:, : self.filled], values[:, : self.filled]
