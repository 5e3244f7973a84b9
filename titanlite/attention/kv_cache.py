"""A cache of keys and values: a forward over new tokens only, as if over all so far.

It is handed to the model in the place of a mask, and attention to it in turn: a model need not know of it.
Rows of unlike lengths begin with padding, so that the next token of each is in the same column; positions
count from a row's first real token. Shape suffixes as in attention.py.
"""

from __future__ import annotations

import torch


class Cache:
    """Keys and values of up to `length` tokens a row. `padding` int64 [B]: how many of each row's first
    tokens are none.

    Attentions are told apart by the order of their calls, which is the same in every forward.
    """

    def __init__(self, padding: torch.Tensor, length: int):
        self.padding, self.length = padding, length
        self.filled = 0
        self._padded = bool(padding.any())
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._turn = 0
        self._mask: torch.Tensor | None = None

    def advance(self, num_new: int) -> torch.Tensor:
        """Begin a forward of `num_new` tokens a row: their positions, int64 [B, num_new]."""
        columns = torch.arange(self.filled + num_new, device=self.padding.device)
        here, padding = columns[self.filled :], self.padding[:, None]
        self._mask = None
        if self._padded or self.filled:
            before, own = here[:, None] >= columns, here[:, None] == columns
            # Padding sees itself: a softmax over nothing is no number, and would spread.
            self._mask = (before & (columns >= padding)[:, None] | own)[:, None]
        self.filled, self._turn = len(columns), 0
        return (here - padding).clamp(min=0)

    def extend(
        self, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values of all tokens so far, of the attention whose turn it is, and the mask of the new
        ones' queries: bool [B, 1, T, filled], None for causal."""
        if self._turn == len(self._kept):
            B, _, K, E = k_BTKE.shape
            shape = (B, self.length, K, E)
            self._kept.append((k_BTKE.new_empty(shape), v_BTKE.new_empty(shape)))
        keys, values = self._kept[self._turn]
        self._turn += 1
        new = slice(self.filled - k_BTKE.shape[1], self.filled)
        keys[:, new], values[:, new] = k_BTKE, v_BTKE
        return keys[:, : self.filled], values[:, : self.filled], self._mask
