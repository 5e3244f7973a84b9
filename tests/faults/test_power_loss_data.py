"""Power loss while a dataset, a packing plan or an export is made, by replay: the result is absent or
complete, and making it again gives the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.datasets import write_dataset
from tests.support.file_operations import Recording, recorded
from tests.support.jobs import make_job, write_corpus
from tests.support.power_loss import check_all, crashes, tree_of, without_syncs
from titanlite.corpus import pipeline, stages
from titanlite.corpus.filters import ExactDuplicates, Length
from titanlite.corpus.pipeline import prepare
from titanlite.corpus.stages import PrepareOptions
from titanlite.data import text_files as corpora
from titanlite.data import tokenize_files
from titanlite.data.packing_index import PackingIndex, open_packing_index
from titanlite.data.shards import TokenShards
from titanlite.data.text_formats import find_files
from titanlite.data.text_sources import Text
from titanlite.log import logger
from titanlite.tokenizers.bytes import Bytes
from titanlite.tools import export
from titanlite.train import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="holds files by O_PATH")
OPTIONS = PrepareOptions(filters=(Length(min_words=3), ExactDuplicates()))
OTHER_OPTIONS = PrepareOptions(filters=(Length(min_words=9), ExactDuplicates()))
SAMPLE = pytest.mark.parametrize("most", [60, pytest.param(2000, marks=pytest.mark.full)])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few units and shards, made by a thread, without logs and without waiting for the disk."""
    monkeypatch.setattr(pipeline, "num_cores", lambda: 1)
    monkeypatch.setattr(tokenize_files, "num_cores", lambda: 1)
    monkeypatch.setattr(corpora, "SPLIT_BYTES", 1200)
    monkeypatch.setattr(tokenize_files, "SHARD_BYTES", 2500)
    monkeypatch.setattr(logger, "disabled", True)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines with duplicates and with documents that are too short."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("raw")
    texts = [" ".join(rng.choices(["one", "two", "three", "four"], k=rng.randint(1, 30))) for _ in range(40)]
    texts += texts[:5]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def make(raw: Path, output: Path, options: PrepareOptions = OPTIONS) -> None:
    prepare(find_files([str(raw)], "input"), output, Bytes().build(), options)


@pytest.fixture
def reference(raw: Path, tmp_path: Path) -> Callable[[PrepareOptions], dict[str, Any]]:
    """The dataset of an uninterrupted preparation."""

    def get(options: PrepareOptions) -> dict[str, Any]:
        output = tmp_path / f"reference{options.seed}"
        make(raw, output, options)
        return tree_of(output)

    return get


# ---- datasets


def check_dataset(
    recording: Recording, folder: Path, output: str, again: Callable[[Path], None], most: int, whole: Any
) -> None:
    """The dataset at `output` is absent or complete, and complete once it is marked as made. Made `again`, it
    is the same, and nothing is left over."""

    def look(place: Path, mark: str) -> bool:
        there = (place / output).exists()
        if there:
            TokenShards(place / output).verify()
        assert there or mark != "made"
        return there

    def start(place: Path, there: bool) -> None:
        again(place)
        tree = tree_of((place / output).parent)
        name = Path(output).name
        tree.pop(f"{name}/whole.json" if there else "", None)  # harmless: nothing reads it there
        assert tree == {name: None, **{f"{name}/{file}": data for file, data in whole.items()}}

    count, starts = check_all(crashes(recording, samples=2), folder, look, start, most, all_contents=True)
    assert (count > 100, starts > 10) == (True, True), f"{count} states, {starts} of them started from"


@SAMPLE
def test_prepare(raw: Path, tmp_path: Path, most: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with recorded(root) as recording:
        make(raw, root / "new/out")
        recording.mark("made")
    assert recording.coarse == 0
    whole = tree_of(root / "new/out")
    assert len(whole) == 2 + 2 * 2  # two shards
    check_dataset(recording, tmp_path, "new/out", lambda place: make(raw, place / "new/out"), most, whole)


class Stop(Exception):
    """The preparation is killed."""


def stop(*_: Any) -> None:
    raise Stop


@pytest.mark.full
@SAMPLE
def test_prepare_over_the_work_for_other_options(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Its markers must not vouch for the new files, nor the new ones for its files: after a power loss the
    work for the other options is continued."""
    root = tmp_path / "root"
    root.mkdir()
    make(raw, tmp_path / "whole", OTHER_OPTIONS)
    for options, moment in ((OTHER_OPTIONS, "assemble"), (OPTIONS, "_delete")):
        with monkeypatch.context() as patch, recorded(root) as recording:
            patch.setattr(stages.JobState, moment, stop)
            with pytest.raises(Stop):
                make(raw, root / "out", options)
    whole = tree_of(tmp_path / "whole")
    check_dataset(
        recording, tmp_path, "out", lambda place: make(raw, place / "out", OTHER_OPTIONS), most, whole
    )


def test_the_cache_of_a_text_source(raw: Path, tmp_path: Path) -> None:
    source, root = Text(path=[str(raw / "a.jsonl")]), tmp_path / "root"
    root.mkdir()
    with recorded(root) as recording:
        output = source.build(Bytes().build(), root / "cache").path
        recording.mark("made")
    whole, name = tree_of(output), str(output.relative_to(root))

    def again(place: Path) -> None:
        source.build(Bytes().build(), place / "cache")
        for leftover in (place / "cache").glob(".unfinished-*"):  # otherwise deleted after a day
            shutil.rmtree(leftover)

    check_dataset(recording, tmp_path, name, again, 20, whole)


@pytest.mark.full
def test_control_a_marker_before_its_files_is_found(raw: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with recorded(root) as recording:
        make(raw, root / "new/out")

    def again(place: Path) -> None:
        make(raw, place / "new/out")

    early = without_syncs(recording, lambda path: path.endswith("/.partial-out"))
    with pytest.raises(FileNotFoundError):
        check_dataset(early, tmp_path, "new/out", again, 200, tree_of(root / "new/out"))


# ---- a packing index


@pytest.mark.parametrize("damaged", [False, True], ids=["new", "in the place of a damaged one"])
def test_a_packing_index(tmp_path: Path, damaged: bool) -> None:
    """Files that a killed process left are deleted after a day, because another process may be writing
    them."""
    shards = write_dataset(tmp_path / "data", [[5] * n for n in (3, 40, 7, 70, 20, 1)])
    root = tmp_path / "root"
    root.mkdir()
    whole = tree_of(open_packing_index(shards, 33, tmp_path / "whole").path)
    if damaged:
        file = open_packing_index(shards, 33, root / "cache").path / "rows.bin"
        file.write_bytes(file.read_bytes()[:-1])
    with recorded(root) as recording:
        name = open_packing_index(shards, 33, root / "cache").path.name
        recording.mark("made")
    assert recording.coarse == 0

    def look(place: Path, mark: str | None) -> bool:
        path = place / "cache" / name
        if path.exists() and not damaged:  # a damaged one may come back, with less in it: it is hashed
            PackingIndex(path)
        return path.exists()

    def start(place: Path, there: bool) -> None:
        open_packing_index(shards, 33, place / "cache")
        assert tree_of(place / "cache" / name) == whole
        others = {path.name for path in (place / "cache").iterdir()} - {name}
        assert all(other.startswith(f".unfinished-{name}-") for other in others)

    count, starts = check_all(crashes(recording), tmp_path, look, start)
    assert (count > 30, starts > 3) == (True, True), f"{count} states, {starts} of them started from"


# ---- exports


def same(ours: Path, theirs: Path) -> bool:
    return tree_of(ours) == tree_of(theirs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a corpus and of an uninterrupted run of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus").mkdir()
    write_corpus(folder / "corpus")
    train(job_in(folder, folder))
    assert {path.name for path in (folder / "run/checkpoint").iterdir()} == {"step-3", "step-4"}
    return folder


def job_in(folder: Path, trained: Path) -> Any:
    every = [
        "--checkpoint.interval=1",
        "--training.steps=4",
        "--checkpoint.keep_latest_k=2",
        "--training.local_batch_size=8",
    ]
    return make_job(folder, trained / "corpus", *every)


@pytest.mark.full
def test_the_export_verb(trained: Path, tmp_path: Path) -> None:
    """The directory is absent or complete, and complete once the command has reported it."""
    root = tmp_path / "root"
    root.mkdir()

    def verb(target: Path) -> None:
        assert export.main([str(trained / "run"), str(target), "--dtype=float32"]) == 0

    with recorded(root) as recording:
        verb(root / "new/dir/out")
        recording.mark("said")
    assert recording.coarse == 0
    whole = root / "new/dir/out"

    def look(place: Path, mark: str) -> bool:
        there = (place / "new/dir/out").exists()
        assert same(place / "new/dir/out", whole) if there else mark != "said"
        return there

    def start(place: Path, there: bool) -> None:
        if not there:
            verb(place / "new/dir/out")
        assert same(place / "new/dir/out", whole)

    count, starts = check_all(crashes(recording), tmp_path, look, start, most=12)
    assert (count > 30, starts > 3) == (True, True), f"{count} states, {starts} of them started from"
