"""Pins the source `megatron`: the tokens, documents and sequences of Megatron's files are those of token
shards with the same documents, whatever the type of ids and however many sequences a document has; the
fingerprint is of the content and computed once; files that do not belong together, are damaged or belong to
another tokenizer are each an error that names the file."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import struct
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.datasets import FakeTokenizer, write_dataset
from tests.support.jobs import metrics_in, metrics_of
from tests.support.logs import listening
from tests.support.megatron_files import write_megatron
from tests.support.runs import run_in_hops, train_on_rank
from titanlite.config.component import ConfigError
from titanlite.corpus import megatron
from titanlite.corpus import show_data as data_tool
from titanlite.corpus.megatron import Megatron, MegatronTokens
from titanlite.data.dataset import Data
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.packing import PACKINGS
from titanlite.data.step_sizes import StepSizes

DOCUMENTS = [[[1, 2], [3]], [[4]], [[5, 6, 7], [8, 9], [10, 11, 12]], [[13, 14], []], [[15]]]


def joined(documents: list[list[list[int]]]) -> list[list[int]]:
    return [[token for sequence in document for token in sequence] for document in documents]


def open_megatron(path: Path, *prefixes: str, vocab_size: int = 1000) -> MegatronTokens:
    return MegatronTokens(prefixes, vocab_size, path / "cache")


def made_up(num_documents: int, vocab_size: int = 1000, seed: int = 0) -> list[list[list[int]]]:
    rng = random.Random(seed)
    return [
        [
            [rng.randrange(vocab_size) for _ in range(rng.choice([0, 3, 9, 70]))]
            for _ in range(rng.randint(1, 4))
        ]
        for _ in range(num_documents)
    ]


def test_the_published_format_byte_by_byte(tmp_path: Path) -> None:
    """The writer of the tests, and so the reader, against bytes written by hand."""
    write_megatron(tmp_path / "d", [[[258], [3, 4]], [[5]]], "int32")
    assert (tmp_path / "d.bin").read_bytes() == bytes.fromhex("02010000 03000000 04000000 05000000")
    assert (tmp_path / "d.idx").read_bytes() == bytes.fromhex(
        "4d4d4944494458 0000 0100000000000000 04"  # version, type
        "0300000000000000 0300000000000000"  # sequences, documents + 1
        "01000000 02000000 01000000"  # lengths
        "0000000000000000 0400000000000000 0c00000000000000"  # pointers
        "0000000000000000 0200000000000000 0300000000000000"  # documents
    )


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_documents_of_several_sequences(tmp_path: Path, dtype: str) -> None:
    tokens = open_megatron(tmp_path, write_megatron(tmp_path / "d", DOCUMENTS, dtype))
    expected = joined(DOCUMENTS)
    assert (tokens.num_tokens, tokens.num_documents) == (15, 5)
    assert tokens.read(0, 15).tolist() == list(range(1, 16))
    assert tokens.read(0, 15).dtype == np.int64
    assert [tokens.document(i).tolist() for i in range(5)] == expected
    assert tokens.document_starts(0, 15).tolist() == [0, 3, 4, 12, 14]


@pytest.mark.parametrize("last", [1, 2])  # 1 is EOS
def test_files_without_eos_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int) -> None:
    source = Megatron(path=[write_megatron(tmp_path / "d", [[[0, 3, 1]], [[0, 3, last]]])])
    with listening(caplog):
        source.build(FakeTokenizer(), tmp_path / "cache")
    assert ("does not end with the tokenizer's EOS, 1;" in caplog.text) == (last != 1)


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(
    prefixes=st.lists(
        st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=12).filter(
            lambda documents: any(map(sum, documents))
        ),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
)
def test_any_range_is_that_of_token_shards(
    tmp_path_factory: pytest.TempPathFactory, prefixes: list[list[list[int]]], data: st.DataObject
) -> None:
    """`prefixes`: the lengths of sequences by prefix and document; also empty sequences, and documents
    without a sequence."""
    path, number = tmp_path_factory.mktemp("range"), iter(range(1000))
    written = [[[list(islice(number, n)) for n in doc] for doc in documents] for documents in prefixes]
    names = [write_megatron(path / f"m{i}", documents) for i, documents in enumerate(written)]
    ours = write_dataset(path / "d", [ids for documents in written for ids in joined(documents)])
    tokens = open_megatron(path, *names)
    assert (tokens.num_tokens, tokens.num_documents) == (ours.num_tokens, ours.num_documents)
    start = data.draw(st.integers(0, ours.num_tokens - 1))
    count = data.draw(st.integers(1, ours.num_tokens - start))
    assert tokens.read(start, count).tolist() == ours.read(start, count).tolist()
    assert tokens.document_starts(start, count).tolist() == ours.document_starts(start, count).tolist()
    assert tokens.locate(start) == ours.locate(start)
    for i in range(ours.num_documents):
        assert tokens.document(i).tolist() == ours.document(i).tolist()


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
def test_sequences_are_those_of_token_shards(tmp_path: Path, packing: str) -> None:
    documents = made_up(200)
    ours = write_dataset(tmp_path / "d", joined(documents))
    half = [write_megatron(tmp_path / "a", documents[:90]), write_megatron(tmp_path / "b", documents[90:])]
    whole = open_megatron(tmp_path, write_megatron(tmp_path / "m", documents))

    def pack(dataset: Any) -> list[tuple[Any, ...]]:
        sequences = PACKINGS[packing](dataset, 32, tmp_path / "cache", True)
        return [
            (s.tokens.tolist(), s.document_starts.tolist(), s.num_padding)
            for s in (sequences[i] for i in range(len(sequences)))
            if s.document_starts is not None
        ]

    expected = pack(ours)
    assert len(expected) > 100
    assert pack(whole) == expected
    if packing == "chunk":  # best_fit packs the documents of each shard
        assert pack(open_megatron(tmp_path, *half)) == expected
    # the control: a document boundary that is moved by one token
    moved = [[*documents[0], [1]], [documents[1][0][1:], *documents[1][1:]], *documents[2:]]
    assert pack(open_megatron(tmp_path, write_megatron(tmp_path / "n", moved))) != expected


def hashes(order: MicroBatches, number: int, num_workers: int, data: Data) -> list[int]:
    sequences = data.build(FakeTokenizer(), seq_len=32, seed=3)
    loader = SequenceLoader(sequences, order, num_workers, pin_memory=False)
    return [batch.hash for batch in islice(loader, number)]


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
@pytest.mark.parametrize(("dp", "num_workers"), [(2, 0), (1, 2), pytest.param(3, 2, marks=pytest.mark.full)])
def test_sequences_do_not_depend_on_ranks_and_workers(
    tmp_path: Path, packing: Any, dp: int, num_workers: int
) -> None:
    source = Megatron(path=[write_megatron(tmp_path / "m", made_up(200))])
    data = Data(sources=[source], packing=packing, mask_documents=True, cache_dir=str(tmp_path / "cache"))
    expected = hashes(MicroBatches(300, StepSizes.constant(12), 12, 0, 1), 2, 0, data)
    ranks = [
        hashes(MicroBatches(300, StepSizes.constant(12), 12 // dp, rank, dp), 2, num_workers, data)
        for rank in range(dp)
    ]
    assert [sum(rank[step] for rank in ranks) % (1 << 64) for step in (0, 1)] == expected
    assert expected[0] != expected[1]


@pytest.mark.full
def test_a_run_on_two_ranks_equals_a_run_on_one(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any]
) -> None:
    prefix = write_megatron(tmp_path / "m", made_up(300, vocab_size=258))
    source = f'[{{name = "megatron", path = ["{prefix}"]}}]'
    overrides = [
        f"--data.sources={source}",
        "--data.mask_documents",
        f"--data.cache_dir={tmp_path / 'cache'}",
    ]
    one = run_in_hops(tmp_path, corpus, [2, 4], *overrides, name="one")
    run_on(2, train_on_rank, tmp_path, corpus, [*overrides, "--training.steps=4"], "two", 2)
    two = metrics_in(tmp_path / "two")
    for key in ("data/batch_sha", "progress/total_tokens"):
        assert [row[key] for row in two] == [row[key] for row in metrics_of(one)]
    losses = [[row["train/loss"] for row in rows] for rows in (two, metrics_of(one))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != pytest.approx(losses[1][::-1], rel=1e-5)


# ---- fingerprint


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    base = open_megatron(tmp_path, write_megatron(tmp_path / "a", DOCUMENTS)).fingerprint
    (tmp_path / "elsewhere").mkdir()
    for kind in ("bin", "idx"):
        shutil.copy(tmp_path / f"a.{kind}", tmp_path / "elsewhere" / f"b.{kind}")
    assert open_megatron(tmp_path, str(tmp_path / "elsewhere/b")).fingerprint == base
    last, rest = DOCUMENTS[-1], DOCUMENTS[:-1]
    others = [
        open_megatron(tmp_path, write_megatron(tmp_path / "c", [*rest, [[16]]])),  # a token
        open_megatron(
            tmp_path, write_megatron(tmp_path / "d", [*rest[:-1], [[13], [14]], last])
        ),  # the index
        open_megatron(tmp_path, str(tmp_path / "a"), str(tmp_path / "c")),
        open_megatron(tmp_path, str(tmp_path / "c"), str(tmp_path / "a")),
    ]
    assert len({base, *(tokens.fingerprint for tokens in others)}) == 5


def test_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they change, even if sizes and modification times are equal."""
    prefix = write_megatron(tmp_path / "a", DOCUMENTS)
    read, calls = megatron.MegatronFile.read_content, []

    def counted(file: megatron.MegatronFile) -> megatron.Content:
        calls.append(file)
        return read(file)

    monkeypatch.setattr(megatron.MegatronFile, "read_content", counted)
    first = open_megatron(tmp_path, prefix).fingerprint
    assert open_megatron(tmp_path, prefix).fingerprint == first
    assert len(calls) == 1
    times = (tmp_path / "a.bin").stat().st_atime_ns, (tmp_path / "a.bin").stat().st_mtime_ns
    write_megatron(tmp_path / "a", [*DOCUMENTS[:-1], [[16]]])
    os.utime(tmp_path / "a.bin", ns=times)
    assert open_megatron(tmp_path, prefix).fingerprint != first
    assert len(calls) == 2


@pytest.mark.parametrize("num_cores", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_large_file_is_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int
) -> None:
    """The number of processes does not matter, and the largest id is found in the last block."""
    documents = [[list(range(i, i + 50))] for i in range(0, 900, 50)]
    file = megatron.MegatronFile(write_megatron(tmp_path / "a", documents))
    assert file.read_content().largest_id == 899  # as one block
    monkeypatch.setattr(megatron, "HASHED_BYTES", 100)
    monkeypatch.setattr(megatron, "num_cores", lambda: 1)
    content = file.read_content()
    assert content.largest_id == 899
    monkeypatch.setattr(megatron, "num_cores", lambda: num_cores)
    monkeypatch.setattr(megatron, "CHECKED_SEQUENCES", 5)
    assert file.read_content() == content


def test_verify_finds_what_times_and_sizes_hide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged disk: the bytes change, the file's times do not."""
    prefix = write_megatron(tmp_path / "a", DOCUMENTS)
    monkeypatch.setattr(megatron.MegatronFile, "record", lambda file, cache_dir: cache_dir / "record")
    tokens = open_megatron(tmp_path, prefix)
    assert tokens.fingerprint
    tokens.verify()
    write_megatron(tmp_path / "a", [*DOCUMENTS[:-1], [[16]]])
    with pytest.raises(ConfigError, match=r"a\.bin.*differs.*delete .*record"):
        tokens.verify()
    data = Data(sources=[Megatron(path=[prefix])], verify="full", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"a\.bin.*differs"):
        data.build(FakeTokenizer(), seq_len=4, seed=0)


def test_a_new_file_is_read_once_also_if_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Megatron(path=[write_megatron(tmp_path / "a", DOCUMENTS)])
    data = Data(sources=[source], verify="full", cache_dir=str(tmp_path / "cache"))
    read, reads = megatron.MegatronFile.read_content, []
    monkeypatch.setattr(
        megatron.MegatronFile,
        "read_content",
        lambda file: reads.append(1) or read(file),  # type: ignore[func-returns-value]
    )
    for total in (1, 2):
        data.build(FakeTokenizer(), seq_len=4, seed=0)
        assert len(reads) == total


def test_data_verify_makes_no_cache_in_the_folder_where_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, here = write_megatron(tmp_path / "a", DOCUMENTS), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert data_tool.main(["verify", prefix]) == 0
    assert "nothing to compare the content with" in capsys.readouterr().out
    assert not list(here.iterdir())
    (here / "outputs" / "cache").mkdir(parents=True)
    assert data_tool.main(["verify", prefix]) == 0
    assert "recorded in outputs/cache/megatron-" in capsys.readouterr().out
    assert data_tool.main(["verify", prefix]) == 0
    assert "the content is that recorded in outputs/cache" in capsys.readouterr().out


def test_data_verify_compares_with_the_record_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_megatron(tmp_path / "a", DOCUMENTS)
    monkeypatch.setattr(megatron.MegatronFile, "record", lambda file, cache_dir: cache_dir / "record")
    assert open_megatron(tmp_path, prefix).fingerprint
    write_megatron(tmp_path / "a", [*DOCUMENTS[:-1], [[16]]])
    with pytest.raises(ConfigError, match=r"a\.bin.*differs"):
        data_tool.main(["verify", prefix, f"--cache_dir={tmp_path / 'cache'}"])


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", DOCUMENTS)
    assert open_megatron(tmp_path, prefix).fingerprint
    (record,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    (record / "content.json").write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(f"delete {record}")):
        _ = open_megatron(tmp_path, prefix).fingerprint


def test_pickling_drops_the_maps(tmp_path: Path) -> None:
    tokens = open_megatron(tmp_path, write_megatron(tmp_path / "a", made_up(500)))
    fingerprint, size = tokens.fingerprint, len(pickle.dumps(tokens))
    tokens.document_starts(0, tokens.num_tokens)
    clone = pickle.loads(pickle.dumps(tokens))
    assert len(pickle.dumps(tokens)) == size < 4000
    assert clone.fingerprint == fingerprint
    assert clone.read(10, 50).tolist() == tokens.read(10, 50).tolist()


# ---- errors


def patched(file: Path, offset: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(data)] = data
    file.write_bytes(content)


LENGTHS, POINTERS, BOUNDS = 34, 34 + 4 * 9, 34 + 12 * 9  # of the nine sequences in DOCUMENTS
FAULTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "magic": ("does not begin with MMIDIDX", lambda p: patched(p / "a.idx", 0, b"TNTIDX")),
    "version": ("its version is 2, expected 1", lambda p: patched(p / "a.idx", 9, b"\2")),
    "type": ("has the code 7, expected one of 1 \\(uint8\\)", lambda p: patched(p / "a.idx", 17, b"\7")),
    "header": ("the header alone has 34", lambda p: os.truncate(p / "a.idx", 20)),
    "no bytes": ("does not begin with MMIDIDX", lambda p: os.truncate(p / "a.idx", 0)),
    "truncated index": ("it is truncated or damaged", lambda p: os.truncate(p / "a.idx", 100)),
    "counts": ("it is truncated or damaged", lambda p: patched(p / "a.idx", 25, struct.pack("<B", 255))),
    "truncated data": (
        "belongs to 30 bytes of tokens, .*a.bin has 29",
        lambda p: os.truncate(p / "a.bin", 29),
    ),
    "other data": (
        "belongs to 30 bytes of tokens, .*a.bin has 32",
        lambda p: (p / "a.bin").write_bytes(bytes(32)),
    ),
    "no index": (
        "a.idx: No such file or directory; a .bin and an .idx are read together",
        lambda p: (p / "a.idx").unlink(),
    ),
    "no data": ("a.bin: No such file", lambda p: (p / "a.bin").unlink()),
    "modes": ("multimodal", lambda p: write_megatron(p / "a", DOCUMENTS, modes=[0] * 9)),
    "empty": ("the dataset is empty", lambda p: write_megatron(p / "a", [])),
    "empty documents": ("the dataset is empty", lambda p: write_megatron(p / "a", [[[]], [[]]])),
    "documents end early": ("interrupted", lambda p: patched(p / "a.idx", BOUNDS + 8 * 5, b"\7")),
    "a pipe": ("named pipe", lambda p: ((p / "a.idx").unlink(), os.mkfifo(p / "a.idx"))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_are_refused_when_they_are_opened(tmp_path: Path, fault: str) -> None:
    source = Megatron(path=[write_megatron(tmp_path / "a", DOCUMENTS)])
    source.check(FakeTokenizer())
    message, damage = FAULTS[fault]
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message) as e:
        source.check(FakeTokenizer())
    assert str(tmp_path / "a") in str(e.value)
    assert "\n" not in str(e.value)
    assert e.value.key == "path"


def test_prefixes_of_no_file(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", DOCUMENTS)
    for path, hint in (
        (f"{prefix}.bin", f"write {prefix}, without .bin and .idx"),
        (f"{prefix}b", "expected the path of"),
    ):
        with pytest.raises(ConfigError, match=f"No such file or directory; {hint}"):
            Megatron(path=[path]).check(FakeTokenizer())


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (POINTERS + 8 * 3, b"\x06", "sequence 3 does not begin"),
        (LENGTHS + 4 * 3, b"\x04", "sequence 4 does not begin"),
        (LENGTHS, struct.pack("<ii", -1, 4), "sequence 0 does not begin"),
        (BOUNDS + 8 * 2, b"\x01", "not in order"),
    ],
)
def test_an_index_that_contradicts_itself(tmp_path: Path, offset: int, data: bytes, message: str) -> None:
    """Found by the first use, which reads all of the index, and by `titanlite data verify`."""
    source = Megatron(path=[write_megatron(tmp_path / "a", DOCUMENTS)])
    patched(tmp_path / "a.idx", offset, data)
    with pytest.raises(ConfigError, match=rf"a\.idx: .*{message}"):
        source.build(FakeTokenizer(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match=message):
        data_tool.main(["verify", str(tmp_path / "a")])


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    source = Megatron(path=[write_megatron(tmp_path / "a", [[[1, 999, 2]], [[3]]])])
    assert source.build(FakeTokenizer(1000), tmp_path / "cache").read(0, 4).tolist() == [1, 999, 2, 3]
    with pytest.raises(ConfigError, match=r"a\.bin: its largest id is 999, .* ids below 999"):
        source.build(FakeTokenizer(999), tmp_path / "cache")


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_ids_below_0(tmp_path: Path, dtype: str) -> None:
    source = Megatron(path=[write_megatron(tmp_path / "a", [[[1, -1, 2]]], dtype)])
    with pytest.raises(ConfigError, match=r"a\.bin: it has token ids below 0"):
        source.build(FakeTokenizer(1 << 20), tmp_path / "cache")


def test_data_that_changes_during_a_run(tmp_path: Path) -> None:
    tokens = open_megatron(tmp_path, write_megatron(tmp_path / "a", [[[1, 2, 3]]], "int32"))
    write_megatron(tmp_path / "a", [[[1, 2, -3]]], "int32")
    with pytest.raises(ConfigError, match=r"a\.bin: token 2 is 4294967293, .* ids below 1000"):
        tokens.read(0, 3)


def test_no_prefix() -> None:
    with pytest.raises(ConfigError, match="no prefix"):
        Megatron(path=[])


def test_a_prefix_that_is_named_twice(tmp_path: Path) -> None:
    (tmp_path / "link.bin").symlink_to(tmp_path / "a.bin")
    for again in ("a", "x/../a", "link"):
        with pytest.raises(ConfigError, match=f"{again} is named twice") as e:
            Megatron(path=[str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / again)])
        assert e.value.key == "path"


# ---- titanlite data


def test_data_show_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["one two", "three"]
    prefix = write_megatron(tmp_path / "a", [[[256, *text.encode(), 257]] for text in texts])
    cache = f"--cache_dir={tmp_path / 'cache'}"
    first = "nothing to compare the content with, because no run has used it: recorded in"
    for compared in (first, "the content is that recorded in"):
        assert data_tool.main(["verify", prefix, cache]) == 0
        counts = "2 documents, 16 tokens, largest id 257, the index matches its data"
        assert f"{counts}; {compared} {tmp_path}/cache/megatron-" in capsys.readouterr().out
    for packing in ("chunk", "best_fit"):
        options = ["--tokenizer.name=bytes", "--seq_len=15", f"--packing={packing}"]
        data_tool.main(["show", prefix, *options, f"--cache_dir={tmp_path / 'cache'}"])
        out = capsys.readouterr().out
        assert re.search(r"document 0, tokens 0 to 8\none two\n---- document 1, tokens 0 to 6\nthree", out)
    with pytest.raises(ConfigError, match=r"records no tokenizer: give --tokenizer\.name"):
        data_tool.main(["show", prefix])
