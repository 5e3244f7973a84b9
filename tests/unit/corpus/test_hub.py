"""Pins datasets of the Hugging Face hub: `hf:` gives the bytes of local files, a stream their documents. The
tests read local directories through the classes that read the hub; the hub itself is simulated."""

from __future__ import annotations

import filecmp
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hub import COMMIT, serving
from tests.support.streams import write_webdataset
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.corpus import stream_files
from titanlite.corpus.hub import HubSplit, hub_files
from titanlite.corpus.hub_stream import HuggingFace
from titanlite.corpus.stream_files import fetch
from titanlite.data.shards import TokenShards

datasets = pytest.importorskip("datasets")
TEXTS = [f"text {i} " + "x" * (i % 7) for i in range(60)]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    return write_webdataset(folder, [TEXTS[:25], TEXTS[25:]])


def gzipped(folder: Path) -> Path:
    folder.mkdir()
    for name, part in {"0": TEXTS[:25], "1": TEXTS[25:]}.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def prepare(*words: object) -> int:
    return cli.run(["prepare", *map(str, words), "--tokenizer.name=bytes", "--num_processes=1"])


def interrupted(stream: HuggingFace, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Fetch the stream into `out`, with an interrupt after the record of this many files."""
    write = stream_files.write_atomically

    def stop(path: Path, content: str) -> None:
        write(path, content)
        if json.loads(content)["files"] == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream_files, "write_atomically", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch(stream, Path("out"), "text")


@pytest.mark.parametrize("make", [jsonl, parquet])
def test_the_bytes_are_those_of_local_files(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("data"))
    assert prepare("hf:data", "--output=hub") == 0
    assert prepare("data/train-*", "--output=local") == 0
    names = [file.name for file in sorted(Path("local").iterdir()) if file.suffix != ".json"]
    assert filecmp.cmpfiles("hub", "local", names, shallow=False) == (["00000.bin", "00000.idx"], [], [])
    assert TokenShards("hub").prepared["input"]["hub"] == [{"path": "data", "split": "train"}]


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
        return [file.name for file in hub_files("data", HubSplit(**keys))[0]]

    assert names() == ["train-1.jsonl"]
    assert names(config="two") == ["train-0.jsonl", "train-1.jsonl"]
    (Path("data") / "README.md").unlink()
    assert names(split="test") == ["test-0.jsonl"]


@pytest.mark.parametrize("make", [jsonl, parquet, webdataset])
def test_a_stream_has_the_documents_of_local_files(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_files, "FILE_BYTES", 60)
    stream = HuggingFace(path=str(make(Path("data"))))
    whole = fetch(stream, Path("whole"), "text").files
    assert [json.loads(line)["text"] for f in whole for line in f.read_text().splitlines()] == TEXTS
    for after in (3, 9):  # files: within the first file of the dataset, and in the second
        interrupted(stream, monkeypatch, after)
    parts = fetch(stream, Path("out"), "text").files
    assert [f.read_bytes() for f in parts] == [f.read_bytes() for f in whole]


def commits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate a dataset `org/name` on the hub, with a folder of the commit's name for each commit. The last
    commit of the list that is returned is the newest one."""
    opened, newest = datasets.load_dataset_builder, ["a" * 40]

    def builder(name: str, config: str | None, revision: str | None) -> Any:
        assert name == "org/name"
        commit = revision or newest[-1]
        local = opened(commit)
        urls = [f"hf://datasets/{name}@{commit}/{Path(url).name}" for url in local.config.data_files["train"]]
        config = SimpleNamespace(data_files={"train": urls})
        return SimpleNamespace(config=config, as_streaming_dataset=local.as_streaming_dataset)

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    return newest


@pytest.mark.parametrize("revision", ["", "a" * 40], ids=["newest", "named"])
def test_a_new_commit_does_not_change_a_stream_that_has_begun(
    monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    """Also if the second call names the first call's commit. A complete stream needs no hub."""
    monkeypatch.setattr(stream_files, "FILE_BYTES", 60)
    whole = fetch(HuggingFace(path=str(jsonl(Path("a" * 40)))), Path("whole"), "text").files
    newest = commits(monkeypatch)
    interrupted(HuggingFace(path="org/name"), monkeypatch, after=1)
    newest.append("b" * 40)
    (jsonl(Path("b" * 40)) / "train-0.jsonl").write_text('{"text": "other", "id": 0}\n')
    for _ in range(2):
        fetched = fetch(HuggingFace(path="org/name", revision=revision), Path("out"), "text")
        assert [f.read_bytes() for f in fetched.files] == [f.read_bytes() for f in whole]
        assert fetched.stream == HuggingFace(path="org/name", revision="a" * 40)
        monkeypatch.setattr(datasets, "load_dataset_builder", None)  # the hub is unreachable


def test_another_commit_does_not_continue_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(Path("a" * 40))
    commits(monkeypatch)
    fetch(HuggingFace(path="org/name"), Path("out"), "text")
    with pytest.raises(ConfigError, match="holds documents of another stream"):
        fetch(HuggingFace(path="org/name", revision="b" * 40), Path("out"), "text")


def test_a_dataset_records_the_commit_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(Path("a" * 40))
    commits(monkeypatch)
    assert prepare("--from-stream.name=huggingface", "--from-stream.path=org/name", "--output=out") == 0
    recorded = TokenShards("out").prepared["input"]["stream"]
    assert (recorded["path"], recorded["split"], recorded["revision"]) == ("org/name", "train", "a" * 40)


def test_images_of_a_stream_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column `image` holds bytes that are no image."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    Path("data").mkdir()
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    images = [{"bytes": b"damaged", "path": None}] * len(TEXTS)
    table = pa.table({"text": TEXTS, "image": images}, schema=features.arrow_schema)
    pq.write_table(table, "data/train.parquet")
    stream = HuggingFace(path="data")
    (file,) = fetch(stream, Path("out"), "text").files
    assert [json.loads(line)["text"] for line in file.read_text().splitlines()] == TEXTS
    monkeypatch.setattr(datasets.IterableDataset, "decode", lambda self, enable: self)
    with pytest.raises(ConfigError, match="data: "):  # the control
        fetch(stream, Path("control"), "text")


@pytest.mark.parametrize("place", ["absolute", "parent", "url", "link"])
@pytest.mark.parametrize(
    "words", [["hf:data"], ["--from-stream.name=huggingface", "--from-stream.path=data"]]
)
def test_a_directory_names_only_its_own_files(
    place: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A README.md of somebody else must not bring a private file into a dataset."""
    jsonl(Path("data"))
    Path("secret.jsonl").write_text('{"text": "private"}\n')
    path = {
        "absolute": tmp_path / "secret.jsonl",
        "parent": "../secret.jsonl",
        "url": f"file://{tmp_path}/secret.jsonl",
        "link": "train-2.jsonl",
    }[place]
    if place == "link":
        Path("data/train-2.jsonl").symlink_to(tmp_path / "secret.jsonl")
    entry = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n"
    (Path("data") / "README.md").write_text(f"---\n{entry}---\n")
    assert prepare(*words, "--output=out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data: its file" in line
    assert "is outside of the directory" in line
    assert not list(Path().glob("*out*"))


def test_a_directory_does_not_name_files_of_the_web(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://example.com/a.jsonl"
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": [url]}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **k: builder)
    Path("data").mkdir()
    with pytest.raises(
        ConfigError, match=f"data: its README.md names {url}, but only files of the directory"
    ):
        hub_files("data", HubSplit())


def test_a_snapshot_of_the_cache_is_a_directory_with_its_own_files() -> None:
    """Its files are links to the blobs of the repository."""
    cache = Path("hub/datasets--org--name")
    (cache / "blobs").mkdir(parents=True)
    jsonl(Path("data"))
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(Path("data").iterdir())):
        file.rename(cache / "blobs" / f"{i:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040}")
    files, _ = hub_files(str(snapshot), HubSplit())
    assert [file.name for file in files] == ["train-0.jsonl", "train-1.jsonl"]
    assert files[0].read_text().count("\n") == 25


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
    commit = "0123abcd" * 5
    urls = [f"hf://datasets/org/name@{commit}/data/train-{i}[1].parquet" for i in (1, 0)]
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": urls}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **k: asked.append((a, k)) or builder)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or "/cache"
    )
    files, record = hub_files("org/name", HubSplit(config="en", revision="main"))
    assert record == {"path": "org/name", "config": "en", "split": "train", "revision": commit}
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
    names = ["00000.bin", "00000.idx"]
    assert filecmp.cmpfiles("a", "local", names, shallow=False) == (names, [], [])
    for folder, key in (("a", "hub"), ("b", "stream")):
        assert COMMIT in str(TokenShards(tmp_path / folder).prepared["input"][key])
    assert filecmp.cmp("b/00000.bin", "streamed/00000.bin", shallow=False)
    assert unknown.returncode == 2
    assert unknown.stderr.splitlines()[-1].startswith(
        "titanlite: hf:org/nope: Dataset 'org/nope' doesn't exist"
    )


@pytest.mark.full
def test_a_new_commit_on_a_server_like_the_hub(tmp_path: Path) -> None:
    """A stream that is killed after its first file continues with its commit through the real libraries,
    although the hub has a newer one; without the record it reads the newer one."""
    commits = {COMMIT: jsonl(Path("data"))}
    assert prepare("data/train-*", "--output=local") == 0
    words = ["--from-stream.name=huggingface", "--from-stream.path=org/name", "--tokenizer.name=bytes"]
    kill = "import os, sys; from titanlite.corpus import stream_files; stream_files.FILE_BYTES = 60\n"
    kill += "write = stream_files.write_atomically\n"
    kill += "stream_files.write_atomically = lambda *a: (write(*a), os.kill(os.getpid(), 9))\n"
    main = "import sys; from titanlite.corpus.prepare import main; sys.exit(main(sys.argv[1:]))"
    with serving(Path("data"), commits) as endpoint:
        variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}

        def run(code: str, output: str) -> int:
            command = [sys.executable, "-c", code, *words, f"--output={output}"]
            return subprocess.run(command, env=variables, capture_output=True).returncode

        assert run(kill + main, "out") == -9
        newer = jsonl(Path("newer"))
        (newer / "train-0.jsonl").write_text('{"text": "another text", "id": 0}\n' * 25)
        commits["b" * 40] = newer
        assert (run(main, "out"), run(main, "new")) == (0, 0)
    for output, commit in (("out", COMMIT), ("new", "b" * 40)):
        assert TokenShards(output).prepared["input"]["stream"]["revision"] == commit
    documents = [TokenShards(output) for output in ("out", "local", "new")]
    texts = [{bytes(d.document(i)[1:-1].tolist()) for i in range(d.num_documents)} for d in documents]
    assert texts[0] == texts[1] != texts[2]


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
    name = "hf:org/name" if kind == "files" else "command line, --from_stream.name: org/name"
    said = (
        "there is no such directory, and the hub cannot be reached or has no such dataset; check its name, "
        "the network (HF_ENDPOINT, a proxy), and HF_TOKEN if it is private"
    )
    assert lines == [f"titanlite: {name}: {said}"]
    assert not list(Path().glob("*out*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hf:"], "hf:: there is no such directory"),
        (["hf:./nowhere"], "hf:./nowhere: there is no such directory"),
        (["hf:a/b/c"], "hf:a/b/c: there is no such directory"),
        (["hf:data", "--revision=abc"], "--revision: hf:data is a directory, which has no revisions"),
        (
            ["--from-stream.name=huggingface", "--from-stream.path=data", "--from-stream.revision=abc"],
            "--from_stream.revision: data is a directory, which has no revisions; leave it out",
        ),
    ],
    ids=str,
)
def test_names_that_are_no_dataset(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(Path("data"))
    assert prepare(*words, "--output=out") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(Path().glob("*out*"))


def test_a_network_that_fails_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_files, "FILE_BYTES", 60)
    stream = HuggingFace(path=str(jsonl(Path("data"))))
    whole = fetch(stream, Path("whole"), "text").files
    rows = datasets.IterableDataset.iter

    def failing(self: Any, batch_size: int) -> Any:
        for i, row in enumerate(rows(self, batch_size)):
            if i == 30:
                raise OSError("connection reset")
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(datasets.IterableDataset, "iter", failing)
        with pytest.raises(ConfigError, match=r"data: connection reset \(after 30 documents\)"):
            fetch(stream, Path("out"), "text")
    parts = fetch(stream, Path("out"), "text").files
    assert [f.read_bytes() for f in parts] == [f.read_bytes() for f in whole]


@pytest.mark.parametrize(("make", "end"), [(webdataset, 12_900), (gzipped, -9)])
def test_a_damaged_file_of_a_stream_is_named(make: Callable[[Path], Path], end: int) -> None:
    """Of two files, the second is cut off; the libraries' own errors name none."""
    file = sorted(make(Path("data")).iterdir())[1]
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(file.resolve()))}: .*\(after \d+ documents\)"):
        fetch(HuggingFace(path="data"), Path("out"), "text")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf:data", "--split=tset"], "--split: hf:data has no split 'tset' (splits: test, train)"),
        (["hf:data", "--config=de"], "--config: hf:data has no configuration 'de' (configurations: default)"),
        (["hf:data", "--field=body"], ".jsonl:1: no field 'body' in this line"),
        (["hf:tars"], "hf:tars: its files are .tar, which only a stream reads"),
        (["data/train-0.jsonl", "--split=test"], "--split: applies to hf:NAME: no input is one"),
        (
            ["--from-stream.path=data", "--from-stream.split=tset"],
            "command line, --from_stream.split: data has no split 'tset'",
        ),
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
    assert not list(Path().glob("*out*"))
