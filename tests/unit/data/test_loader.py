"""Pins the loader: a training sequence is a function of its number and the identity alone, so ranks,
micro-batches, workers, resumes and changed batch sizes neither lose nor repeat nor alter one; held-out
sequences are never trained on; input that cannot be trained on is refused; whatever changes a sequence
changes the identity."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.datasets import FakeTokenizer, write_dataset
from titanlite.config.component import ConfigError
from titanlite.data.batch import IGNORE, Batch, make_batch, sequence_hash
from titanlite.data.dataset import Data, SequenceDataset
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.order import MIXING_BLOCK, quotas
from titanlite.data.packing import TokenSequence
from titanlite.data.sources import Tokens
from titanlite.data.step_sizes import StepSizes
from titanlite.data.text_sources import Text
from titanlite.errors import LoaderError
from titanlite.tokenizers.bytes import Bytes

steps_of = StepSizes.constant

SEQ_LEN, SEED = 16, 7
SIZES = {
    "a": 40_000,
    "b": 3_000,
    "c": 9_000,
}  # characters; all but `a` pass through epochs in the tests below
U64 = 1 << 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.txt, b.txt and c.txt with random letters, so that no two sequences are equal, and a cache."""
    root, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    for name, size in SIZES.items():
        (root / f"{name}.txt").write_text("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=size)))
    return root


def make_data(folder: Path, weights: dict[str, float] | None = None, **options: Any) -> Data:
    weights = {"a": 3, "b": 1, "c": 2} if weights is None else weights
    sources = [Text(path=[str(folder / f"{name}.txt")], weight=w) for name, w in weights.items()]
    return Data(sources=sources, cache_dir=str(folder / "cache"), **{"holdout_sequences": 30, **options})


def make_sequences(
    folder: Path,
    weights: dict[str, float] | None = None,
    *,
    seed: int = SEED,
    seq_len: int = SEQ_LEN,
    **options: Any,
) -> SequenceDataset:
    return make_data(folder, weights, **options).build(Bytes().build(), seq_len=seq_len, seed=seed)


@pytest.fixture(scope="module")
def sequences(folder: Path) -> SequenceDataset:
    return make_sequences(folder)


def all_chunks(folder: Path, name: str) -> set[bytes]:
    """Every sequence of a source, computed without the loader."""
    tokens = np.asarray([256, *(folder / f"{name}.txt").read_bytes(), 257])
    return {tokens[i : i + SEQ_LEN + 1].tobytes() for i in range(0, len(tokens) - SEQ_LEN, SEQ_LEN)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_name_the_source_of_each_sequence(
    folder: Path, sequences: SequenceDataset, num_workers: int
) -> None:
    chunks = {f"{name}.txt": all_chunks(folder, name) for name in SIZES}
    loader = SequenceLoader(sequences, MicroBatches(0, steps_of(40), 40, 0, 1), num_workers, pin_memory=False)
    batch = next(loader)
    loader.close()
    assert batch.source_ids is not None
    names = [sequences.source_names[k] for k in batch.source_ids.tolist()]
    assert set(names) == chunks.keys()
    for name, inputs, targets in zip(names, batch.inputs.numpy(), batch.targets.numpy()):
        assert np.append(inputs, targets[-1]).tobytes() in chunks[name]


def contents(sequences: list[TokenSequence]) -> list[bytes]:
    return [sequence.tokens.tobytes() for sequence in sequences]


def take(sequences: SequenceDataset, order: MicroBatches, number: int, num_workers: int = 0) -> list[Batch]:
    """The first micro-batches of an order."""
    return list(islice(SequenceLoader(sequences, order, num_workers, pin_memory=False), number))


def sha(batches: list[Batch]) -> int:
    return sum(b.hash for b in batches) % U64


def reference_sha(sequences: SequenceDataset, first: int, last: int) -> int:
    """The expected hash of training sequences [first, last), which are read one at a time."""
    return (
        sum(sequence_hash(g, sequences.training(np.asarray([g]))[0].tokens) for g in range(first, last)) % U64
    )


def test_held_out_sequences_are_never_trained_on(folder: Path, sequences: SequenceDataset) -> None:
    """20,000 training sequences are at least two epochs of each source and contain every sequence."""
    held = contents(sequences.held_out(np.arange(sequences.num_held_out)))
    assert len(set(held)) == sequences.num_held_out == 30
    trained = Counter(contents(sequences.training(np.arange(20 * MIXING_BLOCK))))
    assert not trained.keys() & set(held)
    everything = {chunk for name in SIZES for chunk in all_chunks(folder, name)}
    assert trained.keys() | set(held) == everything
    assert min(trained.values()) >= 2
    assert sum(sequences.sizes) == len(everything) - 30


def test_held_out_sequences_are_split_by_weight(folder: Path, sequences: SequenceDataset) -> None:
    held = set(contents(sequences.held_out(np.arange(30))))
    assert {name: len(held & all_chunks(folder, name)) for name in SIZES} == {"a": 15, "b": 5, "c": 10}


def test_held_out_sequences_do_not_depend_on_the_seed(folder: Path, sequences: SequenceDataset) -> None:
    other = make_sequences(folder, seed=SEED + 1)
    numbers = np.arange(30)
    assert contents(other.held_out(numbers)) == contents(sequences.held_out(numbers))
    assert contents(other.training(numbers)) != contents(sequences.training(numbers))


def test_held_out_sequences_are_scattered_over_the_source(folder: Path) -> None:
    sequences = make_sequences(folder, {"a": 1}, holdout_sequences=100)
    text = (folder / "a.txt").read_text()
    held = [bytes(r.tokens[1:-1].astype(np.uint8)).decode() for r in sequences.held_out(np.arange(100))]
    places = sorted(text.index(chunk) for chunk in held)
    assert places[0] < SIZES["a"] * 0.1
    assert places[-1] > SIZES["a"] * 0.9


def test_reading_held_out_sequences_leaves_training_alone(sequences: SequenceDataset) -> None:
    expected = contents(sequences.training(np.arange(50)))
    stream = SequenceLoader(sequences, MicroBatches(0, steps_of(10), 10, 0, 1), 0, pin_memory=False)
    seen = []
    for _ in range(5):
        sequences.held_out(np.arange(30))
        batch = next(stream)
        seen += [np.append(i, t[-1]).tobytes() for i, t in zip(batch.inputs.numpy(), batch.targets.numpy())]
    assert seen == expected


def test_without_holdout_every_sequence_is_trained_on(folder: Path) -> None:
    sequences = make_sequences(folder, {"a": 1}, holdout_sequences=0)
    assert sequences.num_held_out == 0
    assert sequences.held_out(np.arange(0)) == []
    assert set(contents(sequences.training(np.arange(3 * MIXING_BLOCK)))) == all_chunks(folder, "a")


def test_a_sequences_source_follows_the_weights(folder: Path, sequences: SequenceDataset) -> None:
    trained = contents(sequences.training(np.arange(5 * MIXING_BLOCK, 6 * MIXING_BLOCK)))
    for name, quota in {"a": 500, "b": 167, "c": 333}.items():
        chunks = all_chunks(folder, name)
        assert sum(sequence in chunks for sequence in trained) == quota


def test_the_order_of_sources_in_the_file_does_not_matter(folder: Path, sequences: SequenceDataset) -> None:
    other = make_sequences(folder, {"c": 2, "b": 1, "a": 3})
    assert other.identity == sequences.identity
    numbers = np.arange(2 * MIXING_BLOCK)
    assert contents(other.training(numbers)) == contents(sequences.training(numbers))
    assert contents(other.held_out(np.arange(30))) == contents(sequences.held_out(np.arange(30)))


def test_a_batch_holds_its_sequences_shifted_by_one(sequences: SequenceDataset) -> None:
    (batch,) = take(sequences, MicroBatches(5, steps_of(3), 3, 0, 1), 1)
    expected = np.stack([sequence.tokens for sequence in sequences.training(np.arange(5, 8))])
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.tolist() == expected[:, :-1].tolist()
    assert batch.targets.tolist() == expected[:, 1:].tolist()
    assert batch.num_targets == 3 * SEQ_LEN
    assert batch.hash == reference_sha(sequences, 5, 8)


def test_sequences_that_fill_up_a_batch_do_not_count(sequences: SequenceDataset) -> None:
    some = sequences.held_out(np.arange(2))
    batch = make_batch([0, 1], some, seq_len=SEQ_LEN)
    full = make_batch([0, 1], some, num_sequences=4, seq_len=SEQ_LEN)
    assert full.inputs.shape == full.targets.shape == (4, SEQ_LEN)
    assert full.targets[:2].tolist() == batch.targets.tolist()
    assert (full.targets[2:] == IGNORE).all()
    assert (full.num_targets, full.hash) == (batch.num_targets, batch.hash) == (2 * SEQ_LEN, batch.hash)
    nothing = make_batch([], [], num_sequences=4, seq_len=SEQ_LEN)
    assert (nothing.num_targets, nothing.hash) == (0, 0)


def test_the_hash_knows_tokens_and_places() -> None:
    sequence, other = np.arange(5), np.array([0, 1, 2, 3, 5])
    hashes = {
        sequence_hash(0, sequence),
        sequence_hash(1, sequence),
        sequence_hash(0, other),
        sequence_hash(0, sequence[:-1]),
    }
    assert len(hashes) == 4
    assert all(0 <= h < U64 for h in hashes)
    # a sum over sequences, and still not blind to their order
    same = make_batch([0, 1], [TokenSequence(sequence), TokenSequence(other)], seq_len=4).hash
    assert make_batch([0, 1], [TokenSequence(other), TokenSequence(sequence)], seq_len=4).hash != same


SPLITS = [(dp, mb) for dp in (1, 2, 3, 4, 6) for mb in (1, 2, 4, 12, 24) if 24 % (dp * mb) == 0]


@pytest.mark.parametrize(("dp", "micro_batch"), SPLITS)
def test_ranks_cover_a_steps_sequences_exactly(dp: int, micro_batch: int) -> None:
    first, size, per_step = 1_000, 24, 24 // (dp * micro_batch)
    orders = [iter(MicroBatches(first, steps_of(size), micro_batch, rank, dp)) for rank in range(dp)]
    for step in range(3):
        begin = first + step * size
        taken = [next(order).numbers for order in orders for _ in range(per_step)]
        assert all(len(numbers) == micro_batch for numbers in taken)
        assert sorted(g for numbers in taken for g in numbers) == list(range(begin, begin + size))


@pytest.mark.parametrize(("dp", "micro_batch"), SPLITS)
def test_batches_are_equal_for_any_split(sequences: SequenceDataset, dp: int, micro_batch: int) -> None:
    """The hashes of two steps, summed over ranks and micro-batches, equal those of sequences read one at a
    time."""
    per_step = 24 // (dp * micro_batch)
    ranks = [
        take(sequences, MicroBatches(990, steps_of(24), micro_batch, r, dp), 2 * per_step) for r in range(dp)
    ]
    for step in range(2):
        batches = [b for rank in ranks for b in rank[step * per_step : (step + 1) * per_step]]
        assert sha(batches) == reference_sha(sequences, 990 + 24 * step, 990 + 24 * (step + 1))
        assert sum(b.num_targets for b in batches) == 24 * SEQ_LEN


def test_workers_give_the_same_batches(sequences: SequenceDataset) -> None:
    order = MicroBatches(995, steps_of(12), 3, 1, 2)
    alone, workers = (take(sequences, order, 7, num_workers=n) for n in (0, 2))
    assert len(alone) == len(workers) == 7
    for a, b in zip(alone, workers):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
        assert (a.hash, a.num_targets) == (b.hash, b.num_targets)
    assert len({b.hash for b in alone}) == 7


# A global batch of 24 sequences over three changes of ranks, workers and micro-batch, by sequences that pass
# epochs.
PACKED = [{}, {"packing": "best_fit", "mask_documents": True}]
TOPOLOGIES = [(1, 0, 24), (3, 1, 2), (2, 2, 3), (8, 0, 1), (6, 2, 4), (4, 1, 6), (1, 4, 12), (8, 1, 3)]


@pytest.fixture(scope="module", params=PACKED, ids=["chunk", "best_fit"])
def packed(request: pytest.FixtureRequest, folder: Path) -> SequenceDataset:
    return make_sequences(folder, **request.param)


@pytest.mark.parametrize(
    ("dp", "num_workers"),
    [
        pytest.param(dp, n, marks=() if (dp, n) in [(1, 0), (3, 2)] else pytest.mark.full)
        for dp in (1, 2, 3, 4, 6, 8)
        for n in (0, 1, 2, 4)
    ],
)
def test_batch_sha_is_equal_for_any_ranks_and_workers(
    packed: SequenceDataset, dp: int, num_workers: int
) -> None:
    expected = [reference_sha(packed, 990 + 24 * step, 990 + 24 * (step + 1)) for step in range(2)]
    micro_batch, actual = 24 // dp, [0, 0]
    for rank in range(dp):
        order = MicroBatches(990, steps_of(24), micro_batch, rank, dp)
        for step, batch in enumerate(take(packed, order, 2, num_workers)):
            actual[step] += batch.hash
    assert [f % U64 for f in actual] == expected
    assert expected[0] != expected[1]


@pytest.mark.full
@pytest.mark.parametrize("begin", [0, pytest.param(4, marks=pytest.mark.full)])
def test_batch_sha_is_equal_over_three_changes_of_topology(packed: SequenceDataset, begin: int) -> None:
    consumed, actual = 500, []
    for dp, num_workers, micro_batch in TOPOLOGIES[begin : begin + 4]:
        per_step = 24 // (dp * micro_batch)
        ranks = [
            take(
                packed, MicroBatches(consumed, steps_of(24), micro_batch, rank, dp), 2 * per_step, num_workers
            )
            for rank in range(dp)
        ]
        for step in range(2):
            actual.append(sha([b for rank in ranks for b in rank[step * per_step : (step + 1) * per_step]]))
        consumed += 2 * 24
    expected = [reference_sha(packed, 500 + 24 * step, 500 + 24 * (step + 1)) for step in range(8)]
    assert actual == expected
    shifted = [reference_sha(packed, 501 + 24 * step, 501 + 24 * (step + 1)) for step in range(8)]
    assert not set(actual) & set(shifted)  # the negative control: one sequence too far


def test_packed_sequences_pass_through_each_source_once_an_epoch(folder: Path) -> None:
    """Each epoch has every sequence of a source once and no held-out sequence, also with best-fit packing."""
    sequences = make_sequences(folder, {"a": 1}, packing="best_fit", holdout_sequences=7)
    held = set(contents(sequences.held_out(np.arange(7))))
    epoch = contents(sequences.training(np.arange(sequences.sizes[0])))
    assert len(held) == 7
    assert len(set(epoch)) == len(epoch) == sequences.sizes[0]
    assert not held & set(epoch)
    text = (folder / "a.txt").read_text()
    assert sum(len(r) // 8 for r in [*held, *epoch]) >= len(text) + 2  # int64 each, padding included
    again = contents(sequences.training(np.arange(sequences.sizes[0], 2 * sequences.sizes[0])))
    assert sorted(again) == sorted(epoch)
    assert again != epoch


def test_validation_sources_are_all_there_is_to_validate_on(folder: Path) -> None:
    sources = [Text(path=[str(folder / f"{name}.txt")]) for name in ("b", "c")]
    sequences = make_sequences(folder, {"a": 1}, validation_sources=sources, holdout_sequences=0)
    numbers = np.arange(sequences.num_held_out)
    held = contents(sequences.held_out(numbers))
    assert set(held) == all_chunks(folder, "b") | all_chunks(folder, "c")
    assert len(held) == len(set(held))
    assert sorted(sequences.for_validation.names) == ["b.txt", "c.txt"]
    some = [n for numbers in sequences.for_validation.ranges(60) for n in numbers]
    contained = {name: len(all_chunks(folder, name) & {held[n] for n in some}) for name in "bc"}
    assert contained == {"b": 15, "c": 45}  # in proportion to 187 and 562 sequences
    assert set(contents(sequences.training(np.arange(3 * MIXING_BLOCK)))) == all_chunks(folder, "a")
    swapped = make_sequences(folder, {"a": 1}, validation_sources=sources[::-1], holdout_sequences=0)
    assert contents(swapped.held_out(numbers)) == held
    assert swapped.identity == sequences.identity


def test_validation_sources_must_not_be_trained_on(folder: Path) -> None:
    source = Text(path=[str(folder / "b.txt")])
    with pytest.raises(ConfigError, match="is also a training source") as e:
        make_sequences(folder, {"a": 1, "b": 1}, validation_sources=[source], holdout_sequences=0)
    assert e.value.key == "data.validation_sources"
    with pytest.raises(ConfigError, match="cannot be combined") as e:
        make_data(folder, {"a": 1}, validation_sources=[source], holdout_sequences=3)
    assert e.value.key == "holdout_sequences"


def test_a_run_says_what_it_takes_of_each_source(sequences: SequenceDataset, folder: Path) -> None:
    trained = contents(sequences.training(np.arange(1234)))
    expected = set()
    for name in SIZES:
        chunks = all_chunks(folder, name)
        held = sum(sequence in chunks for sequence in contents(sequences.held_out(np.arange(30))))
        taken, size = sum(sequence in chunks for sequence in trained), len(chunks) - held
        expected.add(f"{taken / 1234:.1%} of the sequences, {taken / size:.2f} epochs of {size:,}")
    assert {line.split(": ")[1] for line in sequences.describe(1234)} == expected


def test_max_epochs_refuses_a_run_that_passes_through_more_often(folder: Path) -> None:
    sources = [Text(path=[str(folder / "a.txt")]), Text(path=[str(folder / "b.txt")], max_epochs=2)]
    data = Data(sources=sources, cache_dir=str(folder / "cache"))
    sequences = data.build(Bytes().build(), seq_len=SEQ_LEN, seed=SEED)
    chunks = all_chunks(folder, "b")
    seen = np.cumsum(
        [sequence in chunks for sequence in contents(sequences.training(np.arange(MIXING_BLOCK)))]
    )
    enough = int(np.searchsorted(seen, 2 * len(chunks), side="right"))
    assert 2 * len(chunks) < MIXING_BLOCK
    assert len(sequences.describe(enough)) == 2
    with pytest.raises(ConfigError, match=r"b.*max_epochs = 2") as e:
        sequences.describe(enough + 1)
    assert e.value.key == "data.sources.1.max_epochs"
    advised = int(str(e.value).split("the first ")[1].split()[0].replace(",", ""))
    assert advised == enough
    assert "stage" not in str(e.value)
    sequences.set_stages(sources, [(0, None), (enough - 5, [0.0, 1.0]), (enough + 50, [1.0, 0.0])])
    counted = 1 + sequences.reads()[sequences.source_names.index("b.txt")].taken(enough - 5)
    expected = enough - 5 + 2 * len(chunks) - counted + 1
    by_name = dict(zip(sequences.source_names, sequences.shares()))
    assert by_name["b.txt"]["stages"] == [[0, 0.5], [enough - 5, 1.0], [enough + 50, 0.0]]
    with pytest.raises(ConfigError, match=rf"the first {expected:,} of the 2,000 .*\(in stage 2\), or"):
        sequences.describe(2000)


def read(folder: Path, kill: bool) -> str:
    """The error that ends 200 steps with two workers. A worker may be killed after the first step."""
    data = Data(sources=[Text(path=[str(folder / "a.txt")])], cache_dir=str(folder / "cache"))
    sequences = data.build(Bytes().build(), seq_len=SEQ_LEN, seed=SEED)
    stream = SequenceLoader(sequences, MicroBatches(0, steps_of(4), 4, 0, 1), 2, pin_memory=False)
    try:
        for step in range(200):
            next(stream)
            if kill and step == 0:
                multiprocessing.active_children()[0].kill()
    except LoaderError as e:
        return str(e)
    return "the last step"


def test_a_killed_worker_ends_the_run_and_is_named(folder: Path, run_on: Callable[..., list[Any]]) -> None:
    """The run neither hangs nor continues without the worker's batches."""
    (said,) = run_on(1, read, folder, True)
    assert re.match(r"loader worker \d \(pid \d+\) was ended by SIGKILL", said)
    assert run_on(1, read, folder, False) == ["the last step"]  # the control


def test_random_number_generators_do_not_enter(folder: Path) -> None:
    actual = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        sequences = make_sequences(folder)
        actual.append(
            (
                sha(take(sequences, MicroBatches(0, steps_of(8), 8, 0, 1), 3)),
                contents(sequences.held_out(np.arange(30))),
            )
        )
    assert actual[0] == actual[1]


@settings(max_examples=25, deadline=None)
@given(
    first=st.one_of(st.integers(0, 3 * MIXING_BLOCK), st.integers(0, 10**10)),
    runs=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    dp=st.sampled_from([1, 2, 3]),
)
def test_resuming_is_skipping(sequences: SequenceDataset, first: int, runs: list[int], dp: int) -> None:
    """Run, and resume three times; an uninterrupted run is the reference."""
    size, micro_batch = 12, 2
    per_step = size // (micro_batch * dp)
    for rank in range(dp):
        straight = take(
            sequences, MicroBatches(first, steps_of(size), micro_batch, rank, dp), sum(runs) * per_step
        )
        resumed, consumed = [], first
        for steps in runs:
            resumed += take(
                sequences, MicroBatches(consumed, steps_of(size), micro_batch, rank, dp), steps * per_step
            )
            consumed += steps * size
        assert [b.hash for b in resumed] == [b.hash for b in straight]
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(resumed, straight))
    late = take(
        sequences, MicroBatches(first + 1, steps_of(size), micro_batch, 0, dp), 1
    )  # negative control: a sequence too far
    assert late[0].hash != take(sequences, MicroBatches(first, steps_of(size), micro_batch, 0, dp), 1)[0].hash


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**9),
    st.lists(
        st.tuples(
            st.integers(1, 3), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 5]), st.integers(1, 3)
        ),
        min_size=2,
        max_size=4,
    ),
)
def test_a_changed_batch_size_or_layout_loses_and_repeats_nothing(
    sequences: SequenceDataset, first: int, phases: list[tuple[int, int, int, int]]
) -> None:
    """Each phase continues the previous phase with other numbers of ranks, micro-batches and sequences."""
    consumed, seen, total = first, [], 0
    for steps, dp, micro_batch, accumulation in phases:
        size = dp * micro_batch * accumulation
        for rank in range(dp):
            order = MicroBatches(consumed, steps_of(size), micro_batch, rank, dp)
            seen += [g for micro_batch in islice(order, steps * accumulation) for g in micro_batch.numbers]
            total += sha(take(sequences, order, steps * accumulation))
        consumed += steps * size
    assert sorted(seen) == list(range(first, consumed))
    assert total % U64 == reference_sha(sequences, first, consumed)


def test_too_few_tokens(folder: Path) -> None:
    tokens = SIZES["b"] + 2
    longest = make_sequences(folder, {"b": 1}, seq_len=tokens - 1, holdout_sequences=0)
    assert longest.sizes == [1]
    assert len(longest.training(np.arange(1))[0].tokens) == tokens
    with pytest.raises(ConfigError) as e:
        make_sequences(folder, {"b": 1}, seq_len=tokens, holdout_sequences=0)
    assert f"{tokens} tokens" in str(e.value)
    assert f"seq_len + 1 = {tokens + 1}" in str(e.value)


def test_too_many_held_out_sequences(folder: Path) -> None:
    num_sequences = len(all_chunks(folder, "b"))
    assert make_sequences(folder, {"b": 1}, holdout_sequences=num_sequences - 1).sizes == [1]
    with pytest.raises(ConfigError, match=f"cannot hold out {num_sequences} sequences of") as e:
        make_sequences(folder, {"b": 1}, holdout_sequences=num_sequences)
    assert e.value.key == "data.holdout_sequences"
    with pytest.raises(ConfigError):  # of one source of two
        make_sequences(folder, {"a": 1, "b": 1}, holdout_sequences=2 * num_sequences)


def test_two_sources_with_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.txt").write_bytes((folder / "b.txt").read_bytes())
    sources = [Text(path=[str(path)]) for path in (folder / "b.txt", tmp_path / "copy.txt")]
    data = Data(sources=sources, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="same tokens") as e:
        data.build(Bytes().build(), seq_len=SEQ_LEN, seed=SEED)
    assert e.value.key == "data.sources"


def test_a_weight_too_small_for_a_sequence_in_a_block(folder: Path) -> None:
    """Such a weight would silently exclude its source. The smallest weight that gets a sequence is
    accepted."""
    assert sorted(
        make_sequences(folder, {"a": 999, "b": 1}, holdout_sequences=0).identity["sources"].values()
    ) == [
        1,
        999,
    ]
    with pytest.raises(ConfigError, match="weight"):
        make_sequences(folder, {"a": 10_000, "b": 1}, holdout_sequences=0)


@pytest.mark.parametrize("key", ["holdout_sequences", "num_workers"])
def test_negative_numbers(folder: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="below 0") as e:
        make_data(folder, **{key: -1})
    assert e.value.key == key


def test_no_sources() -> None:
    with pytest.raises(ConfigError) as e:
        Data(sources=[])
    assert e.value.key == "sources"


def test_full_verification_finds_a_changed_byte(folder: Path, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path)}
    sources = [Text(path=[str(folder / "b.txt")])]
    build = {"seq_len": SEQ_LEN, "seed": SEED}
    Data(sources=sources, verify="full", **options).build(Bytes().build(), **build)
    (file,) = tmp_path.glob("*/00000.bin")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    Data(sources=sources, verify="sizes", **options).build(Bytes().build(), **build)
    with pytest.raises(ConfigError, match=r"00000\.bin"):
        Data(sources=sources, verify="full", **options).build(Bytes().build(), **build)


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
def test_an_id_that_the_tokenizer_does_not_have_is_found_when_it_is_read(
    tmp_path: Path, packing: str
) -> None:
    """One line names shard, token and sequence; an embedding would end with an IndexError, or on a GPU with
    an assertion of the device."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(2, 50, 40).tolist() for _ in range(30)]
    documents[20][7] = 60
    tokenizer = FakeTokenizer(vocab_size=50)
    write_dataset(tmp_path / "d", documents, tokenizer, shard_tokens=400)
    data = Data(
        sources=[Tokens(path=str(tmp_path / "d"))],
        cache_dir=str(tmp_path / "cache"),
        packing=packing,
        holdout_sequences=5,
        verify="full",  # the hashes are right
    )
    sequences = data.build(tokenizer, seq_len=SEQ_LEN, seed=SEED)
    said = {}
    for number in range(5):
        try:
            sequences.held_out(np.asarray([number]))
        except ConfigError as e:
            said[f"held-out sequence {number}"] = str(e)
    for number in range(sequences.sizes[0]):
        order = MicroBatches(number, steps_of(1), 1, 0, 1)
        try:
            take(sequences, order, 1)
        except ConfigError as e:
            said[f"sequence {number}"] = str(e)
            with pytest.raises(ConfigError, match=f"^{re.escape(str(e))}$"):
                take(sequences, order, 1, num_workers=1)
    assert len(said) in (1, 2)  # chunks may share a token
    for sequence, text in said.items():
        assert text == (
            f"{sequence}: {tmp_path / 'd'}/00002.bin: token 7 is 60, the tokenizer has ids below 50: the "
            f"file is damaged. Check all files with `titanlite data verify {tmp_path / 'd'}`, then "
            "prepare the dataset again"
        )


def test_another_vocabulary_size_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [list(range(100))], FakeTokenizer(vocab_size=200))
    with pytest.raises(ConfigError, match="vocab_size 200, its tokenizer has 100"):
        Tokens(path=str(tmp_path / "d")).build(FakeTokenizer(vocab_size=100), tmp_path)


def test_the_identity_changes_with_all_that_changes_sequences(
    folder: Path, sequences: SequenceDataset, tmp_path: Path
) -> None:
    edited = Path(tmp_path)
    for name in SIZES:
        (edited / f"{name}.txt").write_bytes((folder / f"{name}.txt").read_bytes())
    (edited / "b.txt").write_text((folder / "b.txt").read_text()[:-1] + "!")
    others = {
        "seed": make_sequences(folder, seed=SEED + 1),
        "seq_len": make_sequences(folder, seq_len=SEQ_LEN - 1),
        "weights": make_sequences(folder, {"a": 3, "b": 1, "c": 2.1}),
        "a source less": make_sequences(folder, {"a": 3, "b": 1}),
        "content": make_sequences(edited),
        "holdout": make_sequences(folder, holdout_sequences=31),
        "packing": make_sequences(folder, packing="best_fit"),
        "masks": make_sequences(folder, mask_documents=True),
        "both": make_sequences(folder, packing="best_fit", mask_documents=True),
    }
    identities = [json.dumps(r.identity, sort_keys=True) for r in (sequences, *others.values())]
    assert len(set(identities)) == len(identities), dict(zip(["base", *others], identities))


def test_the_identity_does_not_change_with_what_changes_no_sequence(
    folder: Path, sequences: SequenceDataset, tmp_path: Path
) -> None:
    for name in SIZES:
        (tmp_path / f"renamed_{name}.txt").write_bytes((folder / f"{name}.txt").read_bytes())
    moved = make_sequences(
        tmp_path, {"renamed_c": 4, "renamed_a": 6, "renamed_b": 2}, num_workers=5, verify="full"
    )
    assert moved.identity == sequences.identity
    assert contents(moved.training(np.arange(200))) == contents(sequences.training(np.arange(200)))


def test_the_identity_is_json(sequences: SequenceDataset) -> None:
    assert json.loads(json.dumps(sequences.identity)) == sequences.identity
    assert (
        sorted(sequences.identity["sources"].values())
        == sorted(quotas([3, 1, 2], MIXING_BLOCK))
        == [167, 333, 500]
    )


def test_equal_identities_give_equal_sequences(folder: Path) -> None:
    """Weights that differ by less than a sequence per block may still hold out other sequences."""
    options = {"seq_len": 4, "holdout_sequences": 1400}
    even, uneven = (make_sequences(folder, {"a": 1, "c": w}, **options) for w in (1, 1.0018))
    numbers = np.arange(200)
    same = contents(even.training(numbers)) == contents(uneven.training(numbers))
    assert same or even.identity != uneven.identity
