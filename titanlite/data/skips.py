"""Training sequences that a run skips for good, as ranges of global numbers.

The position of a run in the data order is one number, the cursor: the run takes sequences from there on, and
jumps over the skipped ones. All functions are pure and cost O(number of ranges), not O(number of sequences).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

END = 1 << 62  # of skipped numbers, so that the numbers after them are int64, too


@dataclass(frozen=True)
class SkippedSequences:
    """The sequences that a run never trains on."""

    ranges: tuple[tuple[int, int], ...] = ()
    """First and last number of each range. Sorted, and not adjacent: sequences lie between two ranges."""

    @classmethod
    def merge(cls, ranges: Iterable[Sequence[int]]) -> SkippedSequences:
        """Merge ranges that may overlap, in any order. Raises ValueError for a range that is malformed."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(map(checked_range, ranges)):
            if merged and first <= merged[-1][1] + 1:
                first, last = merged[-1][0], max(merged.pop()[1], last)
            merged.append((first, last))
        return cls(tuple(merged))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self.ranges)

    def __or__(self, other: SkippedSequences) -> SkippedSequences:
        return SkippedSequences.merge(self.ranges + other.ranges)

    def __sub__(self, other: SkippedSequences) -> SkippedSequences:
        left = []
        for begin, last in self.ranges:
            for other_first, other_last in other.ranges:
                if other_last >= begin and other_first <= last:
                    left.append((begin, other_first - 1))
                    begin = other_last + 1
            left.append((begin, last))
        return SkippedSequences(tuple((first, last) for first, last in left if first <= last))

    def below(self, number: int) -> SkippedSequences:
        """The skipped sequences before `number`."""
        return SkippedSequences(tuple((a, min(b, number - 1)) for a, b in self.ranges if a < number))

    def count(self) -> int:
        """Number of skipped sequences."""
        return sum(last - first + 1 for first, last in self.ranges)

    def advance(self, cursor: int, count: int) -> int:
        """The cursor after `count` sequences are taken from `cursor` on: the number after the last one, even
        if that number is skipped. It is `cursor` for a `count` of 0."""
        end = cursor + count
        for first, last in self._ranges_from(cursor):
            first = max(first, cursor)
            if first >= end:
                break
            end += last - first + 1
        return end

    def take(self, cursor: int, count: int) -> list[int]:
        """The numbers of the next `count` sequences from `cursor` on that are not skipped."""
        end = self.advance(cursor, count)
        numbers: list[int] = []
        for first, last in self._ranges_from(cursor):
            if first >= end:
                break
            numbers += range(cursor, first)
            cursor = last + 1
        return numbers + list(range(cursor, end))

    def next(self, cursor: int) -> int:
        """The number of the next sequence from `cursor` on that is not skipped."""
        return self.advance(cursor, 1) - 1

    def _ranges_from(self, cursor: int) -> tuple[tuple[int, int], ...]:
        """The ranges that do not end before `cursor`."""
        return self.ranges[bisect_left(self.ranges, cursor, key=itemgetter(1)) :]

    def as_lists(self) -> list[list[int]]:
        """The ranges as plain lists, which `merge` reads."""
        return [list(numbers) for numbers in self.ranges]


def checked_range(numbers: Sequence[int]) -> tuple[int, int]:
    """A range as its first and last number. Raises ValueError unless it is a list of two global numbers of
    which the first is not above the last."""
    if not isinstance(numbers, (list, tuple)) or [type(number) for number in numbers] != [int, int]:
        raise ValueError(f"{numbers!r} is not a range [FIRST, LAST] of two numbers")
    first, last = numbers
    if first > last:
        raise ValueError(f"{numbers} is not a range [FIRST, LAST]: FIRST is above LAST")
    if not (first >= 0 and last < END):
        raise ValueError(f"{numbers} is not a range [FIRST, LAST] with 0 <= FIRST <= LAST < 2^62")
    return first, last
