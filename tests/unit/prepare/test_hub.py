"""Pins datasets of the Hugging Face hub: `hf:` gives the bytes of local files, a stream their documents. The
tests read local directories through the classes that read the hub; the hub itself is simulated."""

from __future__ import annotations

import filecmp
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hub import serving
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.prepare import streams
from titanlite.prepare.hub import HubSplit, hub_files
from titanlite.prepare.streams import HuggingFace, fetch

datasets = pytest.importorskip("datasets")
TEXTS = [f"text {i} " + "x" * (i % 7) for i in range(60)]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def jsonl(folder: Path) -> Path:
    """A dataset with two splits, of which `train` has two files."""
    folder.mkdir()
    for name, part in {"train-0": TEXTS[:25], "train-1": TEXTS[25:], "test-0": TEXTS[:3]}.items():
        lines = (json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(part))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def parquet(folder: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    for name, part in {"train-00000-of-00002": TEXTS[:25], "train-00001-of-00002": TEXTS[25:]}.items():
        pq.write_table(pa.table({"text": part}), folder / f"{name}.parquet", row_group_size=10)
    return folder


def webdataset(folder: Path) -> Path:
    folder.mkdir()
    for shard, part in enumerate([TEXTS[:25], TEXTS[25:]]):
        with tarfile.open(folder / f"{shard:05}.tar", "w") as tar:
            for i, text in enumerate(part):
                member = tarfile.TarInfo(f"{i:06}.text")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
    return folder


def prepare(*words: object) -> int:
    return cli.run(["prepare", *map(str, words), "--tokenizer.name=bytes", "--num_processes=1"])


@pytest.mark.parametrize("make", [jsonl, parquet])
def test_the_bytes_are_those_of_local_files(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("data"))
    assert prepare("hf:data", "--output=hub") == 0
    assert prepare("data/train-*", "--output=local") == 0
    names = sorted(file.name for file in Path("local").iterdir())
    assert filecmp.cmpfiles("hub", "local", names, shallow=False) == (names, [], [])


def test_split_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(Path("data"))
    configs = {"one": "train-1.jsonl", "two": "[train-0.jsonl, train-1.jsonl]"}
    entries = (
        f"- config_name: {name}\n  default: {name == 'one'}\n"
        f"  data_files:\n  - split: train\n    path: {path}\n"
        for name, path in configs.items()
    )
    (Path("data") / "README.md").write_text(f"---\nconfigs:\n{''.join(entries)}---\n")

    def names(**keys: str) -> list[str]:
        return [file.name for file in hub_files("data", HubSplit(**keys))]

    assert names() == ["train-1.jsonl"]
    assert names(config="two") == ["train-0.jsonl", "train-1.jsonl"]
    (Path("data") / "README.md").unlink()
    assert names(split="test") == ["test-0.jsonl"]


@pytest.mark.parametrize("make", [jsonl, parquet, webdataset])
def test_a_stream_has_the_documents_of_local_files(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FILE_BYTES", 60)
    stream = HuggingFace(path=str(make(Path("data"))))
    whole = fetch(stream, Path("whole"), "text")
    assert [json.loads(line)["text"] for f in whole for line in f.read_text().splitlines()] == TEXTS
    write = streams.write_atomically
    for after in (3, 9):  # files: within the first file of the dataset, and in the second

        def stop(path: Path, content: str, after: int = after) -> None:
            write(path, content)
            if json.loads(content)["files"] == after:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(streams, "write_atomically", stop)
            with pytest.raises(KeyboardInterrupt):
                fetch(stream, Path("out"), "text")
    parts = fetch(stream, Path("out"), "text")
    assert [f.read_bytes() for f in parts] == [f.read_bytes() for f in whole]


def test_an_edited_dataset_does_not_continue_a_stream() -> None:
    stream = HuggingFace(path=str(jsonl(Path("data"))))
    fetch(stream, Path("out"), "text")
    with open("data/train-1.jsonl", "a") as file:
        file.write('{"text": "more", "id": 0}\n')
    with pytest.raises(ConfigError, match="the stream has changed"):
        fetch(stream, Path("out"), "text")


def test_downloads_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the split are downloaded, at the commit that the datasets library has resolved."""
    import huggingface_hub

    asked: list[Any] = []
    commit = "0123abcd"
    urls = [f"hf://datasets/org/name@{commit}/data/train-{i}[1].parquet" for i in (1, 0)]
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": urls}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **k: asked.append((a, k)) or builder)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or "/cache"
    )
    files = hub_files("org/name", HubSplit(config="en", revision="main"))
    assert files == [Path(f"/cache/data/train-{i}[1].parquet") for i in (0, 1)]
    patterns = [f"data/train-{i}[[]1].parquet" for i in (1, 0)]
    assert asked[0] == (("org/name", "en"), {"revision": "main"})
    expected = {"repo_type": "dataset", "revision": commit, "allow_patterns": patterns}
    assert asked[1] == (("org/name",), expected)


@pytest.mark.full
def test_a_server_like_the_hub(tmp_path: Path) -> None:
    """Both ways of reading, through the real libraries, give what local files give. The commands run in
    processes of their own, because the libraries read the environment when they are imported."""
    jsonl(Path("data"))
    assert prepare("data/train-*", "--output=local") == 0
    stream = ["--from-stream.name=huggingface", "--from-stream.path"]
    assert prepare(*stream, "data", "--output=streamed") == 0
    with serving(tmp_path / "data") as endpoint:
        variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "titanlite.cli", "prepare", *words, "--tokenizer.name=bytes"]
            return subprocess.run(command, env=variables, capture_output=True, text=True)

        files, streamed = run("hf:org/name", "--output=a"), run(*stream, "org/name", "--output=b")
        unknown = run("hf:org/nope", "--output=c")
    assert (files.returncode, streamed.returncode) == (0, 0), files.stderr + streamed.stderr
    names = sorted(file.name for file in Path("local").iterdir() if file.name != "report.json")
    assert filecmp.cmpfiles("a", "local", names, shallow=False) == (names, [], [])
    assert filecmp.cmp("b/00000.bin", "streamed/00000.bin", shallow=False)
    assert unknown.returncode == 2
    assert unknown.stderr.splitlines()[-1].startswith(
        "titanlite: hf:org/nope: Dataset 'org/nope' doesn't exist"
    )


@pytest.mark.parametrize("kind", ["files", "stream"])
def test_an_unreachable_hub(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'org/name' on the Hub (ReadTimeout)\nmore")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    words = (
        ["hf:org/name"]
        if kind == "files"
        else ["--from-stream.name=huggingface", "--from-stream.path=org/name"]
    )
    assert prepare(*words, "--output=out") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["titanlite: hf:org/name: Couldn't reach 'org/name' on the Hub (ReadTimeout)"]
    assert not list(Path().glob("*out*"))


def test_a_network_that_fails_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FILE_BYTES", 60)
    stream = HuggingFace(path=str(jsonl(Path("data"))))
    whole = fetch(stream, Path("whole"), "text")
    rows = datasets.IterableDataset.__iter__

    def failing(self: Any) -> Any:
        for i, row in enumerate(rows(self)):
            if i == 30:
                raise OSError("connection reset")
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(datasets.IterableDataset, "__iter__", failing)
        with pytest.raises(ConfigError, match="hf:data: connection reset"):
            fetch(stream, Path("out"), "text")
    parts = fetch(stream, Path("out"), "text")
    assert [f.read_bytes() for f in parts] == [f.read_bytes() for f in whole]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf:data", "--split=tset"], "--split: hf:data has no split 'tset' (splits: test, train)"),
        (["hf:data", "--config=de"], "hf:data: BuilderConfig 'de' not found. Available: ['default']"),
        (["hf:data", "--field=body"], ".jsonl:1: no field 'body' in this line"),
        (["hf:tars"], "hf:tars: its files are .tar, which only a stream reads"),
        (["data/train-0.jsonl", "--split=test"], "--split: applies to hf:NAME: no input is one"),
        (["--from-stream.path=data", "--from-stream.split=tset"], "hf:data has no split 'tset'"),
        (
            ["--from-stream.path=data", "--field=body"],
            "document 0 of the stream has no 'body' (it has: text, id)",
        ),
        (
            ["--from-stream.path=tars"],
            "document 0 of the stream has no 'body' (it has: text, __key__, __url__)",
        ),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(Path("data"))
    webdataset(Path("tars"))
    if words == ["--from-stream.path=tars"]:
        words = [*words, "--field=body"]
    if words[0].startswith("--from-stream"):
        words = ["--from-stream.name=huggingface", *words]
    assert prepare(*words, "--output=out") == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert message in last
    assert not Path("out").exists()
    assert not words[0].startswith("--") or not list(Path().glob(".partial*"))
