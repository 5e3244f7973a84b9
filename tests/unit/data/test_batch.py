"""Batch.split against a computation token by token."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titanlite.data.batch import IGNORE, Batch, make_batch
from titanlite.data.packing import TokenSequence

TENSORS = ("inputs", "targets", "positions", "source_ids")


@st.composite
def whole_batches(draw: st.DrawFn) -> tuple[Batch, int]:
    """A batch of sequences with documents, padding tokens and padding sequences, and a number of splits."""
    num_splits, length = draw(st.sampled_from([1, 2, 4, 8, 3])), draw(st.integers(1, 6))
    seq_len, sequences = num_splits * length, []
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    for _ in range(draw(st.integers(1, 3))):
        tokens, num_padding = rng.integers(1, 50, seq_len + 1), draw(st.integers(0, seq_len))
        starts = np.array(sorted(draw(st.sets(st.integers(0, seq_len - num_padding), max_size=6))), dtype=int)
        with_starts = draw(st.booleans())
        sequences.append(TokenSequence(tokens, starts, num_padding) if with_starts else TokenSequence(tokens))
    padded, with_positions = len(sequences) + draw(st.integers(0, 2)), draw(st.booleans())
    batch = make_batch(
        range(len(sequences)), sequences, seq_len=seq_len, num_sequences=padded, with_positions=with_positions
    )
    return replace(batch, source_ids=torch.from_numpy(rng.integers(0, 4, padded))), num_splits


def by_token(batch: Batch, num_splits: int) -> tuple[list[dict[str, list[int]]], int]:
    """The shorter sequences and the number of their documents."""
    num_sequences, seq_len = batch.inputs.shape
    length, shorter, num_documents = seq_len // num_splits, [], 0
    for i in range(num_sequences):
        for begin in range(0, seq_len, length):
            sequence: dict[str, list[int]] = {name: [] for name in TENSORS[:3]}
            document_start = begin
            for t in range(begin, begin + length):
                sequence["inputs"].append(int(batch.inputs[i, t]))
                sequence["targets"].append(int(batch.targets[i, t]))
                if batch.positions is not None:
                    document_start = t if batch.positions[i, t] == 0 else document_start
                    sequence["positions"].append(t - document_start)
                    num_documents += t == document_start
            shorter.append(sequence | {"source_ids": [int(batch.source_ids[i])]})  # type: ignore[index]
    return shorter, num_documents


@given(whole_batches())
def test_shorter_sequences_are_those_of_a_computation_by_token(example: tuple[Batch, int]) -> None:
    batch, num_splits = example
    before = pickle.dumps(batch)
    split = batch.split(num_splits)
    wanted, num_documents = by_token(batch, num_splits)
    for name in TENSORS:
        values = getattr(split, name)
        if values is None:
            assert name == "positions"
            assert batch.positions is None
        else:
            assert values.dtype == torch.int64
            assert values.view(len(wanted), -1).tolist() == [sequence[name] for sequence in wanted], name
    assert split.num_documents == (batch.num_documents if batch.positions is None else num_documents)
    assert (split.hash, split.num_targets) == (batch.hash, batch.num_targets)
    assert split.num_targets == int((split.targets != IGNORE).sum())
    assert pickle.dumps(batch) == before, "the whole batch has changed"


@given(whole_batches())
def test_a_worker_sends_a_split_batch_as_it_is(example: tuple[Batch, int]) -> None:
    split = example[0].split(example[1])
    received = pickle.loads(pickle.dumps(split))
    for name, value in vars(split).items():
        same = torch.equal if torch.is_tensor(value) else lambda a, b: a == b
        assert same(getattr(received, name), value), name


def test_splitting_twice_is_splitting_once_more_finely() -> None:
    tokens = np.arange(17)
    batch = make_batch([3], [TokenSequence(tokens, np.array([0, 5, 14]))], seq_len=16, with_positions=True)
    twice, once = batch.split(2).split(4), batch.split(8)
    assert torch.equal(twice.positions, once.positions)  # type: ignore[arg-type]
    assert (twice.num_documents, once.num_documents) == (9, 9)
    assert batch.split(1) is batch


@pytest.mark.parametrize("num_splits", [0, -2, 3, 32])
def test_a_length_that_does_not_divide_is_refused(num_splits: int) -> None:
    batch = make_batch([0], [TokenSequence(np.arange(17))], seq_len=16)
    with pytest.raises(ValueError, match=f"16 tokens cannot be split into {num_splits} sequences"):
        batch.split(num_splits)
