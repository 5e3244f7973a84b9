"""Pins streams of documents: each document once and in order, also after interruptions; the same tokens as
from local files; wrong input is one line and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.line_stream import Lines, LineStream
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.corpus import stream_files
from titanlite.corpus.pipeline import work_folder
from titanlite.corpus.stream_files import fetch
from titanlite.data.shards import TokenShards

NUM_LINES = 50


@pytest.fixture
def stream(tmp_path: Path) -> LineStream:
    (tmp_path / "lines.txt").write_text("".join(f"line {i}\n" for i in range(NUM_LINES)))
    return LineStream(path=str(tmp_path / "lines.txt"))


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stream_files, "FILE_BYTES", 100)  # five documents
    return tmp_path / "out"


def texts(files: list[Path]) -> list[str]:
    return [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]


def interrupted(stream: LineStream, output: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Fetch the stream, with an interrupt after this many documents."""
    whole = Lines.__iter__

    def part(self: Lines) -> Iterator[str]:
        for i, line in enumerate(whole(self)):
            if i == after:
                raise KeyboardInterrupt
            yield line

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "__iter__", part)
        with pytest.raises(KeyboardInterrupt):
            fetch(stream, output, "text")


@pytest.mark.parametrize("has_state", [True, False])
def test_interruptions_change_no_byte(
    stream: LineStream, output: Path, monkeypatch: pytest.MonkeyPatch, has_state: bool
) -> None:
    if not has_state:
        monkeypatch.delattr(Lines, "state_dict")
    whole = fetch(stream, output.with_name("whole"), "text").files
    assert texts(whole) == [f"line {i}" for i in range(NUM_LINES)]
    assert len(whole) == 10
    for after in (0, 13, 28):
        interrupted(stream, output, monkeypatch, after)
    files = fetch(stream, output, "text").files
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in whole]
    assert fetch(stream, output, "text").files == files  # nothing is left to read


def test_control_without_the_state_documents_are_repeated(
    stream: LineStream, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lines, "load_state_dict", lambda self, state: None)
    interrupted(stream, output, monkeypatch, 13)
    assert texts(fetch(stream, output, "text").files) != [f"line {i}" for i in range(NUM_LINES)]


@pytest.mark.parametrize("count", [1, 5, 12, NUM_LINES, NUM_LINES + 1])
def test_max_documents(stream: LineStream, output: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    stream = LineStream(path=stream.path, max_documents=count)
    if count > 5:
        interrupted(stream, output, monkeypatch, 6)
    assert texts(fetch(stream, output, "text").files) == [f"line {i}" for i in range(min(count, NUM_LINES))]


def test_another_stream_does_not_continue_this_one(stream: LineStream, output: Path) -> None:
    fetch(stream, output, "text")
    with pytest.raises(ConfigError, match=r"\.partial-out holds documents of another stream") as e:
        fetch(LineStream(path=stream.path, max_documents=3), output, "text")
    assert e.value.key == "output"


def test_a_state_that_is_not_json(stream: LineStream, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lines, "state_dict", lambda self: {"offset": {1, 2}})
    with pytest.raises(ConfigError, match=r"state_dict of the stream lines .*lines\.txt is not JSON"):
        fetch(stream, output.with_name("new"), "text")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"body": "b", "id": 1}, "document 0 of the stream has no 'text' (it has: body, id)"),
        ({"text": 7}, "document 0 of the stream holds int under 'text', not text"),
        (b"bytes", "document 0 of the stream holds bytes, not text"),
    ],
)
def test_a_document_without_text(
    stream: LineStream, output: Path, monkeypatch: pytest.MonkeyPatch, document: Any, message: str
) -> None:
    monkeypatch.setattr(Lines, "__iter__", lambda self: iter([document]))
    with pytest.raises(ConfigError) as e:
        fetch(stream, output, "text")
    assert str(e.value) == message
    assert not work_folder(output).exists()


def prepare(*words: object) -> int:
    return cli.run(["prepare", *map(str, words), "--tokenizer.name=bytes", "--num_processes=1"])


def write_toml(folder: Path, text: str = "") -> Path:
    file = folder / "p.toml"
    imports = 'imports = ["tests.examples.line_stream"]'
    file.write_text(f'{imports}\n{text}\n[from_stream]\nname = "lines"\npath = "{folder}/lines.txt"\n')
    return file


def test_the_tokens_are_those_of_local_files(stream: LineStream, tmp_path: Path) -> None:
    toml = write_toml(tmp_path)
    assert prepare(toml, f"--output={tmp_path}/out") == 0
    assert not work_folder(tmp_path / "out").exists()
    lines = [json.dumps({"text": f"line {i}"}) + "\n" for i in range(NUM_LINES)]
    (tmp_path / "local.jsonl").write_text("".join(lines))
    assert prepare(tmp_path / "local.jsonl", f"--output={tmp_path}/local") == 0
    (tmp_path / "local.jsonl").write_text("".join(reversed(lines)))
    assert prepare(tmp_path / "local.jsonl", f"--output={tmp_path}/other") == 0
    tokens = [(tmp_path / name / "00000.bin").read_bytes() for name in ("out", "local", "other")]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    ("document", "problem"), [(None, "null under 'text', not text"), ("\ud800", "a lone surrogate under")]
)
def test_a_null_is_a_bad_line(
    stream: LineStream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    document: str | None,
    problem: str,
) -> None:
    documents = [{"text": "one"}, {"text": document}, {"text": "two"}]
    monkeypatch.setattr(Lines, "__iter__", lambda self: iter(documents))
    toml = write_toml(tmp_path)
    assert prepare(toml, f"--output={tmp_path}/out") == 2
    assert f"field: document 1 of the stream holds {problem}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))
    assert prepare(toml, f"--output={tmp_path}/out", "--bad_lines=skip") == 0
    assert TokenShards(tmp_path / "out").num_documents == 2


def test_a_stream_without_documents(
    stream: LineStream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (tmp_path / "lines.txt").read_text()
    (tmp_path / "lines.txt").write_text("")
    toml = write_toml(tmp_path)
    assert prepare(toml, f"--output={tmp_path}/out") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"p.toml:3: from_stream: the stream lines {tmp_path}/lines.txt has no documents")
    assert not list(tmp_path.glob("*out*"))
    (tmp_path / "lines.txt").write_text(text)
    assert prepare(toml, f"--output={tmp_path}/out") == 0
    assert TokenShards(tmp_path / "out").num_documents == NUM_LINES


@pytest.mark.parametrize("after", ["begins", "has begun"])
def test_an_error_of_a_stream_names_its_key_and_line(
    stream: LineStream,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    after: str,
) -> None:
    def failing(self: object) -> Iterator[str]:
        yield from ["one", "two"] if after == "has begun" else []
        raise ConfigError("cannot be read", "path")

    if after == "begins":
        monkeypatch.setattr(LineStream, "build", lambda self: next(failing(self)))
    else:
        monkeypatch.setattr(Lines, "__iter__", failing)
    assert prepare(write_toml(tmp_path), f"--output={output}") == 2
    count = " (after 2 documents)" if after == "has begun" else ""
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"p.toml:5: from_stream.path: cannot be read{count}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lines.txt"], "input: a stream is read alone"),
        (["--worker=0/2"], "worker: a stream is read by one worker"),
        (["--split=test"], "split: applies to hf:NAME: write from_stream.split"),
        (["--from-stream.max_documents=-1"], "from_stream.max_documents: -1 is below 0"),
        (["--from-stream.name=line"], "unknown stream 'line'; did you mean 'lines'?"),
    ],
)
def test_wrong_words(
    stream: LineStream, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert prepare(write_toml(tmp_path), *words, f"--output={tmp_path}/out") == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.full
def test_a_kill_loses_nothing(stream: LineStream, tmp_path: Path) -> None:
    """In processes of their own, in which nothing else has registered the tokenizer."""
    toml = write_toml(tmp_path, f'output = "{tmp_path}/out"\n[tokenizer]\nname = "bytes"')
    kill = "import os, sys; from titanlite.corpus import stream_files; stream_files.FILE_BYTES = 100\n"
    kill += "record, calls = stream_files.write_atomically, []\n"
    kill += "def stop(*a):\n    record(*a); calls.append(1); len(calls) == 3 and os.kill(os.getpid(), 9)\n"
    kill += "stream_files.write_atomically = stop\n"
    run = f"from titanlite.corpus.prepare import main; sys.exit(main(['{toml}']))"
    assert subprocess.run([sys.executable, "-c", f"{kill}{run}"], capture_output=True).returncode == -9
    assert len(list(work_folder(tmp_path / "out").glob("documents-*"))) == 3
    assert prepare(toml) == 0
    shards = TokenShards(tmp_path / "out")
    documents = {bytes(shards.document(i)[1:-1].tolist()).decode() for i in range(shards.num_documents)}
    assert documents == {f"line {i}" for i in range(NUM_LINES)}
    assert shards.num_documents == NUM_LINES
