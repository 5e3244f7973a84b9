"""Pins the shard format: what is written is read back, over any number of shards and for both widths; where
documents begin is found in any range; a wrong size, a changed byte, a missing file and a bad description are
each an error that names the file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.datasets import FakeTokenizer, write_dataset
from titanlite.config.component import ConfigError
from titanlite.corpus import show_data as data_tool
from titanlite.data.packing import BestFitSequences
from titanlite.data.shards import TokenShards
from titanlite.files import hash_file
from titanlite.tokenizers.base import Tokenizer

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [], [14, 15], [16], [17, 18, 19, 20]]
TOKENS = [t for document in DOCUMENTS for t in document]


def write(
    path: Path,
    documents: Sequence[Sequence[int]] = DOCUMENTS,
    tokenizer: Tokenizer | None = None,
    **options: int,
) -> TokenShards:
    return write_dataset(path, documents, tokenizer, **options)


@pytest.mark.parametrize(("shard_tokens", "num_shards"), [(1 << 20, 1), (5, 4), (1, 6), (10, 3)])
def test_round_trip_over_shards(tmp_path: Path, shard_tokens: int, num_shards: int) -> None:
    shards = write(tmp_path / "d", shard_tokens=shard_tokens)
    assert len(list((tmp_path / "d").glob("*.bin"))) == num_shards
    assert (shards.num_tokens, shards.num_documents) == (len(TOKENS), len(DOCUMENTS))
    assert shards.read(0, len(TOKENS)).tolist() == TOKENS
    assert shards.read(0, len(TOKENS)).dtype == np.int64
    assert [shards.document(i).tolist() for i in range(len(DOCUMENTS))] == DOCUMENTS
    with pytest.raises(IndexError):
        shards.document(len(DOCUMENTS))
    shards.verify()


def test_the_files_of_a_dataset(tmp_path: Path) -> None:
    write(tmp_path / "d", shard_tokens=10)
    names = sorted(p.name for p in (tmp_path / "d").iterdir())
    assert names == [f"0000{i}.{kind}" for i in range(3) for kind in ("bin", "idx")] + ["dataset.json"]


def test_documents_never_span_shards(tmp_path: Path) -> None:
    """A document longer than a shard makes its shard longer."""
    shards = write(tmp_path / "d", shard_tokens=5)
    offsets = [shards.token_offsets(k).tolist() for k in range(4)]
    assert offsets == [[0, 3, 4], [4, 13], [13, 13, 15, 16], [16, 20]]
    assert shards.documents_by_shard == [2, 1, 3, 1]
    assert [(tmp_path / "d" / f"{k:05}.bin").stat().st_size for k in range(4)] == [8, 18, 6, 8]


@pytest.mark.parametrize(("vocab_size", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4), (1 << 20, 4)])
def test_width_of_a_token(tmp_path: Path, vocab_size: int, width: int) -> None:
    documents = [[0, vocab_size - 1], [vocab_size // 2]]
    shards = write(tmp_path / "d", documents, FakeTokenizer(vocab_size))
    assert shards.read(0, 3).tolist() == [0, vocab_size - 1, vocab_size // 2]
    assert (tmp_path / "d" / "00000.bin").stat().st_size == 3 * width
    assert shards.vocab_size == vocab_size


def test_bytes_on_disk_are_little_endian(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 258]])
    assert (tmp_path / "d" / "00000.bin").read_bytes() == b"\x01\x00\x02\x01"
    assert (tmp_path / "d" / "00000.idx").read_bytes() == bytes(8) + b"\x02" + bytes(7)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=30).filter(any),
    shard_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_documents_of_any_range(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_tokens: int, data: st.DataObject
) -> None:
    """Compared with a list of every token's document, with empty documents and at shard boundaries."""
    documents = [[i] * n for i, n in enumerate(lengths)]
    path = tmp_path_factory.mktemp("range") / "d"
    shards = write(path, documents, shard_tokens=shard_tokens)
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]
    place = [p for n in lengths for p in range(n)]
    start = data.draw(st.integers(0, len(owner) - 1))
    count = data.draw(st.integers(1, len(owner) - start))
    expected = [t - start for t in range(start, start + count) if place[t] == 0]
    assert shards.document_starts(start, count).tolist() == expected
    assert shards.locate(start) == (owner[start], place[start])


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """500 tokens in about 60 shards."""
    return write(
        tmp_path_factory.mktemp("many") / "d",
        [[t, t + 1, t + 2, t + 3] for t in range(0, 500, 4)],
        shard_tokens=9,
    )


@settings(max_examples=300)
@given(start=st.integers(0, 500), count=st.integers(0, 500))
def test_reads_across_shard_borders(many: TokenShards, start: int, count: int) -> None:
    count = min(count, 500 - start)
    assert many.read(start, count).tolist() == list(range(start, start + count))


def test_the_last_id_of_the_vocabulary_is_inside(tmp_path: Path) -> None:
    assert write(tmp_path / "d", [[999, 0]]).read(0, 2).tolist() == [999, 0]


@pytest.mark.parametrize("name", ["00001.bin", "00001.idx"])
@pytest.mark.parametrize("change", [-1, 1, 8])
def test_a_wrong_size_is_named_at_open(tmp_path: Path, name: str, change: int) -> None:
    write(tmp_path / "d", shard_tokens=10)
    file = tmp_path / "d" / name
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(ConfigError) as e:
        TokenShards(tmp_path / "d")
    assert str(file) in str(e.value)
    assert f"{len(content) + change} bytes" in str(e.value)
    assert str(len(content)) in str(e.value)


@pytest.mark.parametrize("name", ["00000.bin", "00002.bin", "00001.idx"])
def test_a_changed_byte_is_named_by_verify(tmp_path: Path, name: str) -> None:
    write(tmp_path / "d", shard_tokens=10).verify()
    file = tmp_path / "d" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shards = TokenShards(tmp_path / "d")  # the sizes are right
    with pytest.raises(ConfigError) as e:
        shards.verify()
    assert str(file) in str(e.value)


@pytest.mark.parametrize("name", ["00001.bin", "00000.idx", "dataset.json"])
def test_a_missing_file_is_named_at_open(tmp_path: Path, name: str) -> None:
    write(tmp_path / "d", shard_tokens=10)
    (tmp_path / "d" / name).unlink()
    with pytest.raises(ConfigError) as e:
        TokenShards(tmp_path / "d")
    assert str(tmp_path / "d" / name) in str(e.value)


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/dataset\.json: .*titanlite prepare"):
        TokenShards(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"null", b"7", b"\xff\xfe", b'{"format": 1, "shards": 3, "tokens": 3}'],
)
def test_a_description_that_is_none(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "d")
    (tmp_path / "d" / "dataset.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"dataset\.json"):
        TokenShards(tmp_path / "d")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the description in place."""
    file = path / "dataset.json"
    description = json.loads(file.read_text())
    change(description)
    file.write_text(json.dumps(description))


@pytest.mark.parametrize("offsets", [[1, 3, 4], [0, 3, 5], [0, 3, 3], [0, 5, 4], [0, 1 << 63, 4]])
def test_an_index_that_is_wrong_as_recorded_is_refused(tmp_path: Path, offsets: list[int]) -> None:
    """Its hash in dataset.json is right."""
    path = write(tmp_path / "d", [[1, 2, 3], [4]]).path
    (path / "00000.idx").write_bytes(np.array(offsets, "<u8").tobytes())
    digest = hash_file(path / "00000.idx")[1]
    edit(path, lambda description: description["shards"][0].update(idx_sha256=digest))
    shards = TokenShards(path)
    shards.verify()
    for read in (lambda: shards.token_offsets(0), lambda: BestFitSequences(shards, 2, tmp_path, True)):
        with pytest.raises(ConfigError, match=r"00000\.idx: its documents do not follow one another"):
            read()
    if offsets[0] or offsets[-1] != 4:
        with pytest.raises(ConfigError, match=r"00000\.idx: its documents do not follow one another"):
            shards.locate(0)


@pytest.mark.parametrize(
    "key", ["format", "dtype", "tokenizer", "vocab_size", "tokens", "documents", "shards"]
)
def test_a_description_without_a_key(tmp_path: Path, key: str) -> None:
    write(tmp_path / "d")
    edit(tmp_path / "d", lambda d: d.pop(key))
    with pytest.raises(ConfigError, match=r"dataset\.json"):
        TokenShards(tmp_path / "d")


@pytest.mark.parametrize("key", ["name", "tokens", "documents", "bin_sha256", "idx_sha256"])
def test_a_shard_without_a_key(tmp_path: Path, key: str) -> None:
    write(tmp_path / "d")
    edit(tmp_path / "d", lambda d: d["shards"][0].pop(key))
    with pytest.raises(ConfigError, match=r"dataset\.json"):
        TokenShards(tmp_path / "d")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 3, "its format is 3"),
        ("tokens", len(TOKENS) + 1, "do not add up"),
        ("documents", len(DOCUMENTS) + 1, "do not add up"),
        ("dtype", "banana", "dataset.json"),
    ],
)
def test_a_description_with_a_wrong_value(tmp_path: Path, key: str, value: object, message: str) -> None:
    write(tmp_path / "d")
    edit(tmp_path / "d", lambda d: d.update({key: value}))
    with pytest.raises(ConfigError, match=message):
        TokenShards(tmp_path / "d")


def test_pickling_drops_the_maps(tmp_path: Path) -> None:
    shards = write(tmp_path / "d", [list(range(900))] * 20)
    size = len(pickle.dumps(shards))
    shards.read(0, 18_000)
    data = pickle.dumps(shards)
    assert len(data) == size
    clone = pickle.loads(data)
    assert clone.read(850, 100).tolist() == [*range(850, 900), *range(50)]
    assert clone.fingerprint == shards.fingerprint


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    base = write(tmp_path / "a").fingerprint
    assert write(tmp_path / "b").fingerprint == base
    others = [
        write(tmp_path / "c", [[1, 2, 4], *DOCUMENTS[1:]]),  # a token
        write(tmp_path / "d", [[1, 2], [3, 4], *DOCUMENTS[2:]]),  # a document's end: same tokens, same sizes
        write(tmp_path / "e", tokenizer=FakeTokenizer(1 << 17)),  # the width
        write(tmp_path / "f", tokenizer=FakeTokenizer(fingerprint="0" * 16)),  # the tokenizer
    ]
    assert len({base, *(s.fingerprint for s in others)}) == 5


def test_data_verify_tells_good_from_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "good")
    write(tmp_path / "bad")
    assert data_tool.main(["verify", str(tmp_path / "good")]) == 0
    assert f"{len(DOCUMENTS)} documents, {len(TOKENS)} tokens" in capsys.readouterr().out
    file = tmp_path / "bad" / "00000.bin"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ConfigError, match=r"bad/00000\.bin"):
        data_tool.main(["verify", str(tmp_path / "good"), str(tmp_path / "bad")])
