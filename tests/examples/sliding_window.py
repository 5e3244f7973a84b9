"""An attention backend from outside the package: each token sees the last `window` tokens only.

To use it, put this file into the current directory or install it, and write

    [job]
    imports = ["sliding_window"]

    [attention]
    backend = "sliding_window"
    window = 512

The mask is dense, which is simple, and slow for long sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titanlite.attention.base import Attention, AttentionBackend, document_numbers
from titanlite.attention.sdpa import SDPAttention
from titanlite.config.component import ConfigError


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(AttentionBackend, name="sliding_window"):
    """Causal attention within a window. Without `for_context_parallel`, context parallel is refused."""

    window: int = 512
    """Tokens that each token sees, itself included."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"{self.window} is below 1", "window")

    def for_sequences(self, tokens_BT: torch.Tensor) -> Attention:
        return SDPAttention(self._visible(tokens_BT)[None, None])

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        documents_BT = document_numbers(positions_BT)
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        return SDPAttention((same_BTT & self._visible(positions_BT))[:, None])

    def _visible(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Which positions (columns) each position of a sequence (rows) sees, bool [T, T]."""
        positions = torch.arange(x_BT.shape[1], device=x_BT.device)
        distance = positions[:, None] - positions
        return (distance >= 0) & (distance < self.window)
