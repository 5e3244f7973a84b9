"""Packing: how a source's tokens become rows of seq_len + 1 tokens, by row number.

`chunk`: row i is tokens [i * seq_len, i * seq_len + seq_len] of the concatenated documents. Neighbouring rows
share one token: the last target of one is the first input of the next, so every token is a target exactly
once an epoch.
"""

from __future__ import annotations

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.data.shards import TokenShards


class ChunkRows:
    """Rows of a source under `chunk` packing: `len(rows)` of them, `rows[i]` int64 [seq_len + 1]."""

    def __init__(self, shards: TokenShards, seq_len: int):
        self.shards, self.seq_len = shards, seq_len
        if len(self) == 0:
            raise ConfigError(
                f"{shards.path} holds {shards.num_tokens} tokens, fewer than one row: "
                f"training.seq_len + 1 = {seq_len + 1}",
                "training.seq_len",
            )

    def __len__(self) -> int:
        return (self.shards.num_tokens - 1) // self.seq_len

    def __getitem__(self, row: int) -> np.ndarray:
        return self.shards.read(row * self.seq_len, self.seq_len + 1)


PACKINGS = {"chunk": ChunkRows}
