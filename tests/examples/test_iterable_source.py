"""The example of a source from a Python generator: runs on one rank and on two train on the same sequences,
the documents are tokenised once, and other documents or another tokenizer get another cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples.iterable_source import Sums
from tests.support.jobs import metrics_in
from tests.support.runs import train_on_rank
from titanlite.config.component import ConfigError
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.tiktoken import Tiktoken

SOURCE = ["--job.imports=['tests.examples.iterable_source']", "--training.steps=5"]


@pytest.mark.full
def test_runs_train_on_its_documents(tmp_path: Path, corpus: Path, run_on: Any) -> None:
    keys = [*SOURCE, "--data.sources=[{ name = 'sums', count = 300 }]", f"--data.cache_dir={tmp_path}/cache"]
    for world_size in (1, 2):
        run_on(world_size, train_on_rank, tmp_path, corpus, keys, f"run{world_size}", world_size)
    one, two = (
        [(line["data/batch_sha"], line["train/loss"]) for line in metrics_in(tmp_path / name)]
        for name in ("run1", "run2")
    )
    assert [sha for sha, _ in one] == [sha for sha, _ in two]
    assert [loss for _, loss in one] == pytest.approx([loss for _, loss in two], abs=1e-5)
    (cache,) = (tmp_path / "cache").iterdir()
    assert cache.name.startswith("sums-")
    other = ["--data.sources=[{ name = 'sums', count = 301 }]", *keys[-1:]]
    run_on(1, train_on_rank, tmp_path, corpus, [*SOURCE, *other], "other", 1)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert metrics_in(tmp_path / "other")[0]["data/batch_sha"] != one[0][0]  # negative control


def test_documents_are_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = Sums(count=50), tmp_path / "cache"
    shards = source.build(Bytes().build(), cache)
    assert shards.num_documents == 50
    text = bytes(shards.document(0)[1:-1].tolist()).decode()
    assert text == "49 + 97 = 146"
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "documents", lambda self: 1 / 0)
        assert source.build(Bytes().build(), cache).path == shards.path
    others = [Sums(count=50, max_term=9), Sums(count=51)]
    paths = {other.build(Bytes().build(), cache).path for other in others}
    paths |= {shards.path, source.build(Tiktoken().build(), cache).path}
    assert len(paths) == 4


def test_an_error_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Sums) -> Any:
        yield "1 + 1 = 2"
        raise ZeroDivisionError

    monkeypatch.setattr(Sums, "documents", broken)
    with pytest.raises(ZeroDivisionError):
        Sums().build(Bytes().build(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_it_checks_its_keys() -> None:
    with pytest.raises(ConfigError, match="0 is below 1"):
        Sums(count=0)
