"""The example of a tokenizer: runs on one rank and on two train with it, generate with it, and refuse data of
another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples.character_tokenizer import Characters
from tests.support.jobs import metrics_in
from tests.support.runs import train_on_rank
from titanlite.config.component import ConfigError
from titanlite.corpus.write_shards import write_shards
from titanlite.data.sources import Tokens
from titanlite.tokenizers.bytes import Bytes

KEYS = [
    "--job.imports=['tests.examples.character_tokenizer']",
    "--tokenizer={ name = 'characters' }",
    "--model.overrides.vocab_size=40",
    "--training.steps=5",
]


@pytest.mark.full
def test_runs_train_with_it(tmp_path: Path, corpus: Path, run_on: Any) -> None:
    keys = [*KEYS, f"--data.cache_dir={tmp_path}/cache", "--generation.prompts=['ab']"]
    for world_size in (1, 2):
        run_on(world_size, train_on_rank, tmp_path, corpus, keys, f"run{world_size}", world_size)
    one, two = (metrics_in(tmp_path / name) for name in ("run1", "run2"))
    assert [line["data/batch_sha"] for line in one] == [line["data/batch_sha"] for line in two]
    losses = [line["train/loss"] for line in one]
    assert losses == pytest.approx([line["train/loss"] for line in two], abs=1e-5)
    assert losses[-1] < losses[0] < 4.5  # ln 40 is 3.7


def test_it_encodes_and_decodes() -> None:
    tokenizer = Characters(alphabet="ab ").build()
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (6, 4, 5)
    (ids,) = tokenizer.encode_documents(["ab ba?"])
    assert ids.tolist() == [4, 0, 1, 2, 1, 0, 3, 5]
    assert tokenizer.decode(ids.tolist()) == "ab ba\N{REPLACEMENT CHARACTER}"
    with pytest.raises(ConfigError, match="has a character twice"):
        Characters(alphabet="aa")


def test_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    ours, other = Characters().build(), Characters(alphabet="abc").build()
    path = write_shards(["some text"], tmp_path / "data", ours).path
    assert Tokens(path=str(path)).build(ours, tmp_path).num_documents == 1
    for tokenizer in (other, Bytes().build()):
        with pytest.raises(ConfigError, match="was made with tokenizer characters"):
            Tokens(path=str(path)).build(tokenizer, tmp_path)
