"""Datasets of given token ids for tests, without text or a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titanlite.data.shards import TokenShards, token_dtype, write_description, write_shard
from titanlite.tokenizers.base import Tokenizer


class FakeTokenizer(Tokenizer):
    """The properties of a tokenizer that a dataset records."""

    bos, eos = 0, 1

    def __init__(self, vocab_size: int = 1000, fingerprint: str = "f" * 16):
        self.vocab_size, self.fingerprint = vocab_size, fingerprint


def write_dataset(
    path: Path,
    documents: Sequence[Sequence[int]],
    tokenizer: Tokenizer | None = None,
    shard_tokens: int = 1 << 20,
) -> TokenShards:
    """The documents in shards of at most `shard_tokens`, or of a single document that is longer."""
    tokenizer = tokenizer or FakeTokenizer()
    shards: list[list[np.ndarray]] = [[]]
    for ids in documents:
        if (size := sum(map(len, shards[-1]))) and size + len(ids) > shard_tokens:
            shards.append([])
        shards[-1].append(np.asarray(ids))
    path.mkdir(parents=True)
    dtype = token_dtype(tokenizer.vocab_size)
    entries = [write_shard(path, f"{i:05}", shard, dtype) for i, shard in enumerate(shards)]
    write_description(path, tokenizer, entries, {"field": "text"})
    return TokenShards(path)
