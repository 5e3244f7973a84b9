"""Skipped ranges against a reference that looks at every number, on random ranges."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from tests.support.jobs import make_job
from titanlite.config.component import ConfigError
from titanlite.data.loader import MicroBatches
from titanlite.data.skips import SkippedSequences
from titanlite.data.step_sizes import StepSizes

NUMBERS = 60  # ranges lie in [0, NUMBERS)


def random_ranges(rng: random.Random) -> list[list[int]]:
    """None to six ranges, which may overlap or touch, in any order."""
    ends = [sorted(rng.choices(range(NUMBERS), k=2)) for _ in range(rng.randrange(7))]
    return [[first, min(last, first + rng.choice([0, 1, 5, NUMBERS]))] for first, last in ends]


def numbers_in(ranges: list[list[int]]) -> set[int]:
    return {number for first, last in ranges for number in range(first, last + 1)}


def reference_take(skipped: set[int], cursor: int, count: int) -> list[int]:
    taken = []
    while len(taken) < count:
        if cursor not in skipped:
            taken.append(cursor)
        cursor += 1
    return taken


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_ranges_agree_with_sets_of_numbers(first: int) -> None:
    for seed in range(first, first + 30):
        check_random_ranges(random.Random(seed))


def check_random_ranges(rng: random.Random) -> None:
    ranges, others = random_ranges(rng), random_ranges(rng)
    skipped, numbers = SkippedSequences.merge(ranges), numbers_in(ranges)
    for cursor in range(NUMBERS + 3):
        count = rng.randrange(1, 20)
        taken = reference_take(numbers, cursor, count)
        assert skipped.take(cursor, count) == taken
        assert skipped.advance(cursor, count) == taken[-1] + 1
        assert skipped.next(cursor) == taken[0]
        assert (skipped.take(cursor, 0), skipped.advance(cursor, 0)) == ([], cursor)
        assert skipped.below(cursor).count() == len([n for n in numbers if n < cursor])
        assert (cursor in skipped) == (cursor in numbers)
    assert skipped.count() == len(numbers)
    other = SkippedSequences.merge(others)
    for result, wanted in [(skipped | other, numbers | numbers_in(others)),
                           (skipped - other, numbers - numbers_in(others))]:  # fmt: skip
        assert numbers_in(result.as_lists()) == wanted
        assert SkippedSequences.merge(result.as_lists()) == result, "merged and sorted"


def test_ranges_are_merged() -> None:
    skipped = SkippedSequences.merge([[9, 9], [3, 5], [6, 6], [4, 5], [0, 1]])
    assert skipped.as_lists() == [[0, 1], [3, 6], [9, 9]]
    assert not SkippedSequences.merge([])


def test_a_cursor_may_stay_before_a_range() -> None:
    """So that a range that follows the last sequence taken is jumped over by the next step only."""
    skipped = SkippedSequences.merge([[8, 11]])
    assert (skipped.take(0, 8), skipped.advance(0, 8)) == ([*range(8)], 8)
    assert (skipped.take(8, 2), skipped.advance(8, 2)) == ([12, 13], 14)


def test_the_cost_does_not_grow_with_the_number_of_skipped_sequences() -> None:
    """Numbers that are looked at one by one would take hours."""
    skipped = SkippedSequences.merge([[10, 1 << 60]])
    assert skipped.take(9, 2) == [9, (1 << 60) + 1]
    assert skipped.count() == (1 << 60) - 9


@pytest.mark.parametrize(
    "numbers", [[], [1], [1, 2, 3], [2, 1], [-1, 4], [0, 1 << 62], [0, True], [0, 1.0], 7, "12"]
)
def test_a_malformed_range_is_an_error(numbers: object) -> None:
    with pytest.raises(ValueError, match="is not a range"):
        SkippedSequences.merge([[0, 1], numbers])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "[[0, 1], [5, 4]]",
            r"skip_sequences\.1: \[5, 4\] is not a range \[FIRST, LAST\]: FIRST is above LAST",
        ),
        ("5", r"skip_sequences: expected a list of lists, got 5; write .*='\[\[5\]\]'$"),
        ("[5, 3]", r"skip_sequences: expected a list of lists, got \[5, 3\]; write .*='\[\[5, 3\]\]'$"),
        ("[[0, 1], [5]]", r"skip_sequences\.1: \[5\] is not a range \[FIRST, LAST\] of two numbers"),
        ("[[0, 1], 5]", r"skip_sequences\.1: expected a list, got 5"),
        ("[[0, 1.5]]", r"skip_sequences\.0\.1: expected an integer, got 1\.5"),
    ],
)
def test_the_key_names_the_malformed_range(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^command line, --data\.{message}"):
        make_job(tmp_path, tmp_path, f"--data.skip_sequences={value}")


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 12), (1, 3), (2, 3), (2, 6), (3, 2), (3, 4)])
def test_micro_batches_of_all_ranks_are_the_next_sequences_not_skipped(ranks: int, micro_batch: int) -> None:
    rng = random.Random(ranks)
    for _ in range(20):
        ranges, first = random_ranges(rng), rng.randrange(10)
        expected, per_rank = reference_take(numbers_in(ranges), first, 5 * 12), 12 // micro_batch // ranks
        skipped = SkippedSequences.merge(ranges)
        orders = [
            iter(MicroBatches(first, StepSizes.constant(12), micro_batch, rank, ranks, skipped))
            for rank in range(ranks)
        ]
        for step in range(5):
            parts = [[micro_batch.numbers for micro_batch in islice(order, per_rank)] for order in orders]
            taken = [n for a in range(per_rank) for rank in range(ranks) for n in parts[rank][a]]
            assert taken == expected[step * 12 : (step + 1) * 12]
