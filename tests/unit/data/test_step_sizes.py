"""StepSizes: batch sizes that depend on the position in the data order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.data.step_sizes import StepSize, StepSizes

SIZES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=5)


def sizes_of(columns: list[tuple[int, int]]) -> StepSizes:
    """Sizes with these lengths (in sequences) and batch sizes."""
    firsts = [sum(length for length, _ in columns[:i]) for i in range(len(columns))]
    return StepSizes([StepSize(first, batch) for first, (_, batch) in zip(firsts, columns)])


def positions(sizes: StepSizes, start: int, num_steps: int) -> list[int]:
    """The positions before and after each step, taken step by step."""
    starts = [start]
    for _ in range(num_steps):
        starts.append(starts[-1] + sizes.at(starts[-1]).global_batch_size)
    return starts


@given(SIZES, st.integers(0, 150), st.integers(0, 40))
def test_positions_are_those_of_single_steps(
    columns: list[tuple[int, int]], start: int, num_steps: int
) -> None:
    sizes = sizes_of(columns)
    one_by_one = positions(sizes, start, num_steps)
    assert [sizes.position_after(n, start) for n in range(num_steps + 1)] == one_by_one


@given(SIZES, st.integers(0, 150), st.integers(0, 200))
def test_num_steps_counts_whole_steps(columns: list[tuple[int, int]], start: int, length: int) -> None:
    sizes = sizes_of(columns)
    num_steps = sizes.num_steps(start + length, start)
    assert sizes.position_after(num_steps, start) <= start + length
    assert sizes.position_after(num_steps + 1, start) > start + length


@given(SIZES, st.integers(0, 20), st.integers(0, 20))
def test_a_run_may_be_interrupted_anywhere(columns: list[tuple[int, int]], before: int, after: int) -> None:
    sizes = sizes_of(columns)
    assert sizes.position_after(after, sizes.position_after(before)) == sizes.position_after(before + after)


def test_a_step_belongs_to_the_size_of_its_first_sequence() -> None:
    sizes = StepSizes([StepSize(0, 4), StepSize(10, 6, num_splits=2)])
    assert positions(sizes, 0, 5) == [0, 4, 8, 12, 18, 24]
    assert [sizes.at(n).num_splits for n in (0, 8, 9, 10, 12)] == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("firsts", [[], [1], [0, 5, 5], [0, 7, 3]])
def test_sizes_out_of_order_are_refused(firsts: list[int]) -> None:
    with pytest.raises(ValueError, match="begin with"):
        StepSizes([StepSize(first, 1) for first in firsts])


@given(SIZES, st.integers(0, 150), st.integers(0, 200))
def test_sizes_from_a_sequence_on_are_numbered_anew(
    columns: list[tuple[int, int]], first: int, length: int
) -> None:
    sizes = sizes_of(columns)
    later = sizes.starting_at(first)
    assert later.num_steps(length) == sizes.num_steps(first + length, first)
    assert [later.at(n).global_batch_size for n in range(length)] == [
        sizes.at(first + n).global_batch_size for n in range(length)
    ]
