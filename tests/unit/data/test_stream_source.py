"""Pins the source `stream`: Hugging Face datasets and WebDataset shards give the tokens of local files, also
after an interruption and in workers; bad input and unsupported settings are one line and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.examples.line_stream import LineStream
from tests.support.hub import serving
from tests.support.jobs import metrics_in, tiny_arguments
from tests.support.streams import state_of, steps, stream_loader, values, write_webdataset
from tests.support.tiers import full
from titanlite import cli
from titanlite.checkpoint.run_identity import check_identity
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.corpus.hub_stream import HuggingFace
from titanlite.data.dataset import Data
from titanlite.data.loader import LoaderLayout
from titanlite.data.stream_sequences import StreamSequences
from titanlite.data.stream_source import DocumentStream, Stream
from titanlite.data.text_sources import Text
from titanlite.tokenizers.bytes import Bytes

TEXTS = [f"document {i} " + "x" * (i * 7 % 23) for i in range(120)]
FILES = [TEXTS[:70], TEXTS[70:]]


@pytest.fixture(autouse=True)
def torchs_handler_goes() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@dataclass(frozen=True, kw_only=True)
class Values(DocumentStream):
    """A stream of the documents of a list; with `num_shards`, it says that it has shards."""

    name = "values"
    values: list[Any]
    num_shards: int = 0

    def build(self) -> Iterable[Any]:
        return Sharded(self.values, self.num_shards) if self.num_shards else self.values


class Sharded(list[Any]):
    def __init__(self, values: list[Any], num_shards: int):
        super().__init__(values)
        self.num_shards = num_shards


def jsonl(folder: Path) -> Path:
    folder.mkdir()
    for i, part in enumerate(FILES):
        lines = (json.dumps({"text": text, "id": i}) + "\n" for text in part)
        (folder / f"train-{i}.jsonl").write_text("".join(lines))
    return folder


def parquet(folder: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    for i, part in enumerate(FILES):
        pq.write_table(pa.table({"text": part}), folder / f"train-{i}.parquet", row_group_size=20)
    return folder


def webdataset(folder: Path) -> Path:
    return write_webdataset(folder, FILES)


@pytest.mark.parametrize(
    ("make", "ranks", "workers"),
    [
        (jsonl, 1, 0),
        (jsonl, 2, 0),
        full(jsonl, 1, 2),
        full(jsonl, 2, 2),
        full(parquet, 1, 0),
        full(parquet, 2, 2),
        full(webdataset, 1, 2),
        (webdataset, 2, 0),
    ],
)
def test_a_hugging_face_stream(
    tmp_path: Path, make: Callable[[Path], Path], ranks: int, workers: int
) -> None:
    """Two shares read a file each; one share, or four, read both in their order."""
    pytest.importorskip("datasets")
    source = Stream(stream=HuggingFace(path=str(make(tmp_path / "data"))))
    rank, two_shares = ranks - 1, ranks * max(workers, 1) == 2
    if two_shares and workers:
        expected = steps(stream_loader(Stream(stream=Values(values=FILES[0])), 1, 0), 60)
        batches = steps(stream_loader(source, ranks, workers, rank), 20)
        tokens = [values([batch])[0][0] for batch in batches[::2]]  # of the first worker
        assert tokens == [values([batch])[0][0] for batch in expected[: len(tokens)]]
    else:
        texts = FILES[rank] if two_shares else TEXTS
        layout = (1, 0, 0) if two_shares else (ranks, workers, rank)
        expected = steps(stream_loader(Stream(stream=Values(values=texts)), *layout), 60)
        batches = steps(stream_loader(source, ranks, workers, rank), 20)
        assert [v[:2] for v in values(batches)] == [v[:2] for v in values(expected)][: len(batches)]
    first = stream_loader(source, ranks, workers, rank)
    parts = steps(first, 3)
    second = stream_loader(source, ranks, workers, rank, state_of(first))
    parts += steps(second, 9)
    parts += steps(stream_loader(source, ranks, workers, rank, state_of(second)), 8)
    assert values(parts) == values(batches)


def test_what_changes_the_fingerprint(tmp_path: Path) -> None:
    lines = [
        Stream(stream=LineStream(path="a")),
        Stream(stream=LineStream(path="b")),
        Stream(stream=LineStream(path="a", max_documents=3)),
        Stream(stream=LineStream(path="a"), field="body"),
    ]
    assert len({source.fingerprint() for source in lines}) == 4
    assert lines[0].fingerprint() == Stream(stream=LineStream(path="a")).fingerprint()
    assert [source.label for source in lines[:2]] == ["stream a", "stream b"]


@dataclass(frozen=True, kw_only=True)
class Versions(LineStream):
    """A stream whose newest version is `new`."""

    revision: str = ""

    def pinned(self) -> Versions:
        return replace(self, revision="new")


@pytest.mark.parametrize(
    ("now", "before", "revision"),
    [
        ({}, None, "new"),
        ({}, {}, "old"),
        ({"revision": "main"}, {}, "new"),  # if it is not the old one, the resume is refused
        ({"max_documents": 3}, {}, "new"),
        ({}, {"revision": ""}, "new"),  # of a run that recorded none
    ],
)
def test_a_resumed_run_reads_the_version_of_its_start(
    now: dict[str, Any], before: dict[str, Any] | None, revision: str
) -> None:
    recorded = Stream(stream=Versions(**{"path": "a", "revision": "old"} | (before or {})))
    tree = toml.as_tree(recorded) if before is not None else {}
    source = Stream(stream=Versions(path="a", **now)).pinned(tree)
    assert getattr(source.stream, "revision", None) == revision
    assert source.label == f"stream a at {revision}"


def test_the_refusal_of_another_version_names_both() -> None:
    old, new = (Stream(stream=Versions(path="a", revision=name)) for name in ("old", "new"))
    theirs, ours = (
        {
            "data": {"streamed": True, "sources": {source.fingerprint(): 1000}},
            "names": {"tokenizer": "bytes", "sources": {source.fingerprint(): source.label}},
        }
        for source in (old, new)
    )
    assert check_identity(theirs, theirs, [], Path("run"), 8) == []
    message = r"differs: the run reads stream a at old, this job reads stream a at new\. Undo the change"
    with pytest.raises(ConfigError, match=message):
        check_identity(theirs, ours, [], Path("run"), 8)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"body": "b"}, r"the 1st has no 'text' \(it has: body\)"),
        ({"text": None}, "the 1st holds null under 'text', not text"),
        ({"text": 7}, "the 1st holds int under 'text', not text"),
        ("\ud800", "the 1st holds a lone surrogate, which is not text"),
    ],
)
def test_a_document_without_text(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        Stream(stream=LineStream(path="a")).text(document, "the 1st")
    assert e.value.key == "field"


@pytest.fixture
def refusal(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `titanlite` says when it refuses a job on a stream, in one line; nothing is written."""

    def run(*overrides: str, verb: tuple[str, ...] = ("train",), lines: str = "a line\n") -> str:
        (tmp_path / "lines.txt").write_text(lines)
        path, *arguments = tiny_arguments(tmp_path, corpus)
        stream = f"{{ name = 'lines', path = '{tmp_path}/lines.txt' }}"
        keys = [
            "--job.imports=['tests.examples.line_stream']",
            "--data.holdout_sequences=0",
            f"--data.sources=[{{ name = 'stream', stream = {stream} }}]",
        ]
        allow = [] if verb == ("train",) else ["--allow-imports"]
        capsys.readouterr()
        assert cli.run([*verb, path, *arguments, *keys, *overrides, *allow]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "run").exists()
        return line

    return run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--data.holdout_sequences=4", "--data.holdout_sequences: no sequences of a stream can be held out"),
        ("--data.skip_sequences=[[1, 2]]", "--data.skip_sequences: sequences of a stream cannot be skipped"),
        ("--data.packing=best_fit", '--data.packing: a stream is packed by "chunk"'),
        ("--guard.on_spike=rewind", '--guard.on_spike: "rewind" skips sequences, which a stream cannot'),
        ("--training.steps='2 epochs'", '--training.steps: "2 epochs": the length of an epoch'),
        (
            "--stages=[{ until = '0.5 epochs' }, { until = 'end' }]",
            '--stages.0.until: "0.5 epochs": the length of an epoch',
        ),
        (
            "--stages=[{ until = '8 sequences' }, { until = 'end', weights = [2] }]",
            "--stages.1.weights: a stream is the only source",
        ),
    ],
)
def test_what_a_stream_cannot_do(refusal: Callable[..., str], override: str, message: str) -> None:
    line = refusal(override)
    assert message in line
    assert "titanlite prepare, [from_stream]" in line


def test_the_epochs_of_a_stream_are_not_counted() -> None:
    with pytest.raises(ConfigError, match=r"the epochs of a stream are not counted; limit training\.steps"):
        Stream(stream=LineStream(path="a"), max_epochs=2)


def test_other_sources_beside_a_stream(refusal: Callable[..., str], corpus: Path) -> None:
    stream = "{ name = 'stream', stream = { name = 'lines', path = 'lines.txt' } }"
    other = f"{{ name = 'text', path = ['{corpus}/b.txt'] }}"
    mixed = refusal(f"--data.sources=[{other}, {stream}]")
    assert "--data.sources: a stream cannot be mixed with other sources" in mixed


def test_a_stream_to_validate_on_is_refused_before_anything_is_opened(corpus: Path) -> None:
    text, stream = Text(path=[str(corpus / "b.txt")]), Stream(stream=LineStream(path="a"))
    for training in (text, stream):
        with pytest.raises(
            ConfigError, match=r"only be trained on.*: titanlite prepare, \[from_stream\]"
        ) as e:
            Data(sources=[training], validation_sources=[text, stream])
        assert e.value.key == "validation_sources.1.name"


@pytest.mark.parametrize(
    ("lines", "message"),
    [(["", None, 7], None), ([None, 7], "document 0 of the stream holds null"), ([], "has no documents")],
)
def test_one_of_the_first_documents_must_have_text(lines: list[Any], message: str | None) -> None:
    data = Data(sources=[Stream(stream=Values(values=lines), bad_documents="skip")])
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        data.build(Bytes().build(), seq_len=16, seed=0)


@pytest.mark.parametrize(
    ("num_shards", "limit", "ranks", "workers", "said"),
    [
        (0, 0, 1, 0, "in its order, read by one loader; to resume, keep data-parallel ranks = 1, "),
        (0, 0, 2, 3, "each of 6 loaders reads all documents and uses every 6th; to resume"),
        (24, 0, 2, 3, "each of 6 loaders reads its own part of 24 shards; to resume"),
        (25, 0, 2, 3, "uses every 6th; its 25 shards do not divide evenly over them; to resume"),
        (24, 5, 2, 3, "uses every 6th; max_documents counts over all shards; to resume"),
    ],
)
def test_how_the_loaders_read_is_logged(
    num_shards: int, limit: int, ranks: int, workers: int, said: str
) -> None:
    stream = Values(values=["a"], num_shards=num_shards, max_documents=limit)
    sequences = Data(sources=[Stream(stream=stream)]).build(Bytes().build(), seq_len=16, seed=0)
    assert isinstance(sequences, StreamSequences)
    sequences.layout = LoaderLayout(ranks, workers, 1)
    (line,) = sequences.describe(0)
    assert said in line


@pytest.mark.parametrize("action", ["show", "plan"])
def test_data_show_and_plan(refusal: Callable[..., str], action: str) -> None:
    line = refusal(verb=("data", action))
    assert "the sequences of a stream cannot be looked up or counted before they are read" in line


def test_an_empty_stream(refusal: Callable[..., str]) -> None:
    assert "lines.txt: the stream has no documents" in refusal(lines="")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("path = 'DATA'", "field: document 0 of the stream has no 'body' (it has: text, id)"),
        ("path = 'DATA', split = 'tset'", "stream.split: DATA has no split 'tset' (splits: train)"),
        ("path = 'NONE'", "none: "),
    ],
)
def test_an_unusable_dataset(refusal: Callable[..., str], tmp_path: Path, options: str, message: str) -> None:
    pytest.importorskip("datasets")
    data = str(jsonl(tmp_path / "data"))
    options = options.replace("DATA", data).replace("NONE", str(tmp_path / "none"))
    stream = f"{{ name = 'huggingface', {options} }}"
    line = refusal(f"--data.sources=[{{ name = 'stream', field = 'body', stream = {stream} }}]")
    assert message.replace("DATA", data) in line


def test_an_unreachable_hub(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'org/name' on the Hub (ReadTimeout)\nmore")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    line = refusal(
        "--data.sources=[{ name = 'stream', stream = { name = 'huggingface', path = 'org/name' } }]"
    )
    place = "titanlite: command line, --data.sources.0.stream"
    assert line.startswith(f"{place}: org/name: there is no such directory, and the hub cannot be reached")


def start(
    folder: Path,
    corpus: Path,
    endpoint: str,
    options: str,
    *overrides: str,
    name: str = "run",
    ranks: int = 1,
) -> tuple[int, str]:
    """Train on a stream from a server like the hub, in new processes. Returns the exit code and the log."""
    stream = f"{{ name = 'huggingface', {options} }}"
    words = [
        *tiny_arguments(folder, corpus, name),
        f"--data.sources=[{{ name = 'stream', stream = {stream} }}]",
        "--data.holdout_sequences=0",
        *overrides,
    ]
    verb = ["train"] if ranks == 1 else ["launch", f"--nproc-per-node={ranks}"]
    result = subprocess.run(
        [sys.executable, "-m", "titanlite.cli", *verb, *words],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stderr


def losses(folder: Path) -> list[tuple[str, float]]:
    return [(row["data/batch_sha"], row["train/loss"]) for row in metrics_in(folder)]


@pytest.mark.full
def test_a_server_like_the_hub(tmp_path: Path, corpus: Path) -> None:
    """Runs on a dataset that is streamed from a server, with workers, equal one on local files."""
    pytest.importorskip("datasets")
    data = jsonl(tmp_path / "data")
    with serving(data) as endpoint:
        for name, path, steps in (("hub", "org/name", 3), ("hub", "org/name", 6), ("local", data, 6)):
            options = f"path = '{path}'", "--data.num_workers=2", f"--training.steps={steps}"
            code, log = start(tmp_path, corpus, endpoint, *options, name=name)
            assert code == 0, log
    assert losses(tmp_path / "hub") == losses(tmp_path / "local")


@pytest.mark.full
def test_a_run_keeps_the_commit_of_its_start(tmp_path: Path, corpus: Path) -> None:
    """Also on several ranks after a push to the dataset. A hub that cannot be reached ends a run that resumes
    with exit code 1, so that the launcher tries again; a new run with 2 (test_an_unreachable_hub)."""
    pytest.importorskip("datasets")
    old, new = "a" * 40, "b" * 40
    data, more = jsonl(tmp_path / "data"), tmp_path / "more"
    more.mkdir()
    (more / "train-0.jsonl").write_text(json.dumps({"text": "other text"}) * 9)
    commits = {old: data}
    with serving(data, commits) as endpoint:

        def run(options: str, steps: int, name: str = "run") -> tuple[int, str]:
            keys = "--data.num_workers=0", "--training.local_batch_size=2", f"--training.steps={steps}"
            return start(tmp_path, corpus, endpoint, options, *keys, name=name, ranks=2)

        code, log = run("path = 'org/name'", 3)
        assert code == 0, log
        assert f"stream org/name at {old}: in its order, each of 2 loaders" in log
        assert f'revision = "{old}"' in (tmp_path / "run/job.toml").read_text()
        commits[new] = more
        code, log = run("path = 'org/name'", 6)
        assert code == 0, log
        code, log = run(f"path = 'org/name', revision = '{old}'", 6, name="whole")
        assert code == 0, log
        assert losses(tmp_path / "run") == losses(tmp_path / "whole")
        code, log = run("path = 'org/name', revision = 'main'", 7)
        assert code == 2
        assert f"the run reads stream org/name at {old}, this job reads stream org/name at {new}. Undo" in log
    code, log = run("path = 'org/name'", 7)
    assert (code, "org/name: " in log) == (1, True), log
