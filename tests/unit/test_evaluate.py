"""Validation by source: each source's sums are those of its own sequences on any number of ranks, they add up
to the total, weights count as documented, and bits per byte are those of the text.

The model is a stand-in whose loss of a target is known; tests/distributed/test_resume.py has real layouts."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from titanlite.data.batch import Batch
from titanlite.data.dataset import Data, SequenceDataset
from titanlite.data.text_sources import Text
from titanlite.evaluate import num_bytes, validate
from titanlite.losses import IGNORE
from titanlite.tokenizers.base import Tokenizer
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.tiktoken import Tiktoken

SEQ_LEN = 16
LETTERS = {"one": "abc", "two": "xyz", "three": "0123"}  # different losses by source
SIZES = {"one": 700, "two": 330, "three": 100}


def loss_of(target: int) -> float:
    return target / 256  # exact in every order of summation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    (root / "trained.txt").write_text("".join(rng.choices("mnopq", k=500)))
    for name, size in SIZES.items():
        (root / f"{name}.txt").write_text("".join(rng.choices(LETTERS[name], k=size)))
    return root


def make_sequences(
    folder: Path, weights: dict[str, float], tokenizer: Tokenizer | None = None
) -> SequenceDataset:
    sources = [Text(path=[str(folder / f"{name}.txt")], weight=w) for name, w in weights.items()]
    trained = [Text(path=[str(folder / "trained.txt")])]
    data = Data(sources=trained, validation_sources=sources, cache_dir=str(folder / "cache"))
    return data.build(tokenizer or Bytes().build(), seq_len=SEQ_LEN, seed=0)


EQUAL = dict.fromkeys(SIZES, 1.0)


def on_ranks(
    sequences: SequenceDataset,
    num_sequences: int,
    *,
    dp_size: int = 1,
    tp: int = 1,
    micro_batch: int = 4,
    table: np.ndarray | None = None,
) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics of a validation on all ranks, and the sums by source."""
    forwards, by_rank = [], []
    total: list[torch.Tensor] = []

    def one(dp_rank: int, is_leader: bool) -> dict[str, float]:
        num_forwards = 0

        def loss_sum(batch: Batch) -> torch.Tensor:
            nonlocal num_forwards
            num_forwards += 1
            targets = batch.targets[batch.targets != IGNORE]
            return targets.sum() / 256 * is_leader

        def add(sums: torch.Tensor) -> torch.Tensor:
            by_rank.append(sums)
            return total[0] if total else sums

        mesh = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size, is_data_leader=is_leader)
        batch = SimpleNamespace(micro_batch_size=micro_batch)
        rt: Any = SimpleNamespace(
            batch=batch, mesh=mesh, device=torch.device("cpu"), rank=1, ranks=SimpleNamespace(sum=add)
        )
        model: Any = SimpleNamespace(loss_sum=loss_sum)
        metrics = validate(model, sequences, num_sequences, rt, table)
        forwards.append(num_forwards)
        return metrics

    for dp_rank in range(dp_size):
        for tp_rank in range(tp):
            one(dp_rank, tp_rank == 0)
    assert len(set(forwards)) == 1, "all ranks enter every collective"
    total.append(sum(by_rank, torch.zeros_like(by_rank[0])))
    return one(0, True), total[0]


def texts(folder: Path, name: str) -> np.ndarray:
    """The targets of a source, computed without the loader."""
    tokens = np.array([256, *(folder / f"{name}.txt").read_bytes(), 257])
    return tokens[1 : 1 + (len(tokens) - 1) // SEQ_LEN * SEQ_LEN]


def test_each_source_has_the_loss_of_its_own_sequences(folder: Path) -> None:
    sequences = make_sequences(folder, EQUAL)
    metrics, sums = on_ranks(sequences, sequences.num_held_out, table=Bytes().build().bytes_per_token())
    all_targets = {f"{name}.txt": texts(folder, name) for name in SIZES}
    for name, targets in all_targets.items():
        loss = targets.sum() / 256 / len(targets)
        num = int((targets < 256).sum())
        assert metrics[f"eval/{name}/loss"] == pytest.approx(loss, rel=1e-12)
        assert metrics[f"eval/{name}/perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)
        expected = targets.sum() / 256 / math.log(2) / num
        assert metrics[f"eval/{name}/bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    together = np.concatenate(list(all_targets.values()))
    assert metrics["eval/loss"] == pytest.approx(together.mean() / 256, rel=1e-12)
    assert metrics["eval/tokens"] == len(together) == sums[1].sum()
    assert metrics["eval/sequences"] == sequences.num_held_out == len(together) // SEQ_LEN
    num_text = int((together < 256).sum())
    assert sums[2].sum() == num_text
    assert metrics["eval/bits_per_byte"] == pytest.approx(together.sum() / 256 / math.log(2) / num_text)
    by_name = [metrics[f"eval/{name}/loss"] for name in sequences.for_validation.names]
    added = sum(loss * num for loss, num in zip(by_name, sums[1].tolist())) / metrics["eval/tokens"]
    assert added == pytest.approx(metrics["eval/loss"], rel=1e-12)
    assert np.mean(by_name) != pytest.approx(metrics["eval/loss"], rel=1e-2)  # control: not by tokens


@pytest.mark.parametrize(
    "ranks", [{"dp_size": 3}, {"tp": 2}, {"dp_size": 2, "tp": 2, "micro_batch": 3}], ids=str
)
@pytest.mark.parametrize("num_sequences", [-1, 17])
def test_the_sums_are_those_of_one_rank(folder: Path, ranks: dict[str, int], num_sequences: int) -> None:
    sequences = make_sequences(folder, EQUAL)
    num = sequences.num_held_out if num_sequences < 0 else num_sequences
    table = Bytes().build().bytes_per_token()
    assert on_ranks(sequences, num, table=table, **ranks)[0] == on_ranks(sequences, num, table=table)[0]
    assert on_ranks(sequences, num - 1, table=table)[0] != on_ranks(sequences, num, table=table)[0]  # control


def test_weights_that_differ_count_in_the_total(folder: Path) -> None:
    weights = {"one": 1.0, "two": 2.0, "three": 5.0}
    table = Bytes().build().bytes_per_token()
    sequences = make_sequences(folder, weights)
    weighted, _ = on_ranks(sequences, sequences.num_held_out, table=table)
    equal, _ = on_ranks(make_sequences(folder, EQUAL), sequences.num_held_out, table=table)
    same, _ = on_ranks(make_sequences(folder, dict.fromkeys(SIZES, 7.0)), sequences.num_held_out, table=table)
    assert same == equal
    totals = {"eval/loss", "eval/perplexity", "eval/bits_per_byte"}
    assert {key for key in equal if weighted[key] != equal[key]} == totals
    for key in ("loss", "bits_per_byte"):
        mean = sum(w * weighted[f"eval/{name}.txt/{key}"] for name, w in weights.items()) / 8
        assert weighted[f"eval/{key}"] == pytest.approx(mean, rel=1e-12)
    assert weighted["eval/perplexity"] == math.exp(weighted["eval/loss"])
    limited = {
        name: len(numbers)
        for name, numbers in zip(sequences.for_validation.names, sequences.for_validation.ranges(16))
    }
    assert limited == {"one.txt": 3, "two.txt": 7, "three.txt": 6}  # three.txt has only 6


def test_one_source_has_no_values_by_source(folder: Path) -> None:
    sequences = make_sequences(folder, {"one": 3.0})
    metrics, _ = on_ranks(sequences, 8, table=Bytes().build().bytes_per_token())
    totals = {"loss", "perplexity", "bits_per_byte", "tokens", "sequences"}
    assert set(metrics) == {f"eval/{name}" for name in totals}


def test_a_tokenizer_that_cannot_tell_has_no_bits_per_byte(folder: Path) -> None:
    sequences = make_sequences(folder, EQUAL)
    without, _ = on_ranks(sequences, sequences.num_held_out, table=Tokenizer().bytes_per_token())
    known, _ = on_ranks(sequences, sequences.num_held_out, table=Bytes().build().bytes_per_token())
    assert without == {key: value for key, value in known.items() if "bits_per_byte" not in key}
    assert without != known


@pytest.mark.parametrize("tokenizer", [Bytes().build(), Tiktoken().build()], ids=["bytes", "tiktoken"])
def test_the_bytes_of_documents_do_not_depend_on_the_tokenizer(tokenizer: Tokenizer) -> None:
    texts = ["def main():\n    return", "na\u00efve \u4f60\u597d \U0001f600", ""]
    table = tokenizer.bytes_per_token()
    assert table is not None
    ids = np.concatenate(tokenizer.encode_documents(texts)).astype(np.int64)
    targets = torch.from_numpy(np.append(ids, [IGNORE, IGNORE]))
    assert num_bytes(targets, table) == sum(len(text.encode()) for text in texts)
