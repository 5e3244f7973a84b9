"""The example of a source from the library `datasets`: it reads what load_dataset yields, here from a
stand-in with the library's methods, and from the library itself where it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from tests.examples.datasets_source import Datasets
from tests.support.jobs import metrics_in
from tests.support.runs import train_on_rank
from titanlite.config.component import ConfigError
from titanlite.tokenizers.bytes import Bytes

KEYS = [
    "--job.imports=['tests.examples.datasets_source']",
    "--data.sources=[{ name = 'datasets', path = 'stand/in', revision = 'a1' }]",
    "--training.steps=5",
]


class Stream:
    """An IterableDataset: it is iterated, and has no length."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"text": f"document {i} of a stream", "id": i} for i in range(self.count))


def stand_in(calls: list[dict[str, Any]] | None = None) -> Any:
    """In its context the library is a stand-in; `calls` gets the arguments of load_dataset."""

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Stream:
        if calls is not None:
            calls.append({"path": path, "name": name, **options})
        return Stream(200)

    module = ModuleType("datasets")
    vars(module)["load_dataset"] = load_dataset
    return patch.dict(sys.modules, {"datasets": module})


def train_with_stand_in(*args: Any) -> None:
    with stand_in():
        train_on_rank(*args)


@pytest.mark.full
def test_runs_train_on_it(tmp_path: Path, corpus: Path, run_on: Any) -> None:
    keys = [*KEYS, f"--data.cache_dir={tmp_path}/cache"]
    for world_size in (1, 2):
        run_on(world_size, train_with_stand_in, tmp_path, corpus, keys, f"run{world_size}", world_size)
    one, two = ([line["data/batch_sha"] for line in metrics_in(tmp_path / name)] for name in ("run1", "run2"))
    assert one == two
    assert len(one) == 5
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_what_it_asks_for(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    with stand_in(calls):
        shards = Datasets(path="a/b", revision="c0", config="d", max_documents=7).build(
            Bytes().build(), tmp_path
        )
    assert shards.num_documents == 7
    assert bytes(shards.document(3)[1:-1].tolist()) == b"document 3 of a stream"
    assert calls == [
        {
            "path": "a/b",
            "name": "d",
            "split": "train",
            "data_files": None,
            "streaming": True,
            "revision": "c0",
        }
    ]
    revisions = [Datasets(path="a/b", revision=revision).fingerprint() for revision in ("c0", "c1")]
    assert revisions[0] != revisions[1]


def test_what_is_missing(tmp_path: Path) -> None:
    source = Datasets(path="a/b", revision="c0", field="body")
    with stand_in(), pytest.raises(ConfigError, match=r"no column 'body' \(text, id\)"):
        source.build(Bytes().build(), tmp_path)
    with (
        patch.dict(sys.modules, {"datasets": None}),
        pytest.raises(ConfigError, match="pip install datasets"),
    ):
        source.build(Bytes().build(), tmp_path)


def test_the_library_itself(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(9)))
    source = Datasets(path="json", data_files=str(file), revision="1", max_documents=8)
    shards = source.build(Bytes().build(), tmp_path / "cache")
    texts = [bytes(shards.document(i)[1:-1].tolist()).decode() for i in range(shards.num_documents)]
    assert texts == [f"line {i}" for i in range(8)]
