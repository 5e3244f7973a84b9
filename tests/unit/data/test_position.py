"""Pins that a run may start at any sequence for the same price: the state is one integer, and the time to the
first batch and the tokens read for it do not grow with the sequence, also after millions of epochs of a small
source."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

from titanlite.data import order
from titanlite.data.dataset import Data, SequenceDataset
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.shards import TokenShards
from titanlite.data.step_sizes import StepSizes
from titanlite.data.text_sources import Text
from titanlite.tokenizers.bytes import Bytes

POSITIONS = (0, 10**6, 10**9, 10**12)
MICRO_BATCH = 8


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> SequenceDataset:
    """Sources of about 6 sequences, 600 sequences (tables) and 9,000 sequences (networks)."""
    folder, rng = tmp_path_factory.mktemp("position"), random.Random(0)
    paths = [folder / f"{size}.txt" for size in (100, 10_000, 150_000)]
    for path in paths:
        path.write_text("".join(rng.choices("abcdefgh", k=int(path.stem))))
    data = Data(sources=[Text(path=[str(p)]) for p in paths], cache_dir=str(folder / "cache"))
    return data.build(Bytes().build(), seq_len=16, seed=0)


def loader_at(sequences: SequenceDataset, sequence: int) -> SequenceLoader:
    """A loader that continues at a sequence."""
    loader = SequenceLoader(
        sequences, MicroBatches(0, StepSizes.constant(MICRO_BATCH), MICRO_BATCH, 0, 1), 0, pin_memory=False
    )
    loader.load_state_dict({"sequences": sequence})
    return loader


def first_batch_s(sequences: SequenceDataset, first_sequence: int) -> float:
    """Seconds of CPU time from a fresh start at a sequence to its batch; the best of five, nothing remembered
    between them."""
    times = []
    for _ in range(5):
        order._table.cache_clear()
        order._round_keys.cache_clear()
        began = time.process_time()
        next(loader_at(sequences, first_sequence))
        times.append(time.process_time() - began)
    return min(times)


def test_time_to_first_batch_does_not_depend_on_the_sequence(sequences: SequenceDataset) -> None:
    first_batch_s(sequences, 0)  # imports and maps
    times = {sequence: first_batch_s(sequences, sequence) for sequence in POSITIONS}
    assert max(times.values()) < 1, times
    assert max(times.values()) < 20 * max(min(times.values()), 0.005), times


@pytest.mark.parametrize("first_sequence", POSITIONS)
def test_tokens_read_do_not_depend_on_the_sequence(
    sequences: SequenceDataset, first_sequence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, counts = TokenShards.read, []

    def counting(self: TokenShards, start: int, count: int) -> np.ndarray:
        counts.append(count)
        return read(self, start, count)

    monkeypatch.setattr(TokenShards, "read", counting)
    batches = loader_at(sequences, first_sequence)
    for _ in range(3):
        next(batches)
    assert counts == [17] * (3 * MICRO_BATCH)


def test_the_state_is_one_integer(sequences: SequenceDataset) -> None:
    """A loader with this state, written to JSON and read back, continues at any position as the original
    does."""
    for position in POSITIONS:
        running = loader_at(sequences, position)
        for _ in range(3):
            next(running)
        state = json.dumps(running.state_dict())
        assert json.loads(state) == {"sequences": position + 3 * MICRO_BATCH}
        resumed = loader_at(sequences, 5)
        resumed.load_state_dict(json.loads(state))
        assert next(resumed).hash == next(running).hash


def test_epochs_stay_complete_far_in(sequences: SequenceDataset) -> None:
    """A thousand sequences deep in still hold each sequence of the smallest source as often as any other, to
    one."""
    small = min(range(3), key=lambda k: sequences.sizes[k])
    assert sequences.sizes[small] == 6
    for block in (0, 10**6, 10**9):
        numbers = np.arange(block * order.MIXING_BLOCK, (block + 1) * order.MIXING_BLOCK)
        source, sequence = sequences._mixture.locate(numbers)
        counts = np.bincount(sequence[source == small], minlength=6)
        assert counts.sum() == sequences._mixture.stages[0].quotas[small]
        assert counts.max() - counts.min() <= 2  # an epoch may be cut at both ends
