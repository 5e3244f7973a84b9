"""Packing: how a source's tokens become rows of seq_len + 1 tokens, by row number.

`chunk`: row i is tokens [i * seq_len, i * seq_len + seq_len] of the concatenated documents. Neighbouring rows
share one token: the last target of one is the first input of the next, so every token is a target exactly
once an epoch.

`best_fit`: whole documents share a row, those longer than a row are cut; the plan is in plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.data.plan import Plan, open_plan
from titanlite.data.shards import TokenShards


@dataclass(frozen=True)
class Row:
    """`tokens`: int64 [seq_len + 1]. `begins`: int64, ascending: where in the row a document begins (0 only
    if one does), or None where nobody asked. `num_padding`: tokens at the end that stand for nothing."""

    tokens: np.ndarray
    begins: np.ndarray | None = None
    num_padding: int = 0


class PackedRows:
    """Rows of a source, `len(rows)` of them, `rows[i]` a Row. `with_begins`: whether chunked rows say where
    documents begin, which costs a search."""

    def __init__(self, shards: TokenShards, seq_len: int, cache_dir: Path, with_begins: bool):
        self.shards, self.seq_len, self.with_begins = shards, seq_len, with_begins
        if shards.num_tokens <= seq_len:
            raise ConfigError(
                f"{shards.path} holds {shards.num_tokens} tokens, fewer than one row: "
                f"training.seq_len + 1 = {seq_len + 1}",
                "training.seq_len",
            )

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, row: int) -> Row:
        raise NotImplementedError

    def pieces(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The row's documents or pieces of documents as ranges of the source's tokens: starts and lengths,
        int64 each."""
        raise NotImplementedError

    @property
    def uid(self) -> str:
        """Names the rows by their content: what permutations are keyed with."""
        return self.shards.fingerprint

    @property
    def padding_share(self) -> float:
        """Padding of all rows' tokens."""
        return 0.0


class ChunkRows(PackedRows):
    """Windows of the concatenated documents."""

    def __len__(self) -> int:
        return (self.shards.num_tokens - 1) // self.seq_len

    def __getitem__(self, row: int) -> Row:
        start, count = row * self.seq_len, self.seq_len + 1
        begins = self.shards.begins(start, count) if self.with_begins else None
        return Row(self.shards.read(start, count), begins)

    def pieces(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        start, count = row * self.seq_len, self.seq_len + 1
        begins = np.union1d([0], self.shards.begins(start, count))
        return start + begins, np.diff(begins, append=count)


class BestFitRows(PackedRows):
    """Rows of whole documents, and of pieces of those that are longer than a row."""

    def __init__(self, shards: TokenShards, seq_len: int, cache_dir: Path, with_begins: bool):
        super().__init__(shards, seq_len, cache_dir, with_begins)
        self.plan: Plan = open_plan(shards, seq_len + 1, cache_dir)

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, row: int) -> Row:
        starts, lengths = self.pieces(row)
        tokens = np.zeros(self.seq_len + 1, dtype=np.int64)
        ends = np.cumsum(lengths)
        for start, length, end in zip(starts.tolist(), lengths.tolist(), ends.tolist()):
            tokens[end - length : end] = self.shards.read(start, length)
        return Row(tokens, ends - lengths, num_padding=len(tokens) - int(ends[-1]))

    def pieces(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        return self.plan.pieces(row)

    @property
    def uid(self) -> str:
        return f"{self.shards.fingerprint}-{self.plan.fingerprint}"  # other rows if the plan were another

    @property
    def padding_share(self) -> float:
        return 1 - self.shards.num_tokens / (self.plan.num_rows * (self.seq_len + 1))


PACKINGS: dict[str, type[PackedRows]] = {"chunk": ChunkRows, "best_fit": BestFitRows}
