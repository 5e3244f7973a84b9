"""Pins the formats of corpus files: plain and compressed lines (gzip and Zstandard, of any number of
members), compressed text and parquet give the same documents, each once, however finely files are cut into
splits; a file that is cut off at any byte or damaged is an error that names it and never passes for a whole
one; one broken line or row is handed to `bad` with its place, and what stands around it is read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import re
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.support.datasets import write_dataset
from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.data import text_files
from titanlite.data.text_files import (
    FileSplit,
    content_sha256,
    documents,
    read_split,
    split_files,
    where,
)
from titanlite.data.text_formats import find_files

Compress = Callable[[bytes], bytes]


def zst(data: bytes) -> bytes:
    """A frame as the `zstd` command writes it: with a checksum."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def in_members(compress: Compress, data: bytes, count: int) -> bytes:
    """Cut anywhere, also within lines. Each chunk is compressed separately; one is empty."""
    step = len(data) // count + 1
    chunks = [data[i : i + step] for i in range(0, len(data), step)]
    return b"".join(map(compress, [*chunks[:1], b"", *chunks[1:]]))


COMPRESSED: dict[str, tuple[str, Compress]] = {
    "gz": (".gz", gzip.compress),
    "gz of members": (".gz", lambda data: in_members(gzip.compress, data, 5)),
    "gz, padded": (".gz", lambda data: gzip.compress(data) + bytes(512)),
    "zst": (".zst", zst),
    "zst of frames": (".zst", lambda data: in_members(zst, data, 5)),
    "zst without size and checksum": (
        ".zst",
        zstandard.ZstdCompressor(write_content_size=False, write_checksum=False).compress,
    ),
    "zst with a seek table": (  # a frame that decoders skip
        ".zst",
        lambda data: in_members(zst, data, 3) + struct.pack("<II9s", 0x184D2A5E, 9, b"123456789"),
    ),
    "zst, long window": (
        ".zst",
        zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True),
        ).compress,
    ),
}


def texts_of_many_kinds(count: int) -> list[str]:
    """Short and long, some of them equal, of several scripts."""
    rng = random.Random(0)
    words = ["a", "caf\u00e9", "\u4f60\u597d", "\U0001f600", "\u2028", "line\nbreak", "\r", "\x00", '"', "\\"]
    return [f"{i % 390} " + " ".join(rng.choices(words, k=rng.choice([0, 1, 5, 40]))) for i in range(count)]


TEXTS = texts_of_many_kinds(400)
SMALL = [f"document {i}: {random.Random(i).randbytes(9).hex()}" for i in range(20)]


def lines(texts: Iterable[str], field: str = "text") -> bytes:
    """As .jsonl."""
    return "".join(
        json.dumps({"n": 0, field: t}, ensure_ascii=len(t) % 2 == 0) + "\n" for t in texts
    ).encode()


def write(file: Path, content: bytes) -> Path:
    """The file."""
    file.write_bytes(content)
    return file


def write_parquet(
    file: Path, texts: list[str | None], kind: Any = None, rows: int = 30, **options: Any
) -> Path:
    """Row groups of `rows`; the text is the second of three columns."""
    columns = {"id": range(len(texts)), "text": pa.array(texts, kind or pa.string()), "z": ["z"] * len(texts)}
    pq.write_table(pa.table(columns), file, row_group_size=rows, **options)
    return file


def collect(errors: list[ConfigError]) -> text_files.OnBad:
    """What to do with a bad line, as an error that says where."""
    return lambda file, place, reason: errors.append(ConfigError(f"{where(file, place)}: {reason}"))


def read(*files: Path, field: str = "text", bad: text_files.OnBad = text_files.stop) -> list[str]:
    """All documents of all splits."""
    return [d.text for u in split_files(files, field) for d in read_split(u, field, bad)]


@pytest.fixture(params=[1, 50, 10**9])
def split_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From a split for every byte to one for all."""
    monkeypatch.setattr(text_files, "SPLIT_BYTES", request.param)
    return request.param


@pytest.fixture
def cut_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of about a line, and blocks of three."""
    monkeypatch.setattr(text_files, "SPLIT_BYTES", 50)
    monkeypatch.setattr(text_files, "BLOCK_LINES", 3)


# ---- the same documents


def test_lines(tmp_path: Path, split_bytes: int) -> None:
    content = lines(TEXTS[:60] if split_bytes == 1 else TEXTS)
    file = write(tmp_path / "a.jsonl", content)
    splits = split_files([file], "text")
    assert len(splits) == -(-len(content) // split_bytes)
    assert sum(u.size for u in splits) == len(content)
    assert read(file) == (TEXTS[:60] if split_bytes == 1 else TEXTS)


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lines_by_any_name(tmp_path: Path, ending: str, suffix: str) -> None:
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zst}[suffix]
    assert read(write(tmp_path / f"a.b{ending}{suffix}", compress(lines(TEXTS)))) == TEXTS


@pytest.mark.parametrize("block_lines", [1, full(64)])
@pytest.mark.parametrize("how", COMPRESSED)
def test_compressed_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, block_lines: int, split_bytes: int
) -> None:
    """Blocks of lines are dealt out to the splits in turn, in order; together the splits have all texts."""
    monkeypatch.setattr(text_files, "BLOCK_LINES", block_lines)
    suffix, compress = COMPRESSED[how]
    file = write(tmp_path / f"a.jsonl{suffix}", compress(lines(TEXTS)))
    splits = split_files([file], "text")
    assert len(splits) == (1 if split_bytes == 10**9 else text_files.MAX_SPLITS)
    by_split = [[d.text for d in read_split(split, "text")] for split in splits]
    assert sorted(text for texts in by_split for text in texts) == sorted(TEXTS)
    for index, texts in enumerate(by_split):
        assert texts == [t for i, t in enumerate(TEXTS) if i // block_lines % len(splits) == index]


@pytest.mark.parametrize("how", COMPRESSED)
def test_compressed_text_is_one_document(tmp_path: Path, how: str) -> None:
    suffix, compress = COMPRESSED[how]
    text = "one\ufeff\r\n\n" + "\n".join(TEXTS)
    assert read(write(tmp_path / f"a.txt{suffix}", compress(text.encode()))) == [text]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize(("rows", "compression"), [(5, "none"), (30, "snappy"), (70, "zstd"), (100, "gzip")])
def test_parquet(tmp_path: Path, kind: Any, rows: int, compression: str, split_bytes: int) -> None:
    texts = TEXTS[:100]
    file = write_parquet(tmp_path / "a.parquet", [*texts], kind, rows, compression=compression)
    splits = split_files([file], "text")
    ends = [0, *(u.end for u in splits)]
    assert [u.begin for u in splits] == ends[:-1]
    assert ends[-1] == -(-len(texts) // rows)
    assert len(splits) == (1 if split_bytes == 10**9 else ends[-1])
    assert read(file) == texts


def test_parquet_row_groups_make_a_split_until_it_is_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of about 1000, 1000 and 3000 bytes, then of 100."""
    table = pa.table({"text": ["x" * size for size in (1000, 1000, 3000, 100, 100)]})
    pq.write_table(
        table,
        tmp_path / "a.parquet",
        row_group_size=1,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    monkeypatch.setattr(text_files, "SPLIT_BYTES", 2000)
    splits = split_files([tmp_path / "a.parquet"], "text")
    assert [(u.begin, u.end) for u in splits] == [(0, 2), (2, 3), (3, 5)]
    assert 5200 <= sum(u.size for u in splits) < 6000


@pytest.mark.parametrize("field", ["body", "a.b", "caf\u00e9"])
def test_parquet_with_another_column(tmp_path: Path, field: str) -> None:
    table = pa.table({"text": ["no", "no"], field: ["x", "y"], "s": [{"text": 1}, {"text": 2}]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", field=field) == ["x", "y"]


@pytest.mark.parametrize("num_groups", [0, 3])
def test_parquet_without_rows(tmp_path: Path, num_groups: int) -> None:
    table = pa.table({"text": pa.array([], pa.string())})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for _ in range(num_groups):
            writer.write_table(table)
    assert read(tmp_path / "a.parquet") == []


@pytest.mark.usefixtures("cut_finely")
def test_a_corpus_of_all_formats(tmp_path: Path) -> None:
    """In the files' order, each split of one kind; the hash over the content is of the bytes as they are."""
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", lines(TEXTS[:30]))
    write(tmp_path / "in" / "b.jsonl.gz", gzip.compress(lines(TEXTS[30:60])))
    write_parquet(tmp_path / "in" / "c.parquet", [*TEXTS[60:90]], rows=7)
    write(tmp_path / "in" / "d.txt", TEXTS[90].encode())
    write(tmp_path / "in" / "e.txt.zst", zst(TEXTS[91].encode()))
    write(tmp_path / "in" / "f.ndjson.zst", zst(lines(TEXTS[92:120])))
    for name in ("g.bin.gz", "g.parquet.gz", "dataset_infos.json", "README.md", "g.gz"):
        write(tmp_path / "in" / name, b"not read unless it is named")
    files = find_files([str(tmp_path / "in")], "key")
    assert [f.name for f in files] == [
        "a.jsonl",
        "b.jsonl.gz",
        "c.parquet",
        "d.txt",
        "e.txt.zst",
        "f.ndjson.zst",
    ]
    assert sorted(read(*files)) == sorted(TEXTS[:120])
    before = content_sha256(files)
    write(files[4], zst(TEXTS[91].encode()) + zst(b""))
    assert content_sha256(files) != before


def test_small_texts_share_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to its size; a file is never split, and other kinds of file come between."""
    monkeypatch.setattr(text_files, "SPLIT_BYTES", 10)
    sizes = {"a.txt": 4, "b.txt": 6, "c.txt": 1, "d.md": 30, "e.jsonl": 0, "f.txt": 2, "g.txt": 3}
    files = [write(tmp_path / name, b"x" * size) for name, size in sizes.items()]
    splits = split_files(files, "text")
    names = [[f.name for f in u.files] for u in splits]
    assert names == [["a.txt", "b.txt"], ["c.txt"], ["d.md"], ["e.jsonl"], ["f.txt", "g.txt"]]
    assert [u.size for u in splits] == [10, 1, 30, 0, 5]


@pytest.mark.parametrize(
    ("count", "num_splits"), [(1, 8), (8, 8), (9, 8), (10, 7), (32, 2), (33, 2), (63, 2), (64, 1), (100, 1)]
)
def test_few_compressed_files_are_split(tmp_path: Path, count: int, num_splits: int) -> None:
    """Large files: splits depend on the sizes alone."""
    files = [tmp_path / f"{i:03}.jsonl.gz" for i in range(count)]
    for file in files:
        with open(file, "wb") as f:
            f.truncate(1 << 30)  # no byte of it is stored
    splits = split_files([*files, write(tmp_path / "z.txt", b"x")], "text")
    assert [(u.files[0], u.begin, u.end) for u in splits[:-1]] == [
        (file, index, num_splits) for file in files for index in range(num_splits)
    ]


ODD_LINES = {
    "blank lines": (b'\n\n{"text": "a"}\n \t\n\x0b\n{"text": "b"}\n\n\n', ["a", "b"]),
    "no last newline": (b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
    "blanks at the end": (b'{"text": "a"}\n   ', ["a"]),
    "CRLF": (b'{"text": "a"}\r\n\r\n{"text": "b\\r\\n"}\r\n', ["a", "b\r\n"]),
    "empty texts": (b'{"text": ""}\n{"text": "a"}\n{"text": ""}', ["a"]),
    "separators within text": (
        '{"text": "a\u2028b\u0085c"}\n{"text": "d"}'.encode(),
        ["a\u2028b\u0085c", "d"],
    ),
    "a line of many splits": (b'{"text": "%s"}\n{"text": "b"}\n' % (b"a" * 5000), ["a" * 5000, "b"]),
    "nothing": (b"", []),
    "only blanks": (b"\n \n\t", []),
}


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("case", ODD_LINES)
def test_odd_lines(tmp_path: Path, case: str, suffix: str, split_bytes: int) -> None:
    content, expected = ODD_LINES[case]
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zst}[suffix]
    assert sorted(read(write(tmp_path / f"a.jsonl{suffix}", compress(content)))) == expected


def test_content_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    """With lines across the border."""
    data = random.Random(1).randbytes((1 << 20) + 5000).hex()  # compresses to half of that at best
    texts = [data[i : i + 30_011] for i in range(0, len(data), 30_011)]
    for suffix, compress in ((".gz", gzip.compress), (".zst", zst)):
        file = write(tmp_path / f"a.jsonl{suffix}", compress(lines(texts)))
        assert file.stat().st_size > 1 << 20
        assert read(file) == texts


def gz_filler(size: int) -> bytes:
    """A member of nothing, with a long name in its header."""
    empty = gzip.compress(b"")
    return b"\x1f\x8b\x08\x08" + empty[4:10] + b"n" * (size - len(empty) - 1) + b"\0" + empty[10:]


def zst_filler(size: int) -> bytes:
    """A frame that decoders skip."""
    return struct.pack("<II", 0x184D2A50, size - 8) + bytes(size - 8)


@pytest.mark.parametrize("offset", [-9, -1, 0, 1, 9])
@pytest.mark.parametrize(
    ("suffix", "compress", "filler"),
    [(".gz", gzip.compress, gz_filler), (".zst", zst, zst_filler)],
    ids=["gz", "zst"],
)
def test_members_that_end_where_a_read_ends(
    tmp_path: Path, suffix: str, compress: Compress, filler: Callable[[int], bytes], offset: int
) -> None:
    """A mebibyte is read at once; a line goes on in the next member."""
    content = lines(SMALL)
    first, second = compress(content[:100]), compress(content[100:])
    fill = filler((1 << 20) + offset - len(first))
    assert len(first + fill) == (1 << 20) + offset
    assert read(write(tmp_path / f"a.jsonl{suffix}", first + fill + second)) == SMALL
    with pytest.raises(ConfigError, match=rf"a\.jsonl{suffix}: cut off"):
        read(write(tmp_path / f"a.jsonl{suffix}", first + fill + second[:-1]))


# ---- cut off and damaged


def all_of(file: Path) -> list[str] | None:
    """What a whole pass gives: the documents, or none of them and an error that names the file."""
    try:
        return sorted(read(file))
    except ConfigError as e:
        if str(file) not in str(e):
            raise
        return None


@pytest.mark.usefixtures("cut_finely")
@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zst)], ids=["gz", "zst"])
@pytest.mark.parametrize("ending", [".jsonl", ".txt"])
def test_a_file_cut_off_at_any_byte(tmp_path: Path, ending: str, suffix: str, compress: Compress) -> None:
    """From nothing at all (an empty file is no whole compressed one) to all but the last byte, in every
    part."""
    whole = compress(lines(SMALL))
    assert 300 < len(whole) < 700
    file = write(tmp_path / f"a{ending}{suffix}", whole)
    assert len(read(file)) == (len(SMALL) if ending == ".jsonl" else 1)
    for length in range(len(whole)):
        write(file, whole[:length])
        with pytest.raises(ConfigError, match=r"cut off after [\d,]+ bytes of its content") as e:
            read(file)
        assert str(file) in str(e.value)


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zst)], ids=["gz", "zst"])
def test_a_file_of_members_cut_off_at_any_byte(tmp_path: Path, suffix: str, compress: Compress) -> None:
    """Between members it is whole, by the formats' definition, and has the lines before."""
    members = [compress(lines(SMALL[i : i + 5])) for i in range(0, 20, 5)]
    whole = b"".join(members)
    ends = {sum(map(len, members[:i])): SMALL[: 5 * i] for i in range(1, 5)}
    file = tmp_path / f"a.jsonl{suffix}"
    for length in range(len(whole) + 1):
        texts_read = all_of(write(file, whole[:length]))
        if length in ends:
            assert texts_read == sorted(ends[length])
        else:
            assert texts_read is None


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zst)], ids=["gz", "zst"])
def test_a_flipped_bit_is_an_error_or_does_no_harm(tmp_path: Path, suffix: str, compress: Compress) -> None:
    """Headers hold bits that mean nothing here, such as the time; the content is guarded."""
    whole = compress(lines(SMALL[:6]))
    harmless = 0
    for i in range(len(whole)):
        flipped = bytearray(whole)
        flipped[i] ^= 1 << i % 8
        texts_read = all_of(write(tmp_path / f"a.jsonl{suffix}", bytes(flipped)))
        if texts_read is not None:
            assert texts_read == sorted(SMALL[:6])
            harmless += 1
    assert harmless < 12


@pytest.mark.parametrize("how", ["gz", "zst"])
def test_a_byte_changed_in_the_middle(tmp_path: Path, how: str) -> None:
    suffix, compress = COMPRESSED[how]
    content = bytearray(compress(lines(SMALL)))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(ConfigError, match=rf"a\.jsonl\{suffix}: damaged after [\d,]+ bytes of its content"):
        read(write(tmp_path / f"a.jsonl{suffix}", bytes(content)))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("ending", [".jsonl", ".txt"])
def test_what_is_not_compressed_at_all(tmp_path: Path, ending: str, suffix: str) -> None:
    with pytest.raises(ConfigError, match=rf"a{ending}\{suffix}: damaged after 0 bytes"):
        read(write(tmp_path / f"a{ending}{suffix}", lines(SMALL)))


@pytest.mark.parametrize("how", ["gz", "zst"])
def test_rubbish_after_the_end(tmp_path: Path, how: str) -> None:
    suffix, compress = COMPRESSED[how]
    with pytest.raises(ConfigError, match=r"a\.jsonl.*damaged after [1-9]"):
        read(write(tmp_path / f"a.jsonl{suffix}", compress(lines(SMALL)) + b"rubbish, long enough"))


@pytest.mark.full
def test_parquet_cut_off_at_any_byte(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "whole.parquet", [*SMALL[:4]], rows=2).read_bytes()
    file = tmp_path / "a.parquet"
    for length in range(len(whole)):
        write(file, whole[:length])
        with pytest.raises(ConfigError, match=r"a\.parquet: not a complete parquet file"):
            split_files([file], "text")


def test_a_page_of_parquet_that_does_not_decompress(tmp_path: Path) -> None:
    """The row that is named is the first of those that could not be read."""
    file = write_parquet(tmp_path / "a.parquet", [*TEXTS], rows=300, compression="zstd", use_dictionary=False)
    page = pq.read_metadata(file).row_group(1).column(1)
    content = bytearray(file.read_bytes())
    begin, size = page.data_page_offset, page.total_compressed_size
    content[begin + size // 2 : begin + size] = bytes(size - size // 2)
    write(file, bytes(content))
    texts_read = list[str]()
    with pytest.raises(ConfigError, match=r"a\.parquet: row 257 or later: damaged parquet"):
        texts_read.extend(d.text for u in split_files([file], "text") for d in read_split(u, "text"))
    assert texts_read == TEXTS[:256]


def test_parquet_compressed_in_a_way_that_pyarrow_does_not_read(tmp_path: Path) -> None:
    """Told of as any file that cannot be read."""
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet", compression="snappy")
    content = (tmp_path / "a.parquet").read_bytes()
    snappy, lzo = b"\x04text\x15\x02\x16", b"\x04text\x15\x06\x16"  # the tokenizer in the file's metadata
    assert content.count(snappy) == 1
    write(tmp_path / "a.parquet", content.replace(snappy, lzo))
    with pytest.raises(ConfigError, match=r"a\.parquet: row 1 or later: damaged parquet.*LZO"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1", lines(SMALL), bytes(1000)])
def test_what_is_no_parquet(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"a\.parquet: not a complete parquet file"):
        read(write(tmp_path / "a.parquet", content))


def test_parquet_without_the_column(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(ConfigError, match=r"a\.parquet: no column 'body' \(columns: id, text, z\)"):
        read(file, field="body")


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1], "int64"), ([b"x"], "binary"), ([["x"]], "list<"), ([{"text": "x"}], "struct<"), ([None], "null")],
    ids=str,
)
def test_a_column_of_another_type(tmp_path: Path, values: list[object], kind: str) -> None:
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=rf"a\.parquet: column 'text' holds {kind}.*, not strings"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.jsonl.gz", "gone.txt.zst", "gone.parquet"])
def test_a_file_that_vanished_after_the_plan(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*No such file"):
        list(read_split(FileSplit((tmp_path / name,), 0, 1, 1), "text"))


@pytest.mark.parametrize(
    ("library", "name"), [("zstandard", "a.jsonl.zst"), ("zstandard", "a.txt.zst"), ("pyarrow", "a.parquet")]
)
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{name}: reading \.?\w+ needs {library}: pip install"):
        read(write(tmp_path / name, b"x"))


# ---- one bad line or row


BROKEN = {
    b"{": "not valid JSON",
    b'{"text": "\xff"}': "not UTF-8 at byte 10",
    b'{"txt": "x"}': "no field 'text'",
    b"[1]": "a JSON array",
    b'{"text": 1}': "'text' is not a string",
    b'{"text": "\\udc00"}': "lone surrogate",
    b'{"text": "x", "n": %s}' % (b"1" * 5000): "4300",  # more digits than Python converts
    b"[" * 100_000: "not valid JSON",
}


@pytest.mark.usefixtures("cut_finely")
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_good_lines_around_broken_ones_are_read(tmp_path: Path, suffix: str) -> None:
    """Every third line is broken, every fifth blank."""
    content, good, expected = list[bytes](), list[str](), dict[int, str]()
    for line in range(1, 80):
        if line % 3 == 0:
            broken = [*BROKEN][line // 3 % len(BROKEN)]
            content.append(broken)
            expected[line] = BROKEN[broken]
        elif line % 5 == 0:
            content.append(b" ")
        else:
            content.append(b'{"text": "good %d"}' % line)
            good.append(f"good {line}")
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zst}[suffix]
    file = write(tmp_path / f"a.jsonl{suffix}", compress(b"\n".join(content)))
    errors = list[ConfigError]()
    texts_read = read(file, bad=collect(errors))
    assert sorted(texts_read) == sorted(good)
    assert suffix or texts_read == good
    told = {int(str(e).removeprefix(f"{file}:").split(":")[0]): str(e) for e in errors}
    assert len(errors) == len(told)
    assert told.keys() == expected.keys()
    for line, reason in expected.items():
        assert reason in told[line]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_broken_line_stops_unless_told_otherwise(tmp_path: Path, suffix: str) -> None:
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zst}[suffix]
    content = compress(b'{"text": "x"}\n\n{"text": 1}\n{"text": "y"}\n')
    with pytest.raises(ConfigError, match=rf"a\.jsonl{suffix}:3: field 'text' is not a string"):
        read(write(tmp_path / f"a.jsonl{suffix}", content))


def test_a_file_cut_off_is_no_bad_line(tmp_path: Path) -> None:
    """Skipping bad lines skips no file; nor is its last, half line told of."""
    file = write(tmp_path / "a.jsonl.gz", gzip.compress(lines(SMALL))[:-9])
    errors = list[ConfigError]()
    with pytest.raises(ConfigError, match="cut off"):
        read(file, bad=collect(errors))
    assert errors == []


def test_texts_around_a_broken_one_are_read(tmp_path: Path) -> None:
    contents = {"a.txt": b"a", "b.txt": b"\xff", "c.txt.gz": gzip.compress(b"c\xc3"), "d.txt.zst": zst(b"d")}
    files = [write(tmp_path / name, content) for name, content in contents.items()]
    errors = list[ConfigError]()
    assert read(*files, bad=collect(errors)) == ["a", "d"]
    assert [str(e).split(": ")[0] for e in errors] == [str(f) for f in files[1:3]]
    assert all("not UTF-8" in str(e) for e in errors)


def test_rows_around_a_null_are_read(tmp_path: Path, split_bytes: int) -> None:
    """Rows are counted from 1 over all row groups; empty ones count too."""
    texts: list[str | None] = [*TEXTS]
    texts[0] = texts[31] = texts[299] = texts[399] = None
    texts[30] = texts[100] = ""
    file = write_parquet(tmp_path / "a.parquet", texts)
    errors = list[ConfigError]()
    assert read(file, bad=collect(errors)) == [t for t in texts if t]
    assert [str(e) for e in errors] == [f"{file}: row {n}: field 'text' is null" for n in (1, 32, 300, 400)]
    with pytest.raises(ConfigError, match=r"a\.parquet: row 1: field 'text' is null"):
        read(file)


def test_rows_around_one_that_is_not_utf8_are_read(tmp_path: Path) -> None:
    values = [b"%d" % i for i in range(1, 301)]
    values[270] = b"\xff"
    offsets = [0]
    for value in values:
        offsets.append(offsets[-1] + len(value))
    buffers = pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(values))
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(300, *buffers)}), tmp_path / "a.parquet")
    errors = list[ConfigError]()
    texts_read = read(tmp_path / "a.parquet", bad=collect(errors))
    assert texts_read == [str(i) for i in range(1, 301) if i != 271]
    assert [str(e).split(": ")[1] for e in errors] == ["row 271"]


# ---- places


def test_where_a_line_of_a_plain_file_is(tmp_path: Path) -> None:
    """Beyond a mebibyte too, and of a file with blank lines and CRLF."""
    content = [
        b'{"text": "%d"}' % i + b" " * 90 + (b"\r" if i % 3 else b"") + b"\n" * (1 + i % 2)
        for i in range(20_000)
    ]
    file = write(tmp_path / "a.jsonl", b"".join(content))
    assert file.stat().st_size > 3 << 19
    numbers, line = dict[str, int](), 1
    for i, lines_of_it in enumerate(content):
        numbers[str(i)] = line
        line += lines_of_it.count(b"\n")
    (split,) = split_files([file], "text")
    documents = list(read_split(split, "text"))
    assert len(documents) == len(content)
    for document in [*documents[:3], *documents[14_000:14_003], documents[-1]]:
        assert where(document.file, document.place) == f"{file}:{numbers[document.text]}"


@pytest.mark.usefixtures("cut_finely")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt", "a.txt.gz"])
def test_where_every_document_is(tmp_path: Path, name: str) -> None:
    """By the splits that it was read in, also after blank lines."""
    file = tmp_path / name
    content = b"\n \n" + lines(SMALL)
    if name == "a.parquet":
        write_parquet(file, [*SMALL], rows=3)
    else:
        write(file, {".gz": gzip.compress, ".zst": zst}.get(file.suffix, bytes)(content))
    documents = [d for u in split_files([file], "text") for d in read_split(u, "text")]
    places = {d.text: where(d.file, d.place) for d in documents}
    if "txt" in name:
        assert [*places.values()] == [str(file)]
    else:
        form, first = ("{}: row {}", 1) if name == "a.parquet" else ("{}:{}", 3)
        assert places == {text: form.format(file, i) for i, text in enumerate(SMALL, first)}


def test_a_schema_that_pyarrow_does_not_know(tmp_path: Path) -> None:
    """Its own class of error is none of Python's."""
    pq.write_table(pa.table({"text": ["x"], "n": [1]}), tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    place = content.rindex(b"ARROW:schema")
    refused = 0
    for offset in range(140, 170):
        damaged = bytearray(content)
        damaged[place + offset] ^= 2
        write(tmp_path / "a.parquet", bytes(damaged))
        try:
            list(documents([tmp_path / "a.parquet"], "text"))
        except ConfigError:
            refused += 1
    assert refused > 3


# ---- names and contents

ONE_TWO = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        *((f"x{suffix}", bytes) for suffix in (".JSONL", ".Json", ".jsonlines", ".jl")),
        *((f"x{suffix}", gzip.compress) for suffix in (".JSONL.GZ", ".json.gzip")),
        ("x.jsonl.zstd", zst),
    ],
)
def test_suffixes_in_capitals_and_their_aliases(tmp_path: Path, name: str, compress: Compress) -> None:
    file = write(tmp_path / name, compress(ONE_TWO))
    assert find_files([str(tmp_path)], "key") == [file]
    assert [d.text for d in documents([file], "text")] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(
            (name, ONE_TWO, r"looks like JSON, .*: name it \.jsonl if .*, or \.txt")
            for name in ("part-00000", "x.jsonl.1", "x.jsonl.bak")
        ),
        ("part-00000.gz", gzip.compress(ONE_TWO, mtime=0), "looks like JSON"),
        ("x.json5", b'\xef\xbb\xbf[\n {"text": 1}]', "looks like JSON"),
        *((name, b"one", "looks like CSV or TSV") for name in ("x.csv", "x.TSV", "x.csv.bak")),
        *(("part-1", text, "looks like CSV or TSV") for text in (b"id,text\n1,a\n", b"id\ttext\r\n1\ta\r\n")),
        ("x.jsonl.bz2", bz2.compress(ONE_TWO), "looks like bzip2 or xz, .*: decompress it, or"),
        ("x.jsonl.xz", lzma.compress(ONE_TWO), "looks like bzip2 or xz"),
        ("x.bin", zst(ONE_TWO), r"looks like zstd, .*: name it \.zst"),
        ("x.txt", gzip.compress(b"one", mtime=0), r"looks like gzip, .*: name it \.gz"),
        ("x.pq", b"PAR1\0\0", r"looks like parquet, .*: name it \.parquet"),
        ("x.docx", b"PK\x03\x04", "looks like a binary format"),
        ("x.dat", b"\x01\0\0\0", "looks like a binary format"),
    ],
)
def test_a_file_that_is_not_plain_text_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=f"{re.escape(str(file))} {message}"):
        list(documents([file], "text"))


@pytest.mark.parametrize("name", ["x.txt", "x.json.txt", "x.csv.txt", "x.MD", "x.txt.gz"])
@pytest.mark.parametrize("text", ['{"text": "one"}', "id,text\n1,a\n"])
def test_a_file_that_is_named_as_plain_text_is_one_document(tmp_path: Path, name: str, text: str) -> None:
    compress = gzip.compress if name.endswith(".gz") else bytes
    assert [d.text for d in documents([write(tmp_path / name, compress(text.encode()))], "text")] == [text]


@pytest.mark.parametrize("text", ["import os\n", "Hello, you\n", "{ }\n", "[1] A. Author\n", "# a\n", "a,b"])
def test_text_under_any_other_name_is_one_document(tmp_path: Path, text: str) -> None:
    assert [d.text for d in documents([write(tmp_path / "x.tex", text.encode())], "text")] == [text]


def test_the_other_files_of_a_directory_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.txt", "b.csv", "c.CSV", "part-00000", "dataset_info.json"):
        write(tmp_path / name, b"x")
    assert find_files([str(tmp_path)], "key", is_told=True) == [tmp_path / "a.txt"]
    assert capsys.readouterr().err.endswith("by their suffix: 1 without a suffix, 2 .csv\n")


def test_a_prepared_dataset_is_not_text(tmp_path: Path) -> None:
    write_dataset(tmp_path / "in" / "d", [[1, 2]])
    for path in (tmp_path / "in", tmp_path / "in" / "d", tmp_path / "in" / "d" / "dataset.json"):
        with pytest.raises(ConfigError, match=r'in/d is not text but a dataset, .* name = "tokens"') as e:
            find_files([str(path)], "key")
        assert e.value.key == "key"
