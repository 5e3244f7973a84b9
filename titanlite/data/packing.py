"""Packing: maps a sequence number of a source to a sequence of seq_len + 1 tokens.

`chunk`: sequence i is tokens [i * seq_len, i * seq_len + seq_len] of the concatenated documents. Neighbouring
sequences share a token: the last target of a sequence is the first input of the next sequence, so every token
is a target exactly once per epoch.

`best_fit`: several whole documents share a sequence, and documents longer than a sequence are split.
packing_index.py assigns documents to sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.data.packing_index import PackingIndex, open_packing_index
from titanlite.data.sharded_tokens import ShardedTokens


@dataclass(frozen=True)
class TokenSequence:
    """A training sequence. `tokens`: int64 [seq_len + 1]. `document_starts`: the positions at which documents
    start, int64, ascending (0 only if a document starts there); None if boundaries are not needed.
    `num_padding`: number of padding tokens at the end. `loss_mask`: which tokens count as targets, bool
    [seq_len + 1]; None if all do. The first token is never a target."""

    tokens: np.ndarray
    document_starts: np.ndarray | None = None
    num_padding: int = 0
    loss_mask: np.ndarray | None = None


class PackedSequences:
    """The sequences of one source, as a list of `len(packed)` TokenSequences.

    `with_document_starts`: whether the sequences of `chunk` packing have `document_starts`, which costs a
    search. Raises ConfigError for a source that is shorter than one sequence.
    """

    def __init__(self, shards: ShardedTokens, seq_len: int, cache_dir: Path, with_document_starts: bool):
        self.shards, self.seq_len, self.with_document_starts = shards, seq_len, with_document_starts
        if shards.num_tokens <= seq_len:
            raise ConfigError(
                f"{shards.path} holds {shards.num_tokens} tokens, fewer than one sequence: "
                f"training.seq_len + 1 = {seq_len + 1}",
                "training.seq_len",
            )

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, number: int) -> TokenSequence:
        raise NotImplementedError

    def spans(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranges of the source's tokens in a sequence, each within one document: starts and
        lengths, int64 [spans] each."""
        raise NotImplementedError

    def reads(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of tokens that reading a sequence reads: start and length of each."""
        starts, lengths = self.spans(number)
        return list(zip(starts.tolist(), lengths.tolist()))

    @property
    def content(self) -> str:
        """Names what each sequence number stands for, also on other machines and in other runs."""
        return f"{type(self).__name__} {self.seq_len} {self.fingerprint}"

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the sequences' content, the key of shuffles."""
        return self.shards.fingerprint

    @property
    def padding_share(self) -> float:
        """The share of padding tokens among all tokens."""
        return 0.0


class ChunkedSequences(PackedSequences):
    """Packing by `chunk`: windows of the concatenated documents."""

    def __len__(self) -> int:
        return (self.shards.num_tokens - 1) // self.seq_len

    def __getitem__(self, number: int) -> TokenSequence:
        start, count = number * self.seq_len, self.seq_len + 1
        starts = self.shards.document_starts(start, count) if self.with_document_starts else None
        tokens, loss_mask = self.shards.read(start, count), self.shards.loss_mask(start, count)
        return TokenSequence(tokens, starts, loss_mask=loss_mask)

    def reads(self, number: int) -> list[tuple[int, int]]:
        return [(number * self.seq_len, self.seq_len + 1)]

    def spans(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        start, count = number * self.seq_len, self.seq_len + 1
        starts = np.union1d([0], self.shards.document_starts(start, count))
        return start + starts, np.diff(starts, append=count)


class BestFitSequences(PackedSequences):
    """Packing by `best_fit`: whole documents, and chunks of documents longer than a sequence."""

    def __init__(self, shards: ShardedTokens, seq_len: int, cache_dir: Path, with_document_starts: bool):
        super().__init__(shards, seq_len, cache_dir, with_document_starts)
        self.index: PackingIndex = open_packing_index(shards, seq_len + 1, cache_dir)

    def __len__(self) -> int:
        return self.index.num_sequences

    def __getitem__(self, number: int) -> TokenSequence:
        starts, lengths = self.spans(number)
        tokens = np.zeros(self.seq_len + 1, dtype=np.int64)
        loss_mask = np.zeros(self.seq_len + 1, dtype=np.bool_) if self.shards.has_loss_mask else None
        ends = np.cumsum(lengths)
        for start, length, end in zip(starts.tolist(), lengths.tolist(), ends.tolist()):
            tokens[end - length : end] = self.shards.read(start, length)
            if loss_mask is not None:
                loss_mask[end - length : end] = self.shards.loss_mask(start, length)
        return TokenSequence(tokens, ends - lengths, len(tokens) - int(ends[-1]), loss_mask)

    def spans(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return self.index.spans(number)

    @property
    def fingerprint(self) -> str:
        return f"{self.shards.fingerprint}-{self.index.fingerprint}"

    @property
    def padding_share(self) -> float:
        return 1 - self.shards.num_tokens / (self.index.num_sequences * (self.seq_len + 1))


PACKINGS: dict[str, type[PackedSequences]] = {"chunk": ChunkedSequences, "best_fit": BestFitSequences}
