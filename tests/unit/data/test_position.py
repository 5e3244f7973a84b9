"""Pins that a run may start at any row for the same price: the state is one integer, and the time to the
first batch and the tokens read for it do not grow with the row, also after millions of epochs of a small
source."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

from titanlite.data import order
from titanlite.data.loader import Data, MicroBatches, Rows, SequenceLoader
from titanlite.data.shards import TokenShards
from titanlite.prepare.sources import Text
from titanlite.tokenizers.bytes import Bytes

POSITIONS = (0, 10**6, 10**9, 10**12)
MICRO_BATCH = 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Sources of about 6 rows, 600 rows (tables) and 9,000 rows (networks)."""
    folder, rng = tmp_path_factory.mktemp("position"), random.Random(0)
    paths = [folder / f"{size}.txt" for size in (100, 10_000, 150_000)]
    for path in paths:
        path.write_text("".join(rng.choices("abcdefgh", k=int(path.stem))))
    data = Data(sources=[Text(path=[str(p)]) for p in paths], cache_dir=str(folder / "cache"))
    return data.build(Bytes().build(), seq_len=16, seed=0)


def loader_at(rows: Rows, sequence: int) -> SequenceLoader:
    """A loader that goes on with a sequence."""
    loader = SequenceLoader(rows, MicroBatches(0, MICRO_BATCH, MICRO_BATCH, 0, 1), 0, pin_memory=False)
    loader.load_state_dict({"sequences": sequence})
    return loader


def first_batch_s(rows: Rows, from_row: int) -> float:
    """Seconds of CPU time from a fresh start at a row to its batch; the best of five, nothing remembered
    between them."""
    times = []
    for _ in range(5):
        order._table.cache_clear()
        order._round_keys.cache_clear()
        began = time.process_time()
        next(loader_at(rows, from_row))
        times.append(time.process_time() - began)
    return min(times)


def test_time_to_first_batch_does_not_depend_on_the_row(rows: Rows) -> None:
    first_batch_s(rows, 0)  # imports and maps
    times = {row: first_batch_s(rows, row) for row in POSITIONS}
    assert max(times.values()) < 1, times
    assert max(times.values()) < 20 * max(min(times.values()), 0.005), times


@pytest.mark.parametrize("from_row", POSITIONS)
def test_tokens_read_do_not_depend_on_the_row(
    rows: Rows, from_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, counts = TokenShards.read, []

    def counting(self: TokenShards, start: int, count: int) -> np.ndarray:
        counts.append(count)
        return read(self, start, count)

    monkeypatch.setattr(TokenShards, "read", counting)
    batches = loader_at(rows, from_row)
    for _ in range(3):
        next(batches)
    assert counts == [17] * (3 * MICRO_BATCH)


def test_the_state_is_one_integer(rows: Rows) -> None:
    """From it alone, through JSON, a run goes on where another would be, however far in."""
    for position in POSITIONS:
        running = loader_at(rows, position)
        for _ in range(3):
            next(running)
        state = json.dumps(running.state_dict())
        assert json.loads(state) == {"sequences": position + 3 * MICRO_BATCH}
        resumed = loader_at(rows, 5)
        resumed.load_state_dict(json.loads(state))
        assert next(resumed).sha == next(running).sha


def test_epochs_stay_complete_far_in(rows: Rows) -> None:
    """A thousand rows deep in still hold each row of the smallest source as often as any other, to one."""
    small = min(range(3), key=lambda k: rows.sizes[k])
    assert rows.sizes[small] == 6
    for block in (0, 10**6, 10**9):
        numbers = np.arange(block * order.BLOCK, (block + 1) * order.BLOCK)
        source, row = rows._mixture.locate(numbers)
        counts = np.bincount(row[source == small], minlength=6)
        assert counts.sum() == rows._mixture.quotas[small]
        assert counts.max() - counts.min() <= 2  # an epoch may be cut at both ends
