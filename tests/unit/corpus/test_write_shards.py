"""Pins write_shards: documents of every kind become a dataset in their order, in constant memory, all or
nothing; a document that is none is named by its number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.config.component import ConfigError
from titanlite.corpus.write_shards import write_shards
from titanlite.data import tokenize_files
from titanlite.data.shards import TokenShards
from titanlite.data.sources import Tokens
from titanlite.tokenizers.bytes import Bytes

BYTES = Bytes().build()


def documents_of(shards: TokenShards) -> list[list[int]]:
    return [shards.document(i).tolist() for i in range(shards.num_documents)]


def framed(text: str) -> list[int]:
    return [256, *text.encode(), 257]


def test_documents_of_every_kind_keep_their_order(tmp_path: Path) -> None:
    ids = np.array([256, 1, 2, 257], dtype=np.int32)
    documents = ["one", {"body": "two", "id": 2}, "", ids, np.array([], np.uint8), {"body": ids[:2]}, "three"]
    shards = write_shards(documents, tmp_path / "out", BYTES, field="body")
    assert documents_of(shards) == [framed("one"), framed("two"), ids.tolist(), [256, 1], framed("three")]
    assert shards.prepared == {"tokenizer": {"name": "bytes"}}
    assert Tokens(path=str(shards.path)).build(BYTES, tmp_path).fingerprint == shards.fingerprint


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("shard_tokens", [1, 100, 1 << 26])
def test_shards_and_batches_change_no_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, shard_tokens: int
) -> None:
    rng = random.Random(0)
    texts = ["x" * rng.randint(1, 60) + str(i) for i in range(40)]
    monkeypatch.setattr(tokenize_files, "BATCH", batch)
    shards = write_shards(iter(texts), tmp_path / "out", BYTES, shard_tokens=shard_tokens)
    assert documents_of(shards) == [framed(text) for text in texts]
    shards.verify()
    starts = [int(shards.token_offsets(k)[0]) for k in range(len(shards.documents_by_shard))]
    sizes = np.diff([*starts, shards.num_tokens])
    assert (sizes[:-1] >= shard_tokens).all()
    assert len(sizes) == {1: 40, 1 << 26: 1}.get(shard_tokens, len(sizes))


def test_a_stream_is_read_once_and_little_of_it_ahead(tmp_path: Path) -> None:
    """Memory is that of one batch: no document is read before the batches before it are written."""
    output, most = tmp_path / "out", 0

    def stream() -> Iterator[str]:
        nonlocal most
        for i in range(2000):
            written = sum(file.stat().st_size // 2 for file in tmp_path.glob(".unfinished-*/*.bin"))
            most = max(most, i * 1002 - written)
            yield "y" * 1000

    assert write_shards(stream(), output, BYTES, shard_tokens=100_000).num_documents == 2000
    assert most < 1002 * 3 * tokenize_files.BATCH


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (3, "document 1 is int; expected str"),
        ([1, 2], "document 1 is list"),
        (np.zeros((2, 2), int), "document 1 is ndarray"),
        (np.zeros(2), "document 1 is ndarray"),
        ({"title": "a"}, r"document 1 has no field 'text' \(fields: title\)"),
        ({"text": None}, "document 1 is NoneType"),
        ("\ud800", "document 1 holds a lone surrogate"),
        (np.array([5, 258]), "document 1 has token ids from 5 to 258; the tokenizer's are 0 to 257"),
        (np.array([-1]), "document 1 has token ids from -1"),
    ],
)
def test_what_is_no_document_is_named_and_leaves_nothing(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_shards(["fine", document], tmp_path / "out", BYTES)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over_or_left_empty(tmp_path: Path) -> None:
    write_shards(["one"], tmp_path / "out", BYTES)
    with pytest.raises(ConfigError, match="out exists; choose another directory"):
        write_shards(["two"], tmp_path / "out", BYTES)
    for nothing in ([], ["", ""]):
        with pytest.raises(ConfigError, match="no documents to write"):
            write_shards(nothing, tmp_path / "empty", BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
