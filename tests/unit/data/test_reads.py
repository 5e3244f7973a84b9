"""How much a run reads of each source: counts and places against counting sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.data.order import Mixture
from titanlite.data.reads import SourceReads
from titanlite.data.sources import Tokens

SIZES = [130, 7, 400]


def reads_of(changes: list[tuple[int, list[float]]], **source: float) -> list[SourceReads]:
    mixture = Mixture(SIZES, ["a", "b", "c"], [6, 1, 3], 3, changes)
    return [SourceReads(Tokens(path="x", **source), mixture, k) for k in range(3)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1500), st.integers(0, 1500), st.integers(0, 3000))
def test_counts_and_places_equal_those_of_counting(first: int, length: int, end: int) -> None:
    changes = [(first, [0, 1, 1]), (first + length + 1, [1, 0, 0])]
    reads = reads_of(changes)
    sources, _ = reads[0].mixture.locate(np.arange(end))
    for k, source in enumerate(reads):
        positions = np.flatnonzero(sources == k) + 1
        assert source.taken(end) == len(positions)
        for count in (1, SIZES[k], 2 * SIZES[k], len(positions), len(positions) + 1):
            expected = int(positions[count - 1]) if 0 < count <= len(positions) else None
            assert (source.position_after(count, end) if count else None) == expected


@pytest.mark.parametrize("max_epochs", [0.5, 1.0, 2.7])
def test_the_sequence_that_exceeds_max_epochs(max_epochs: float) -> None:
    reads = reads_of([(1000, [0, 1, 1])], max_epochs=max_epochs)
    sources, _ = reads[0].mixture.locate(np.arange(3000))
    for k, source in enumerate(reads):
        epochs = np.cumsum(sources == k) / SIZES[k]
        exceeding = np.flatnonzero(epochs > max_epochs)
        number = source.exceeded_at(3000)
        assert number == (int(exceeding[0]) if len(exceeding) else None)
        if number is not None:
            assert source.exceeded_at(number) is None
            assert source.exceeded_at(number + 1) == number
    assert reads_of([])[0].exceeded_at(3000) is None  # no limit


def test_a_limit_is_exact_in_decimals() -> None:
    mixture = Mixture([100], ["a"], [1], 0)
    assert int(0.29 * 100) == 28  # what binary fractions would make of it
    assert SourceReads(Tokens(path="x", max_epochs=0.29), mixture, 0).limit == 29
