"""Pins the limits of `titanlite prepare` and raw-text sources: a document that is too large is bad input with
its place, in every format; memory stays bounded while it is found. Also what a byte order mark is taken
for."""

from __future__ import annotations

import codecs
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.support.jobs import make_job
from tests.support.tiers import full
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.data import text_files
from titanlite.data.text_files import Limits, OnBad, read_split, split_files, stop

ONE_MIB = Limits(max_document_mib=1)
LARGE = "x" * (1 << 20)  # with the braces around it, or one more, too large


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def read(file: Path, limits: Limits, bad: OnBad = stop) -> list[str]:
    """The documents of all splits."""
    return [d.text for u in split_files([file], "text") for d in read_split(u, "text", bad, limits)]


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


LINES: list[tuple[str, Callable[[bytes], bytes]]] = [
    (".jsonl", bytes),
    (".jsonl.gz", gzip.compress),
    (".jsonl.zst", zst),
]


@pytest.mark.parametrize("split_bytes", [1000, full(1 << 30)])
@pytest.mark.parametrize(("ending", "compress"), LINES)
def test_a_line_that_is_too_large(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    compress: Callable[[bytes], bytes],
    split_bytes: int,
) -> None:
    monkeypatch.setattr(text_files, "SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(text_files, "BLOCK_LINES", 1)
    file = tmp_path / f"a{ending}"
    file.write_bytes(compress(lines("one", LARGE, "three")))
    with pytest.raises(
        ConfigError, match=rf"{ending}:2: a document of more than 1 MiB; raise max_document_mib"
    ):
        read(file, ONE_MIB)
    places = list[int]()
    texts_read = read(file, ONE_MIB, lambda file, place, reason: places.append(place))
    assert sorted(texts_read) == ["one", "three"]
    assert len(places) == 1
    assert sorted(read(file, Limits(max_document_mib=2))) == ["one", "three", LARGE]


@pytest.mark.parametrize(
    ("ending", "compress"), [(".txt", bytes), (".txt.gz", gzip.compress), (".txt.zst", zst)]
)
def test_a_file_that_is_too_large_a_document(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / f"a{ending}"
    file.write_bytes(compress(LARGE.encode()))
    assert read(file, ONE_MIB) == [LARGE]
    file.write_bytes(compress(LARGE.encode() + b"x"))
    with pytest.raises(ConfigError, match=rf"a{ending}: a document of more than 1 MiB"):
        read(file, ONE_MIB)


@pytest.mark.full
def test_a_row_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is stored once may be that of every row: rows are read few at a time."""
    monkeypatch.setattr(text_files, "PARQUET_BYTES", 4 << 20)
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", *[LARGE + "x"] * 200, "three"]}), file)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"a\.parquet: row 2: a document of more than 1 MiB"):
        read(file, ONE_MIB)
    places = list[int]()
    assert read(file, ONE_MIB, lambda file, place, reason: places.append(place)) == ["one", "three"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert places == list(range(2, 202))
    assert peak < 30 << 20


@pytest.mark.full
@pytest.mark.parametrize(("ending", "compress"), LINES)
def test_memory_while_a_line_of_50_mb_is_found(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / f"a{ending}"
    file.write_bytes(compress(lines("one", "x" * 50_000_000)))
    tracemalloc.start()
    with pytest.raises(ConfigError, match=":2: a document of more than 1 MiB"):
        read(file, ONE_MIB)
    assert read(file, ONE_MIB, lambda *args: None) == ["one"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 1 KiB of a .zst file may become 32 MiB, of which there are copies
    assert peak < (100 if ending.endswith("zst") else 30) << 20


def test_a_limit_is_at_least_one() -> None:
    with pytest.raises(ConfigError) as e:
        Limits(max_document_mib=0)
    assert e.value.key == "max_document_mib"


def test_prepare_of_a_bomb_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """70 MB in 70 kB; it took 17 times as much memory and was prepared."""
    monkeypatch.chdir(tmp_path)
    Path("bomb.jsonl.gz").write_bytes(gzip.compress(lines("one", "x" * 70_000_000)))
    command = ["prepare", "bomb.jsonl.gz", "--output=out", "--tokenizer.name=bytes", "--num_processes=1"]
    assert cli.run(command) == 2
    last = capsys.readouterr().err.splitlines()[-1]  # after the progress, if the machine is slow
    expected = "bomb.jsonl.gz:2: a document of more than 64 MiB; raise max_document_mib"
    assert last == f"titanlite: {expected}"
    assert not Path("out").exists()


def test_a_raw_text_source_has_the_limits(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "large.txt").write_text(LARGE + "x")
    source = f'data.sources=[{{name="text", path=["{tmp_path}/large.txt"], max_document_mib=1}}]'
    job = make_job(tmp_path, corpus, f"--{source}")
    tokenizer = job.tokenizer.build()
    with pytest.raises(ConfigError, match=r"large\.txt: a document of more than 1 MiB"):
        job.data.sources[0].build(tokenizer, tmp_path / "cache")


# ---- other input that people have


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".txt", ".txt.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, ending: str) -> None:
    content = codecs.BOM_UTF8 + (lines("one", "\ufefftwo") if "jsonl" in ending else "one\ufeff".encode())
    file = tmp_path / f"a{ending}"
    file.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    assert read(file, Limits()) == (["one", "\ufefftwo"] if "jsonl" in ending else ["one\ufeff"])


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), file)
    with pytest.raises(ConfigError, match=r"a\.parquet: 2 columns are called 'text'; rename all but one"):
        read(file, Limits())


def test_the_input_is_missed_before_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["prepare", "gone.jsonl", "--output=out", "--tokenizer.path=gone.model"]) == 2
    assert "no such file: 'gone.jsonl'" in capsys.readouterr().err
