"""Pins how many sequences of each source a validation reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.data.held_out import split


@pytest.mark.parametrize(
    ("total", "weights", "sizes", "counts"),
    [
        (60, [187, 562], [187, 562], [15, 45]),  # by size
        (12, [3, 1], [100, 100], [9, 3]),  # by weight
        (12, [3, 1], [4, 100], [4, 8]),  # a small source leaves its share to the others
        (12, [6, 2, 1, 1], [2, 100, 3, 100], [2, 5, 3, 2]),  # by weight among the others, too
        (4, [1000, 1, 1], [9, 9, 9], [2, 1, 1]),  # at least one of each
        (2, [1000, 1, 1], [9, 9, 9], [1, 1, 0]),  # as far as they suffice
        (4, [1, 1, 1], [4, 0, 4], [2, 0, 2]),
        (0, [1, 2], [5, 5], [0, 0]),
    ],
)
def test_splits(total: int, weights: list[float], sizes: list[int], counts: list[int]) -> None:
    assert split(total, weights, sizes) == counts


@given(st.data())
def test_a_split_is_complete_and_within_the_sizes(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    weights = [data.draw(st.floats(1e-6, 1e6)) for _ in sizes]
    total = data.draw(st.integers(0, sum(sizes)))
    counts = split(total, weights, sizes)
    assert sum(counts) == total
    assert all(0 <= count <= size for count, size in zip(counts, sizes))
    if total >= sum(size > 0 for size in sizes):
        assert all(count or not size for count, size in zip(counts, sizes))
    assert split(sum(sizes), weights, sizes) == sizes
