"""A run on a stream that was stopped twice and resumed equals the run that was not, to the bit: losses,
sequences, weights and optimizer state, with and without loader workers, on one rank and on two. On another
layout it is refused by name, and nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.examples import line_stream
from tests.support.jobs import make_job, metrics_of
from tests.support.runs import CP, TP, assert_same, history, train_on_rank
from tests.support.tiers import full
from titanlite.checkpoint import commit
from titanlite.checkpoint.state import TrainState
from titanlite.config.component import ConfigError
from titanlite.data import stream_source
from titanlite.data.stream_batches import StreamedBatches
from titanlite.errors import LoaderError
from titanlite.job import Job
from titanlite.train import train

SOURCES = "--data.sources=[{{ name = 'stream', stream = {{ name = 'lines', path = '{path}' }} }}]"
TWO_MICRO_BATCHES = "--training.local_batch_size=2"  # per rank, on two ranks


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[str]:
    """The overrides of a job on the lines of the corpus, which 12 steps read more than once."""
    path = tmp_path_factory.mktemp("stream") / "lines.txt"
    lines = [json.loads(line)["text"] for line in (corpus / "a.jsonl").read_text().splitlines()]
    path.write_text("".join(f"{line[:30]}\n" for line in 2 * lines)[:-700])  # more than are tokenised at once
    return [
        "--job.imports=['tests.examples.line_stream']",
        SOURCES.format(path=path),
        "--data.holdout_sequences=0",
        f"--data.validation_sources=[{{ name = 'text', path = ['{corpus / 'b.txt'}'] }}]",
        "--validation.enable=true",
        "--validation.freq=6",
    ]


def run_to(
    run_on: Callable[..., Any],
    ranks: int,
    stops: list[int],
    folder: Path,
    corpus: Path,
    keys: list[str],
    name: str,
) -> Job:
    """Train to each of the steps in turn, each time with new processes, or in this one for one rank."""
    for steps in stops:
        arguments = folder, corpus, [*keys, f"--training.steps={steps}"], name, ranks
        train_on_rank(*arguments) if ranks == 1 else run_on(ranks, train_on_rank, *arguments)
    return make_job(folder, corpus, *keys, name=name, world_size=ranks)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ["--data.num_workers=0"]),
        full(1, ["--data.num_workers=2", TWO_MICRO_BATCHES]),
        full(2, ["--data.num_workers=0", TWO_MICRO_BATCHES]),
        full(2, ["--data.num_workers=2", TWO_MICRO_BATCHES, "--data.mask_documents=true"]),
        full(2, ["--data.num_workers=2", TP]),
        full(2, ["--data.num_workers=1", CP]),
        full(1, ["--checkpoint.async_mode=disabled", "--stages=[{ until = '40 sequences', seq_len = 16 }, "
                 "{ until = 'end', global_batch_size = 16, lr_factor = 0.5 }]"]),
    ],
    ids=str,
)  # fmt: skip
def test_stopped_twice_and_resumed(
    tmp_path: Path, corpus: Path, keys: list[str], run_on: Any, ranks: int, options: list[str]
) -> None:
    keys = [*keys, *options]
    whole = run_to(run_on, ranks, [12], tmp_path, corpus, keys, "whole")
    stopped = run_to(run_on, ranks, [5, 9, 12], tmp_path, corpus, keys, "stopped")
    assert_same(stopped, whole)
    assert metrics_of(whole)[-1]["progress/sequences"] > 12 * 4
    ends = [metrics_of(job)[-1]["eval/loss"] for job in (whole, stopped)]
    assert ends[0] == ends[1]


@pytest.mark.full
def test_control_without_its_state_the_run_is_another(
    tmp_path: Path, corpus: Path, keys: list[str], run_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_to(run_on, 1, [7], tmp_path, corpus, keys, "whole")
    run_to(run_on, 1, [5], tmp_path, corpus, keys, "stopped")
    opened = StreamedBatches._open
    monkeypatch.setattr(StreamedBatches, "_open", lambda self, *share: opened(self, *share[:2], {}))
    stopped = run_to(run_on, 1, [7], tmp_path, corpus, keys, "stopped")
    assert history(stopped)[:5] == history(whole)[:5]
    assert all(a != b for a, b in zip(history(stopped)[5:], history(whole)[5:], strict=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path, keys: list[str]) -> Path:
    """A folder with a run of 4 steps on one rank without workers."""
    folder = tmp_path_factory.mktemp("run")
    train_on_rank(folder, corpus, [*keys, "--training.steps=4"], "run", 1)
    return folder


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("--data.num_workers=2", "data.num_workers 0 -> 2"),
        (TWO_MICRO_BATCHES, "training.local_batch_size 4 -> 2"),
    ],
)
def test_another_layout_is_refused(
    run: Path, corpus: Path, keys: list[str], option: str, change: str
) -> None:
    before = contents(run)
    with pytest.raises(
        ConfigError, match=f"continues only on the layout .*: {change}. Undo .*titanlite prepare"
    ):
        train(make_job(run, corpus, *keys, option))
    assert contents(run) == before


@pytest.mark.full
def test_other_ranks_are_refused(run: Path, corpus: Path, keys: list[str], run_on: Any) -> None:
    before = contents(run)
    texts = run_on(2, refusal_on_rank, run, corpus, keys)
    assert ["on which it began: data-parallel ranks 1 -> 2. Undo" in text for text in texts] == [True, True]
    assert contents(run) == before


def refusal_on_rank(folder: Path, corpus: Path, keys: list[str]) -> str:
    with pytest.raises(ConfigError) as e:
        train_on_rank(folder, corpus, keys, "run", 2)
    return str(e.value)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run, without the lock, which any start takes."""
    files = (file for file in (folder / "run").rglob("*") if file.is_file() and file.name != "LOCK")
    return {str(file): file.read_bytes() for file in files}


def test_a_changed_stream_is_refused(run: Path, corpus: Path, keys: list[str]) -> None:
    limit = SOURCES.replace("' }} }}]", "', max_documents = 3 }} }}]")
    path = re.search(r"path = '([^']+)'", keys[1])
    with pytest.raises(ConfigError, match=r"the sequences of stream .*lines\.txt have changed") as e:
        train(make_job(run, corpus, *keys, limit.format(path=path[1])))
    assert "stages" not in str(e.value)


@pytest.mark.full
def test_damage_of_the_state_is_found(tmp_path: Path, corpus: Path, keys: list[str]) -> None:
    """The state is in train.json, whose hash the manifest has: the checkpoint before is used."""
    train_on_rank(tmp_path, corpus, [*keys, "--training.steps=8"], "run", 1)
    file = tmp_path / "run/checkpoint/step-8/train.json"
    assert "train.json" in commit.read_manifest(file.parent)["files"]
    text = file.read_text()
    assert text.count('"returned": 16') == 1
    file.write_text(text.replace('"returned": 16', '"returned": 14'))
    job = make_job(tmp_path, corpus, *keys, "--training.steps=9")
    train(job)
    assert [row["step"] for row in metrics_of(job)] == list(range(1, 10))
    assert any("step-8" in path.name and path.name != "step-8" for path in file.parents[1].iterdir())


def test_missing_state_is_an_error(
    tmp_path: Path, corpus: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_json = TrainState.as_json
    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "as_json", lambda s: {k: v for k, v in as_json(s).items() if k != "stream"})
        train_on_rank(tmp_path, corpus, [*keys, "--training.steps=2"], "run", 1)
    with pytest.raises(ConfigError, match="the checkpoint of step 2 has no state of the stream"):
        train_on_rank(tmp_path, corpus, [*keys, "--training.steps=3"], "run", 1)


@pytest.mark.parametrize(
    ("error", "raised"), [(ConfigError("no text"), ConfigError), full(OSError("no network"), LoaderError)]
)
def test_the_finished_steps_are_saved_if_the_stream_ends_the_run(
    tmp_path: Path, corpus: Path, keys: list[str], monkeypatch: Any, error: Exception, raised: type
) -> None:
    """Also by a bad document, which the same command meets again: bad_documents = "skip" then continues."""
    text_of, read = stream_source.text_of, list[str]()

    def text(document: Any, *place: Any) -> Any:
        read.append(document)
        if len(read) == 90 and raised is ConfigError:
            raise error
        return text_of(document, *place)

    def lines(self: Any) -> Any:
        for i, line in enumerate(iterate(self)):
            if i == 89 and raised is LoaderError:
                raise error
            yield line

    iterate = line_stream.Lines.__iter__
    monkeypatch.setattr(stream_source, "text_of", text)
    monkeypatch.setattr(line_stream.Lines, "__iter__", lines)
    job = make_job(tmp_path, corpus, *keys, "--training.steps=12", "--data.num_workers=0")
    with pytest.raises(raised, match=r"no (text|network)"):
        train(job)
    saved = {int(path.name.removeprefix("step-")) for path in (job.folder / "checkpoint").glob("step-*")}
    assert max(saved) == metrics_of(job)[-1]["step"] == 7


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("", "text", r"stream .*empty\.txt: the stream has no documents"),
        (None, "text", r"No such file or directory: '.*empty\.txt'"),
    ],
)
def test_an_unusable_stream_leaves_nothing(
    tmp_path: Path, corpus: Path, keys: list[str], capsys: Any, text: str | None, field: str, message: str
) -> None:
    path = tmp_path / "empty.txt"
    if text is not None:
        path.write_text(text)
    job = make_job(tmp_path, corpus, *keys, SOURCES.format(path=path))
    with pytest.raises(ConfigError, match=message):
        train(job)
    assert not job.folder.exists()
