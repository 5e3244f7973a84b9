"""Pins what titanlite adds to torch's DataLoader: a state that counts the sequences given out over all ranks,
exact within a step and whatever is prefetched, from which a run goes on with other ranks, workers and batch
sizes at no cost."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.tiers import full
from titanlite.data.batch import sequence_hash
from titanlite.data.dataset import Data, SequenceDataset
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.skips import SkippedSequences
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.data.text_sources import Text
from titanlite.tokenizers.bytes import Bytes

steps_of = StepSizes.constant

STEP = 24  # sequences
U64 = 1 << 64


@pytest.fixture(autouse=True)
def torchs_handler_goes() -> Iterator[None]:
    """A DataLoader that this thread iterates over leaves a handler of SIGCHLD, which would raise in the midst
    of later tests that kill their workers. titanlite's loader iterates in a thread, where torch sets none."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> SequenceDataset:
    """Two sources of random letters, so that no two sequences are equal."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    paths = [folder / "a.txt", folder / "b.txt"]
    for path in paths:
        path.write_text("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=20_000)))
    data = Data(sources=[Text(path=[str(p)]) for p in paths], cache_dir=str(folder / "cache"))
    return data.build(Bytes().build(), seq_len=16, seed=0)


def loaders(
    sequences: SequenceDataset,
    first: int,
    ranks: int,
    micro_batch: int,
    num_workers: int = 0,
    skipped: SkippedSequences | None = None,
) -> list[SequenceLoader]:
    """A loader for each rank, with the given state."""
    made = []
    for rank in range(ranks):
        order = MicroBatches(0, steps_of(STEP), micro_batch, rank, ranks)
        made.append(SequenceLoader(sequences, order, num_workers, pin_memory=False))
        made[-1].load_state_dict({"sequences": first}, skipped)
    return made


def sha_of(sequences: SequenceDataset, first: int, last: int) -> int:
    """Hash of sequences [first, last), read one at a time."""
    return (
        sum(sequence_hash(g, sequences.training(np.asarray([g]))[0].tokens) for g in range(first, last)) % U64
    )


def as_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_gives_what_torchs_data_loader_gives(sequences: SequenceDataset, num_workers: int) -> None:
    order = MicroBatches(100, steps_of(STEP), 3, 1, 2)
    plain = DataLoader(sequences, batch_sampler=order, num_workers=num_workers, collate_fn=as_is)
    ours = SequenceLoader(sequences, order, num_workers, pin_memory=False)
    for mine, theirs in islice(zip(ours, plain), 12):
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.targets, theirs.targets)
        assert mine.hash == theirs.hash


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 3), full(1, 2), full(4, 6)])
def test_the_state_counts_what_all_ranks_handed_out_and_not_what_is_prefetched(
    sequences: SequenceDataset, ranks: int, micro_batch: int, num_workers: int
) -> None:
    group = loaders(sequences, 7, ranks, micro_batch, num_workers)
    for taken in range(6):  # the steps end between them
        expected = {"sequences": 7 + taken * micro_batch * ranks}
        assert [loader.state_dict() for loader in group] == [expected] * ranks
        for loader in group:
            next(loader)


# ranks, micro-batch, workers, and how many micro-batches each rank takes: some stop in the middle of a step
PHASES = [(1, 4, 0, 5), (2, 3, 1, 3), (1, 8, 2, 2), (3, 8, 0, 1)]


def test_a_run_goes_on_anywhere_with_other_ranks_workers_and_batches(sequences: SequenceDataset) -> None:
    consumed, first = 990, 990  # over a change of the mixing block
    for ranks, micro_batch, num_workers, taken in PHASES:
        group = loaders(sequences, consumed, ranks, micro_batch, num_workers)
        batches = [batch for loader in group for batch in islice(loader, taken)]
        states = [json.loads(json.dumps(loader.state_dict())) for loader in group]
        assert states == [states[0]] * ranks
        last = states[0]["sequences"]
        assert last == consumed + sum(len(batch.inputs) for batch in batches)
        assert sum(batch.hash for batch in batches) % U64 == sha_of(sequences, consumed, last)
        assert sum(batch.hash for batch in batches) % U64 != sha_of(
            sequences, consumed + 1, last + 1
        )  # the control
        consumed = last
    assert consumed == first + sum(ranks * size * taken for ranks, size, _, taken in PHASES)


@pytest.mark.full
def test_a_state_is_taken_up_by_a_loader_that_runs(sequences: SequenceDataset) -> None:
    """The workers end, and their prefetched batches are dropped."""
    loader = SequenceLoader(sequences, MicroBatches(0, steps_of(STEP), 4, 0, 1), 2, pin_memory=False)
    later = [next(loader).hash for _ in range(4)][2:]
    before = multiprocessing.active_children()
    loader.load_state_dict({"sequences": 8})
    assert loader.state_dict() == {"sequences": 8}
    assert [next(loader).hash for _ in range(2)] == later
    assert not [process for process in before if process.is_alive()]


# ranges at the start of a step, inside one, and longer than a step of 24 sequences
SKIPPED = SkippedSequences.merge([[990, 995], [1010, 1010], [1030, 1080], [1200, 1300]])


def test_skipped_sequences_are_left_out_with_any_ranks_workers_and_batches(
    sequences: SequenceDataset,
) -> None:
    position, numbers = 990, (number for number in count(990) if number not in SKIPPED)
    for ranks, micro_batch, num_workers, taken in PHASES:
        group = loaders(sequences, position, ranks, micro_batch, num_workers, SKIPPED)
        batches = [batch for loader in group for batch in islice(loader, taken)]
        wanted = list(islice(numbers, ranks * micro_batch * taken))
        shas = [sha_of(sequences, number, number + 1) for number in wanted]
        assert sum(batch.hash for batch in batches) % U64 == sum(shas) % U64
        position = wanted[-1] + 1
        assert [loader.state_dict() for loader in group] == [{"sequences": position}] * ranks
    assert position > 1081, "the phases pass three ranges"


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_runs_goes_back_and_skips_from_there_on(
    sequences: SequenceDataset, num_workers: int
) -> None:
    (loader,) = loaders(sequences, 900, 1, 4, num_workers)
    first = [next(loader).hash for _ in range(30)]
    loader.load_state_dict({"sequences": 980}, SKIPPED)
    assert loader.state_dict() == {"sequences": 980}
    later = [next(loader).hash for _ in range(5)]
    assert later[:2] == first[20:22] == [sha_of(sequences, n, n + 4) for n in (980, 984)]
    assert later[2] == (sha_of(sequences, 988, 990) + sha_of(sequences, 996, 998)) % U64
    assert later[3:] == [sha_of(sequences, n, n + 4) for n in (998, 1002)]
    assert loader.state_dict() == {"sequences": 1006}
    loader.load_state_dict({"sequences": 988})
    assert next(loader).hash == later[2], "ranges stay unless others are given"


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "num_workers"), [(1, 4, 0), (2, 2, 0), (4, 1, 0), (2, 4, 1)]
)
def test_a_step_has_the_size_at_its_first_sequence_that_is_not_skipped(
    sequences: SequenceDataset, ranks: int, micro_batch: int, num_workers: int
) -> None:
    """The position of the third step, 16, has the first size, but its first sequence, 31, has the second."""
    sizes = StepSizes([StepSize(0, 8), StepSize(24, 16, num_splits=2), StepSize(50, 8)])
    skipped = SkippedSequences.merge([[16, 30], [40, 41]])
    orders = [MicroBatches(0, sizes, micro_batch, rank, ranks, skipped) for rank in range(ranks)]
    group = [SequenceLoader(sequences, order, num_workers, pin_memory=False) for order in orders]
    expected = [(0, 8, 8), (8, 16, 8), (31, 49, 16), (49, 65, 16), (65, 73, 8)]
    for first, end, size in expected:
        steps = [loader.next_step(torch.device("cpu")) for loader in group]
        assert {step.global_batch_size for step, _ in steps} == {size}
        batches = [batch for _, batches in steps for batch in batches]
        assert {batch.inputs.shape[1] for batch in batches} == {8 if size == 16 else 16}
        wanted = [number for number in range(first, end) if number not in skipped]
        shas = [sha_of(sequences, number, number + 1) for number in wanted]
        assert sum(batch.hash for batch in batches) % U64 == sum(shas) % U64
        assert [loader.state_dict() for loader in group] == [{"sequences": end}] * ranks
