"""Pins preparation: the bytes of a dataset depend on the corpus and the options alone, not on processes,
workers or interruptions; a run killed at any moment goes on without doing done work again; an edited file is
read again; what went wrong is named, and never leaves a dataset; the report adds up."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import ranks
from tests.support.killed_tokenizer import Killed
from titanlite.config.component import ConfigError
from titanlite.corpus import pipeline
from titanlite.corpus.filters import ExactDuplicates, Length, NearDuplicates
from titanlite.corpus.pipeline import prepare, work_folder
from titanlite.corpus.stages import JobState, PrepareOptions
from titanlite.data import text_files, tokenize_files
from titanlite.data.shards import TokenShards
from titanlite.data.text_formats import find_files
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.tiktoken import Tiktoken

OPTIONS = PrepareOptions(
    filters=(Length(min_words=3), ExactDuplicates(), NearDuplicates(num_bands=4, band_size=4))
)
SMALL = {"SPLIT_BYTES": 1500, "SHARD_BYTES": 6000}


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 20 splits in some 6 shards; workers are handed the plan."""
    monkeypatch.setattr(text_files, "SPLIT_BYTES", SMALL["SPLIT_BYTES"])
    monkeypatch.setattr(tokenize_files, "SHARD_BYTES", SMALL["SHARD_BYTES"])


def write_corpus(folder: Path) -> Path:
    """Lines, compressed lines, parquet and text, with duplicates across files and documents too short."""
    import pyarrow as pa
    from pyarrow import parquet

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(300)]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 40))) for _ in range(200)]
    texts += rng.choices(texts, k=40)
    rng.shuffle(texts)
    lines = [json.dumps({"text": t}) + "\n" for t in texts]
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(lines[:80]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[80:180]).encode(), mtime=0))
    table = pa.table({"text": texts[180:220]})
    parquet.write_table(table, folder / "c.parquet", row_group_size=10)
    for i, text in enumerate(texts[220:]):
        (folder / f"d{i:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("raw") / "in")


def share(raw: Path, output: Path, chosen: PrepareOptions = OPTIONS, **options: Any) -> TokenShards | None:
    return prepare(find_files([str(raw)], "input"), output, Bytes().build(), chosen, **options)


def make(raw: Path, output: Path, chosen: PrepareOptions = OPTIONS, num_processes: int = 1) -> TokenShards:
    """By one worker, which completes the dataset."""
    made = share(raw, output, chosen, num_processes=num_processes)
    assert made is not None
    return made


def content(output: Path) -> dict[str, str]:
    """Every file's hash."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in output.iterdir()}


@pytest.fixture(scope="module")
def reference(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one process makes of the corpus in one go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "SPLIT_BYTES", SMALL["SPLIT_BYTES"])
        patch.setattr(tokenize_files, "SHARD_BYTES", SMALL["SHARD_BYTES"])
        output = tmp_path_factory.mktemp("reference") / "out"
        make(raw, output)
    made = content(output)
    assert len(made) > 10  # several shards, or the tests below would show little
    return made


def texts_of(shards: TokenShards) -> list[str]:
    return [bytes(shards.document(i)[1:-1].tolist()).decode() for i in range(shards.num_documents)]


# ---- the same bytes


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_number_of_processes_does_not_matter(
    raw: Path, reference: dict[str, str], tmp_path: Path, processes: int
) -> None:
    make(raw, tmp_path / "out", num_processes=processes)
    assert content(tmp_path / "out") == reference
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.full
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [2, 0, 1], [3, 1, 4, 0, 2]], ids=str)
def test_the_number_of_workers_does_not_matter(
    raw: Path, reference: dict[str, str], tmp_path: Path, order: list[int]
) -> None:
    """One after the other, in any order: each but the last leaves the dataset to be completed."""
    for i in order:
        made = share(raw, tmp_path / "out", num_processes=1, worker=(i, len(order)))
        assert (made is not None) == (tmp_path / "out").exists() == (i == order[-1])
    assert content(tmp_path / "out") == reference


def drive(raw: Path, output: Path, processes: int = 1, workers: int = 1, moment: str = "never") -> None:
    """In a process of its own: prepares the worker that is its rank's, and may kill itself at the n-th call
    of a function."""
    text_files.SPLIT_BYTES, tokenize_files.SHARD_BYTES = SMALL["SPLIT_BYTES"], SMALL["SHARD_BYTES"]
    if moment != "never":
        name, _, number = moment.partition(":")
        owner = {"rename": os, "replace": os, "unlink": Path}.get(name, JobState)
        original, calls = getattr(owner, name), itertools.count(1)

        def dying(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, dying)
    worker = (dist.get_rank() if workers > 1 else 0, workers)
    share(raw, output, num_processes=processes, worker=worker)


def prepare_until_killed(raw: Path, output: Path, moment: str) -> None:
    with pytest.raises(AssertionError, match=f"rank 0 died with exit code {-signal.SIGKILL}"):
        ranks.run(1, drive, raw, output, 1, 1, moment)


@pytest.mark.full
def test_workers_at_the_same_time(
    raw: Path, reference: dict[str, str], tmp_path: Path, run_on: Callable[..., list[Any]]
) -> None:
    run_on(3, drive, raw, tmp_path / "out", 1, 3)
    assert content(tmp_path / "out") == reference


# ---- killed and continued

MOMENTS = ["encode:7"]
MOMENTS_FULL = ["mark:9", "rename:1", "assemble:2", "replace:30", "mark:1", "encode:1", "mark:24", "mark:40"]


@pytest.mark.parametrize(
    "moment", [*MOMENTS, *(pytest.param(moment, marks=pytest.mark.full) for moment in MOMENTS_FULL)]
)
def test_killed_at_any_moment_it_goes_on(
    raw: Path, reference: dict[str, str], tmp_path: Path, moment: str
) -> None:
    prepare_until_killed(raw, tmp_path / "out", moment)
    assert not (tmp_path / "out").exists()
    make(raw, tmp_path / "out")
    assert content(tmp_path / "out") == reference
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.full
def test_killed_while_it_cleans_up(raw: Path, reference: dict[str, str], tmp_path: Path) -> None:
    """From the mark that all is whole until the name is given, only files that are no longer needed go."""
    prepare_until_killed(raw, tmp_path / "out", "unlink:200")
    make(raw, tmp_path / "out")
    assert content(tmp_path / "out") == reference


def counted(monkeypatch: pytest.MonkeyPatch, *functions: str) -> Counter:
    """How often each stage runs from now on, in this process."""
    calls: Counter = Counter()

    def count(name: str) -> Callable[..., Any]:
        original = getattr(JobState, name)

        def function(*args: Any) -> Any:
            calls[name] += 1
            return original(*args)

        return function

    for name in functions:
        monkeypatch.setattr(JobState, name, count(name))
    return calls


def test_done_work_is_not_done_again(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_until_killed(raw, tmp_path / "out", "encode:8")
    calls = counted(monkeypatch, "scan", "resolve", "encode")
    make(raw, tmp_path / "whole")
    whole = dict(calls)
    calls.clear()
    make(raw, tmp_path / "out")
    assert (calls["scan"], calls["resolve"]) == (0, 0)
    assert calls["encode"] == whole["encode"] - 7
    assert whole["scan"] == whole["encode"] >= 15


@pytest.mark.full
def test_a_killed_run_leaves_no_processes(raw: Path, tmp_path: Path) -> None:
    """Its workers end with it, in the middle of whatever they do."""
    running = ranks.Ranks(1, drive_in_a_session, raw, tmp_path / "out")
    (process,) = running.processes
    deadline = time.monotonic() + 300
    while (alone := len(session_of(process.pid)) <= 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert running.exits() == [-signal.SIGKILL]
    assert not alone, "it had no workers"
    while (left := session_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def drive_in_a_session(raw: Path, output: Path) -> None:
    os.setsid()
    drive(raw, output, processes=2)


def session_of(leader: int | None) -> list[int]:
    """Processes of a session that have not ended."""
    result = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            result += [int(path.parent.name)] if int(session) == leader and state != "Z" else []
    return result


@pytest.mark.full
def test_a_killed_worker_ends_the_run_with_a_reason(raw: Path, tmp_path: Path) -> None:
    files, folder = find_files([str(raw)], "input"), tmp_path / "killed"
    with pytest.raises(RuntimeError, match=r"killed, perhaps because memory ran out; run it again"):
        prepare(files, folder, Killed().build(), OPTIONS, num_processes=2)
    assert not folder.exists()


# ---- input that changes, or is wrong


@pytest.mark.full
def test_an_edited_file_costs_only_its_own_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, options = write_corpus(tmp_path / "in"), PrepareOptions(filters=(Length(min_words=3),))
    calls = counted(monkeypatch, "encode")
    make(raw, tmp_path / "old", options)
    splits = calls["encode"]
    calls.clear()
    with monkeypatch.context() as patch:  # everything but the assembly of shards
        patch.setattr(JobState, "assemble", lambda self, s: 1 / 0)
        patch.setattr(tokenize_files, "SHARD_BYTES", 1 << 30)
        with pytest.raises(ZeroDivisionError):
            make(raw, tmp_path / "out", options)
        assert calls["encode"] == splits
    lines = (raw / "a.jsonl").read_text().splitlines(keepends=True)
    (raw / "a.jsonl").write_text("".join(lines[:-1]) + json.dumps({"text": "quite another last line"}) + "\n")
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_files, "SHARD_BYTES", 1 << 30)
        made = make(raw, tmp_path / "out", options)
        assert "quite another last line" in texts_of(made)
        assert 0 < calls["encode"] < splits  # those of a.jsonl
        fresh = make(raw, tmp_path / "fresh", options)
        assert fresh.fingerprint == made.fingerprint


@pytest.mark.full
def test_a_broken_line_stops_and_once_mended_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write_corpus(tmp_path / "in")
    good = (raw / "a.jsonl").read_text()
    last = raw / "z.jsonl"  # the last in order: one process has done the other files before it
    last.write_text(good + '{"text": "cut')
    for processes in (1, 2):  # from a worker process, too
        with pytest.raises(ConfigError, match=r"z\.jsonl:81: not valid JSON"):
            make(raw, tmp_path / "out", num_processes=processes)
    assert not (tmp_path / "out").exists()
    last.write_text(good)
    calls = counted(monkeypatch, "scan")
    made = make(raw, tmp_path / "out")
    again = calls["scan"]
    fresh = make(raw, tmp_path / "fresh")
    assert made.fingerprint == fresh.fingerprint
    assert again < calls["scan"] - again


@pytest.mark.full
def test_bad_lines_are_skipped_and_counted_if_asked_for(tmp_path: Path) -> None:
    raw = write_corpus(tmp_path / "in")
    before = make(raw, tmp_path / "before")
    (raw / "a.jsonl").write_text('{"text": 3}\n' + (raw / "a.jsonl").read_text() + "{\n[]\n")
    options = replace(OPTIONS, bad_lines="skip")
    for processes in (1, 2):
        made = make(raw, tmp_path / f"out{processes}", options, num_processes=processes)
        assert sorted(texts_of(made)) == sorted(texts_of(before))
        report = json.loads((made.path / "report.json").read_text())
        assert report["bad_lines"]["documents"] == 3
        samples = [f"{s['where']}: {s['reason']}" for s in report["bad_lines"]["samples"]]
        assert any("a.jsonl:1: field 'text' is not a string" in s for s in samples)


def test_a_damaged_archive_is_an_error_even_where_bad_lines_are_skipped(tmp_path: Path) -> None:
    raw = write_corpus(tmp_path / "in")
    (raw / "b.jsonl.gz").write_bytes((raw / "b.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz: cut off"):
        make(raw, tmp_path / "out", replace(OPTIONS, bad_lines="skip"))


def test_an_id_outside_the_vocabulary_is_named(raw: Path, tmp_path: Path) -> None:
    tokenizer = Bytes().build()
    tokenizer.vocab_size = 120
    with pytest.raises(ConfigError, match=r"in/\S+: (row \d+: )?token id 257 >= vocab_size 120"):
        prepare(find_files([str(raw)], "input"), tmp_path / "out", tokenizer, OPTIONS, num_processes=1)
    assert not (tmp_path / "out").exists()


def test_another_cut_into_workers_at_the_same_time_is_refused(raw: Path, tmp_path: Path) -> None:
    folder = work_folder(tmp_path / "out")
    folder.mkdir()
    with (
        pipeline.locked(folder, tmp_path / "out", (0, 2)),
        pytest.raises(ConfigError, match="a preparation by 2 workers is running"),
    ):
        make(raw, tmp_path / "out")
    assert make(raw, tmp_path / "out", num_processes=1) is not None  # nobody works on it any more


def test_workers_of_other_files_at_the_same_time_are_refused(tmp_path: Path) -> None:
    """They would mix: a split's number means another split."""
    raw = write_corpus(tmp_path / "in")
    folder = work_folder(tmp_path / "out")
    folder.mkdir()
    share(raw, tmp_path / "out", num_processes=1, worker=(0, 3))
    with pipeline.locked(folder, tmp_path / "out", (0, 3)):
        (raw / "0.txt").write_text("one more file at the same time")
        with pytest.raises(ConfigError, match="another worker is preparing it from other files"):
            share(raw, tmp_path / "out", num_processes=1, worker=(1, 3))
    for i in range(3):  # nobody works on it any more
        made = share(raw, tmp_path / "out", num_processes=1, worker=(i, 3))
    fresh = make(raw, tmp_path / "fresh")
    assert made.fingerprint == fresh.fingerprint


def test_an_old_marker_does_not_vouch_for_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of options in turn in one folder, the second killed between a split's files and its marker."""
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": f"right {i}", "body": f"wrong {i}"}) + "\n" for i in range(50)]
    (tmp_path / "in" / "a.jsonl").write_text("".join(lines))
    with monkeypatch.context() as patch:
        patch.setattr(JobState, "assemble", lambda self, s: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(tmp_path / "in", tmp_path / "out", PrepareOptions())
    mark = JobState.mark
    with monkeypatch.context() as patch:
        patch.setattr(
            JobState, "mark", lambda self, name, *a: 1 / 0 if "split" in name else mark(self, name, *a)
        )
        with pytest.raises(ZeroDivisionError):
            make(tmp_path / "in", tmp_path / "out", PrepareOptions(field="body"))
    made = make(tmp_path / "in", tmp_path / "out", PrepareOptions())
    assert all(text.startswith("right") for text in texts_of(made))


def test_a_file_edited_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_corpus(tmp_path / "in")
    encode = JobState.encode

    def edited(self: JobState, u: int) -> Any:
        with open(raw / "a.jsonl", "a") as f:
            f.write('{"text": "appended later"}\n')
        return encode(self, u)

    with monkeypatch.context() as patch:
        patch.setattr(JobState, "encode", edited)
        with pytest.raises(ConfigError, match=r"a\.jsonl: changed while it was being prepared"):
            make(raw, tmp_path / "out", PrepareOptions())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("before", [1, 2])
def test_other_documents_than_those_scanned_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """In a file of the same size and time: nothing else tells it from the one that was scanned."""
    file, encode = tmp_path / "a.jsonl", JobState.encode
    line = json.dumps({"text": "some words of a document"})
    contents = [f"{line.ljust(2 * len(line) + 1)}\n", f"{line}\n{line}\n"]  # one document, or two
    file.write_text(contents[before - 1])
    times = file.stat()

    def replaced(self: JobState, u: int) -> Any:
        file.write_text(contents[before % 2])
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return encode(self, u)

    monkeypatch.setattr(text_files, "SPLIT_BYTES", 1 << 20)
    monkeypatch.setattr(JobState, "encode", replaced)
    with pytest.raises(ConfigError, match=r"a\.jsonl: its documents changed since they were scanned"):
        make(file, tmp_path / "out")


# ---- what is made


def test_documents_are_shuffled_with_the_seed(raw: Path, tmp_path: Path) -> None:
    plain = PrepareOptions()
    made = [make(raw, tmp_path / str(s), replace(plain, seed=s), num_processes=1) for s in (0, 1)]
    first, second = map(texts_of, made)
    assert first != second
    assert sorted(first) == sorted(second)
    assert len(first) == 240
    in_order = [d.text for d in text_files.documents(find_files([str(raw)], "input"), "text")]
    assert sorted(in_order) == sorted(first)
    neighbours = set(pairwise(in_order))
    assert sum(pair in neighbours for pair in pairwise(first)) < 30  # of 239


def test_the_report_adds_up(raw: Path, tmp_path: Path) -> None:
    made = make(raw, tmp_path / "out")
    report = json.loads((made.path / "report.json").read_text())
    assert report["read"]["documents"] == 240
    for split in ("documents", "characters"):
        removed = sum(f[split] for f in report["filters"])
        assert report["read"][split] == removed + report["kept"][split]
    assert (report["kept"]["documents"], report["kept"]["tokens"]) == (made.num_documents, made.num_tokens)
    assert sum(map(len, texts_of(made))) == report["kept"]["characters"]
    names = [f["name"] for f in report["filters"]]
    assert names == ["length", "exact_duplicates", "near_duplicates"]
    for f in report["filters"][:2]:
        assert f["documents"] > 5
        assert 0 < len(f["samples"]) <= 5
    short, duplicate = (f["samples"][0] for f in report["filters"][:2])
    assert "words, fewer than 3" in short["reason"]
    assert duplicate["reason"].startswith("duplicate of ")
    kept = texts_of(made)
    assert len(kept) == len(set(kept))
    assert all(len(text.split()) >= 3 for text in kept)


def test_of_duplicates_the_first_in_the_corpus_stays(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        text = json.dumps({"text": "the same words again"})
        (tmp_path / "in" / f"{name}.jsonl").write_text(f"{text}\n" * 40)
    made = make(
        tmp_path / "in", tmp_path / "out", PrepareOptions(filters=(ExactDuplicates(),)), num_processes=1
    )
    assert texts_of(made) == ["the same words again"]
    (entry,) = json.loads((made.path / "report.json").read_text())["filters"]
    assert entry["documents"] == 119
    assert all(s["reason"].endswith("a.jsonl:1") for s in entry["samples"])


def test_filters_run_in_their_order(tmp_path: Path) -> None:
    """A document that an earlier filter removed is no original for a later one."""
    (tmp_path / "in").mkdir()
    lines = ["one two", "one two", "three four five", "three four five"]
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    for filters, counts in (
        ((Length(min_words=3), ExactDuplicates()), [2, 1]),
        ((ExactDuplicates(), Length(min_words=3)), [2, 1]),
    ):
        output = tmp_path / filters[0].name
        made = make(tmp_path / "in", output, PrepareOptions(filters=filters))
        assert texts_of(made) == ["three four five"]
        report = json.loads((output / "report.json").read_text())
        assert [f["documents"] for f in report["filters"]] == counts


def test_filters_that_remove_everything(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)empty.*the filters removed all.*length"):
        make(raw, tmp_path / "out", PrepareOptions(filters=(Length(min_words=1000),)))
    assert not (tmp_path / "out").exists()


def test_a_dataset_says_what_it_was_made_of(raw: Path, tmp_path: Path) -> None:
    path = str(Path(__file__).resolve().parents[3] / "assets/tokenizer/stdlib.tiktoken")
    tokenizer = Tiktoken(path=path).build()
    made = prepare(find_files([str(raw)], "input"), tmp_path / "out", tokenizer, OPTIONS, num_processes=1)
    description = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert description["prepared"]["filters"][0]["name"] == "length"
    assert description["prepared"]["tokenizer"]["path"] == path
    assert (description["vocab_size"], description["dtype"]) == (8192, "uint16")
    made.verify()
