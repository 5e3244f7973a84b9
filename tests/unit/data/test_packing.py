"""Pins packing: by either method every token of the documents is where it should be, and counts exactly once;
a best-fit index is best-fit decreasing, the same wherever it is made, under 2% padding on real documents, and
never read unless whole; documents in a batch are kept apart exactly where they meet, and the EOS of each one
is a target."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sysconfig
from bisect import insort
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.datasets import FakeTokenizer, write_dataset
from tests.support.tiers import full
from titanlite import files as files_module
from titanlite.config.component import ConfigError
from titanlite.corpus.write_shards import write_shards
from titanlite.data import packing_index
from titanlite.data.batch import IGNORE, make_batch
from titanlite.data.packing import (
    PACKINGS,
    BestFitSequences,
    ChunkedSequences,
    PackedSequences,
    TokenSequence,
)
from titanlite.data.packing_index import open_packing_index, pack_window
from titanlite.data.shards import TokenShards
from titanlite.files import hash_file
from titanlite.tokenizers.base import BOS, EOS, Tokenizer
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.tokenizers.tokenizer_json import byte_level_files

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(lambda lengths: sum(lengths) > 1)


def numbered(path: Path, lengths: list[int], shard_tokens: int = 1 << 20) -> TokenShards:
    """Documents of these lengths. All tokens are different."""
    ends = np.cumsum([0, *lengths]).tolist()
    tokenizer = FakeTokenizer(vocab_size=1 << 15)
    return write_dataset(path, [list(range(a, b)) for a, b in pairwise(ends)], tokenizer, shard_tokens)


def pack(kind: str, shards: TokenShards, seq_len: int) -> PackedSequences:
    return PACKINGS[kind](shards, seq_len, shards.path.parent / "cache", True)


@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS, seq_len=st.integers(1, 30), shard_tokens=st.integers(1, 300), window=st.integers(1, 20)
)
def test_best_fit_holds_every_token_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, shard_tokens: int, window: int
) -> None:
    assume(sum(lengths) > seq_len)
    folder = tmp_path_factory.mktemp("fit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_index, "WINDOW", window)
        patch.setattr(packing_index, "num_cores", lambda: 1)
        sequences = pack("best_fit", numbered(folder / "d", lengths, shard_tokens), seq_len)
    begins_of_documents = {int(begin) for begin, n in zip(np.cumsum([0, *lengths]), lengths) if n}
    seen: list[int] = []
    padding = 0
    for i in range(len(sequences)):
        sequence = sequences[i]
        starts, sizes = sequences.spans(i)
        assert sequence.tokens.shape == (seq_len + 1,)
        assert sequence.document_starts is not None
        assert sequence.document_starts.tolist() == [0, *np.cumsum(sizes)[:-1].tolist()]
        used = seq_len + 1 - sequence.num_padding
        assert used == sizes.sum() > 0
        assert not sequence.tokens[used:].any()
        for start, size, begin in zip(starts.tolist(), sizes.tolist(), sequence.document_starts.tolist()):
            assert sequence.tokens[begin : begin + size].tolist() == list(range(start, start + size))
            document = int(np.searchsorted(np.cumsum(lengths), start, side="right"))
            begin_of_document = sum(lengths[:document])
            # A span is a whole document or, if the document is longer than a sequence, a chunk that begins at
            # a multiple of the sequence length.
            assert (start - begin_of_document) % (seq_len + 1) == 0
            rest = begin_of_document + lengths[document] - start
            assert size == min(rest, seq_len + 1)
        seen += sequence.tokens[:used].tolist()
        padding += sequence.num_padding
    assert sorted(seen) == list(range(sum(lengths)))
    assert begins_of_documents <= {int(s) for i in range(len(sequences)) for s in sequences.spans(i)[0]}
    assert sequences.padding_share == pytest.approx(padding / (len(sequences) * (seq_len + 1)))


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 30), shard_tokens=st.integers(1, 300))
def test_chunks_hold_every_token_as_a_target_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, shard_tokens: int
) -> None:
    """All tokens except the first and fewer than a sequence of tokens at the end."""
    shards = numbered(tmp_path_factory.mktemp("chunk") / "d", lengths, shard_tokens)
    total = sum(lengths)
    if total <= seq_len:
        with pytest.raises(ConfigError, match="fewer than one sequence"):
            pack("chunk", shards, seq_len)
        return
    sequences = pack("chunk", shards, seq_len)
    targets = [t for i in range(len(sequences)) for t in sequences[i].tokens[1:].tolist()]
    assert targets == list(range(1, len(sequences) * seq_len + 1))
    assert total - 1 - len(targets) < seq_len
    begins = {int(b) for b, n in zip(np.cumsum([0, *lengths]), lengths) if n}
    for i in range(len(sequences)):
        sequence, (starts, sizes) = sequences[i], sequences.spans(i)
        assert sequence.document_starts is not None
        assert sequence.document_starts.tolist() == [
            k for k, t in enumerate(sequence.tokens.tolist()) if t in begins
        ]
        assert (starts[0], sizes.sum()) == (i * seq_len, seq_len + 1)
        assert set(starts[1:].tolist()) <= begins


def oracle(lengths: list[int], capacity: int) -> list[int]:
    """A slow best-fit decreasing: the number of tokens in each sequence, sorted."""
    spans = [min(capacity, n - at) for n in lengths for at in range(0, n, capacity)]
    rooms: list[int] = []  # ascending
    for span in sorted(spans, reverse=True):
        room = next((r for r in rooms if r >= span), None)
        if room is None:
            room = capacity
        else:
            rooms.remove(room)
        insort(rooms, room - span)
    return sorted(capacity - room for room in rooms)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(2, 30))
def test_a_window_is_packed_by_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    _, sizes, counts = pack_window(np.cumsum([0, *lengths], dtype=np.uint64), capacity)
    ends = np.cumsum(counts)
    fill = [int(sizes[end - count : end].sum()) for end, count in zip(ends, counts)]
    assert sorted(fill) == oracle(lengths, capacity)


@pytest.mark.full
@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
def test_real_documents_leave_under_two_percent_padding(seq_len: int) -> None:
    """The sizes of the standard library's files in tokens of four bytes."""
    files = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
    lengths = [p.stat().st_size // 4 + 2 for p in files if "site-packages" not in p.parts]
    assert len(lengths) > 500
    _, sizes, counts = pack_window(np.cumsum([0, *sorted(lengths)], dtype=np.uint64), seq_len + 1)
    assert sizes.sum() == sum(lengths)
    assert 1 - sizes.sum() / (len(counts) * (seq_len + 1)) < 0.02


# ---- the index on disk


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    rng = np.random.default_rng(0)
    return numbered(tmp_path / "d", rng.integers(0, 60, 400).tolist(), shard_tokens=5000)


def index_files(cache: Path) -> dict[str, bytes]:
    (folder,) = cache.iterdir()
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.full
def test_the_index_is_the_same_on_any_number_of_processes(
    shards: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_index, "WINDOW", 10)
    for cores in (1, 2):
        monkeypatch.setattr(packing_index, "num_cores", lambda cores=cores: cores)
        open_packing_index(shards, 33, tmp_path / f"cache{cores}")
    assert index_files(tmp_path / "cache1") == index_files(tmp_path / "cache2")


def test_a_index_is_made_once(shards: TokenShards, tmp_path: Path) -> None:
    first = open_packing_index(shards, 33, tmp_path / "cache")
    before = {p: p.stat().st_mtime_ns for p in first.path.iterdir()}
    assert open_packing_index(shards, 33, tmp_path / "cache").fingerprint == first.fingerprint
    assert {p: p.stat().st_mtime_ns for p in first.path.iterdir()} == before
    assert open_packing_index(shards, 34, tmp_path / "cache").path != first.path
    other = numbered(tmp_path / "e", [5, 6])
    assert open_packing_index(other, 33, tmp_path / "cache").path != first.path


def damage(file: Path, how: str) -> None:
    """Damage a file: flip a bit at the beginning, in the middle or at the end, cut it in half, delete it, or
    put a directory in its place."""
    content = bytearray(file.read_bytes())
    if how in ("first", "middle", "last"):
        content[{"first": 0, "middle": len(content) // 2, "last": -1}[how]] ^= 4
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
        if how == "folder":
            file.mkdir()


@pytest.mark.parametrize("name", ["starts.bin", "lengths.bin", "rows.bin", "plan.json"])
@pytest.mark.parametrize("how", ["middle", *map(full, ["first", "last", "cut", "gone", "folder"])])
def test_a_damaged_index_is_made_again_and_is_the_same(
    shards: TokenShards, tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    packed = BestFitSequences(shards, 32, tmp_path / "cache", True)
    files, sequences = (
        index_files(tmp_path / "cache"),
        [packed[i].tokens.tolist() for i in range(len(packed))],
    )
    damage(packed.index.path / name, how)
    with caplog.at_level("WARNING", "titanlite"):
        again = BestFitSequences(shards, 32, tmp_path / "cache", True)
    assert again.fingerprint == packed.fingerprint
    assert [again[i].tokens.tolist() for i in range(len(again))] == sequences
    assert index_files(tmp_path / "cache") == files
    (said,) = caplog.messages
    assert said.startswith(f"{packed.index.path}: the packing index is damaged (")
    assert "\n" not in said
    caplog.clear()
    BestFitSequences(shards, 32, tmp_path / "cache", True)
    assert not caplog.messages


@pytest.mark.parametrize("obstacle", ["a file", "a link to nowhere", "an empty folder"])
def test_anything_else_at_the_path_of_an_index_is_replaced(
    shards: TokenShards, tmp_path: Path, obstacle: str
) -> None:
    index = open_packing_index(shards, 33, tmp_path / "cache")
    shutil.rmtree(index.path)
    if obstacle == "a file":
        index.path.write_text("{}")
    elif obstacle == "an empty folder":
        index.path.mkdir()
    else:
        index.path.symlink_to("nowhere")
    assert open_packing_index(shards, 33, tmp_path / "cache").fingerprint == index.fingerprint


def test_the_fingerprint_follows_from_the_content(shards: TokenShards, tmp_path: Path) -> None:
    """An index that is whole and yet another one, of a changed algorithm, has another name for its
    sequences."""
    index = open_packing_index(shards, 33, tmp_path / "cache")
    first = index.spans(0)[0].tolist()
    starts = np.fromfile(index.path / "starts.bin", "<u8")
    starts[:2] = starts[1::-1]
    starts.tofile(index.path / "starts.bin")
    text = (index.path / "plan.json").read_text()
    old, new = json.loads(text)["sha256"]["starts"], hash_file(index.path / "starts.bin")[1]
    (index.path / "plan.json").write_text(text.replace(old, new))
    other = open_packing_index(shards, 33, tmp_path / "cache")
    assert other.spans(0)[0].tolist() != first
    assert other.fingerprint != index.fingerprint


def test_an_interrupted_index_leaves_nothing(
    shards: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files_module, "sync", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_packing_index(shards, 33, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_process_may_make_it_first(
    shards: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        if not Path(target).exists():
            with monkeypatch.context() as patch:
                patch.setattr(os, "rename", rename)
                open_packing_index(shards, 33, tmp_path / "cache")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    index = open_packing_index(shards, 33, tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [index.path.name]


def test_sequences_travel_to_workers(shards: TokenShards, tmp_path: Path) -> None:
    for kind in PACKINGS:
        sequences = pack(kind, shards, 32)
        clone = pickle.loads(pickle.dumps(sequences))
        assert clone.fingerprint == sequences.fingerprint
        assert clone[3].tokens.tolist() == sequences[3].tokens.tolist()
        assert len(pickle.dumps(sequences)) < 4000


def test_uids_tell_packings_apart(shards: TokenShards, tmp_path: Path) -> None:
    sequences = [pack(kind, shards, n) for kind, n in (("chunk", 32), ("best_fit", 32), ("best_fit", 31))]
    assert len({r.fingerprint for r in sequences}) == 3
    assert isinstance(sequences[0], ChunkedSequences)
    assert isinstance(sequences[1], BestFitSequences)


# ---- sequences in a batch


def batch_of(*sequences: TokenSequence, with_positions: bool = True):
    return make_batch(list(range(len(sequences))), sequences, seq_len=8, with_positions=with_positions)


def test_no_target_crosses_documents() -> None:
    sequence = TokenSequence(np.arange(10, 19), np.array([0, 3, 8]))
    batch = batch_of(sequence)
    assert batch.targets[0].tolist() == [11, 12, IGNORE, 14, 15, 16, 17, IGNORE]
    assert batch.positions is not None
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert (batch.num_targets, batch.num_documents) == (6, 2)  # the third one's only token is no input


def test_padding_is_no_target() -> None:
    sequence = TokenSequence(np.array([1, 2, 3, 4, 5, 0, 0, 0, 0]), np.array([0, 2]), num_padding=4)
    batch = batch_of(sequence)
    assert batch.targets[0].tolist() == [2, IGNORE, 4, 5] + 4 * [IGNORE]
    assert batch.num_targets == 3


def test_a_sequence_that_begins_within_a_document() -> None:
    batch = batch_of(
        TokenSequence(np.arange(9), np.array([4])), TokenSequence(np.arange(9), np.array([], dtype=np.int64))
    )
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], list(range(8))]
    assert batch.targets[0].tolist() == [1, 2, 3, IGNORE, 5, 6, 7, 8]
    assert batch.num_documents == 3


def test_without_begins_all_targets_count() -> None:
    batch = batch_of(TokenSequence(np.arange(9)), with_positions=False)
    assert batch.targets[0].tolist() == list(range(1, 9))
    assert batch.positions is None
    assert batch.num_targets == 8


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 8)), st.integers(0, 4)).filter(
            lambda sequence: all(b < 9 - sequence[1] for b in sequence[0])
        ),
        min_size=1,
        max_size=4,
    )
)
def test_counts_are_those_of_the_tensors(sequences: list[tuple[set[int], int]]) -> None:
    batch = batch_of(
        *(TokenSequence(np.arange(1, 10), np.array(sorted(b), dtype=np.int64), n) for b, n in sequences)
    )
    assert batch.num_targets == int((batch.targets != IGNORE).sum())
    assert batch.positions is not None
    assert batch.num_documents == int((batch.positions == 0).sum())
    clone = pickle.loads(pickle.dumps(batch))
    for name in ("inputs", "targets", "positions"):
        ours, theirs = getattr(clone, name), getattr(batch, name)
        assert torch.equal(ours, theirs)
        assert ours.dtype == torch.int64
    for name in ("num_targets", "hash", "num_documents"):
        assert getattr(clone, name) == getattr(batch, name)


# ---- EOS


def eos_targets(packing: str, mask: bool, tokenizer: Tokenizer, folder: Path) -> int:
    """How often the EOS after a text is a target, of three texts, one of which is longer than a sequence."""
    shards = write_shards(["a" * length for length in (5, 20, 2)], folder, tokenizer)
    packed = PACKINGS[packing](shards, 8, folder.parent / "cache", mask)
    batch = make_batch(range(len(packed)), [packed[i] for i in range(len(packed))], seq_len=8)
    return int(((batch.targets == tokenizer.eos) & (batch.inputs != tokenizer.eos)).sum())


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("bos", [BOS, EOS, None])
def test_the_eos_of_each_document_is_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bos: str | None, packing: str, mask: bool
) -> None:
    files = byte_level_files({bytes([b]): b for b in range(256)}, None, {BOS: 256, EOS: 257}, BOS, EOS)
    config = json.loads(files["tokenizer_config.json"]) | {"bos_token": bos}
    for name, data in (files | {"tokenizer_config.json": json.dumps(config).encode()}).items():
        (tmp_path / name).write_bytes(data)
    tokenizer = HuggingFace(path=str(tmp_path)).build()
    assert eos_targets(packing, mask, tokenizer, tmp_path / "d") == 3
    without_eos = [np.array([tokenizer.bos, *b"a" * length]) for length in (5, 20, 2)]
    monkeypatch.setattr(tokenizer, "encode_documents", lambda texts: without_eos)
    bos_counts = (packing, mask) == ("chunk", False) and bos != BOS  # a BOS that is EOS, except the last one
    assert eos_targets(packing, mask, tokenizer, tmp_path / "without") == int(bos_counts)  # control
