"""The sizes of the steps of a run, as a pure function of the position in the data order.

Position means the number of the first sequence that a step takes. A step belongs to the size of its first
sequence, so the last step of one size may take sequences beyond the number at which the next size begins.
Sequences that are skipped for good do not count here, except in `without`: with them, a step reaches
further."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from titanlite.data.skips import SkippedSequences


@dataclass(frozen=True)
class StepSize:
    """The steps that begin with sequence `first_sequence` or a later one take `global_batch_size` sequences
    each. `num_splits`: each sequence is trained as this many shorter ones."""

    first_sequence: int
    global_batch_size: int
    num_splits: int = 1


class StepSizes:
    """The sizes of all steps. `sizes` are ascending; the first begins with sequence 0."""

    def __init__(self, sizes: Sequence[StepSize]):
        self.sizes = list(sizes)
        self._firsts = [size.first_sequence for size in self.sizes]
        if self._firsts[:1] != [0] or self._firsts != sorted(set(self._firsts)):
            raise ValueError(f"sizes that begin with the sequences {self._firsts}")

    @classmethod
    def constant(cls, global_batch_size: int) -> StepSizes:
        """Return the sizes of a run whose steps all have the same size."""
        return cls([StepSize(0, global_batch_size)])

    def starting_at(self, first: int) -> StepSizes:
        """Return the sizes with the sequences numbered from `first` on."""
        later = [size for size in self.sizes if size.first_sequence > first]
        sizes = [replace(self.at(first), first_sequence=first), *later]
        return StepSizes([replace(size, first_sequence=size.first_sequence - first) for size in sizes])

    def without(self, skipped: SkippedSequences) -> StepSizes:
        """Return the sizes with only those sequences numbered that are not skipped."""
        firsts = [first - skipped.below(first).count() for first in self._firsts]
        sizes = {first: replace(size, first_sequence=first) for first, size in zip(firsts, self.sizes)}
        return StepSizes(list(sizes.values()))

    def at(self, sequence: int) -> StepSize:
        """Return the size of a step whose first sequence is `sequence`."""
        return self.sizes[bisect_right(self._firsts, sequence) - 1]

    def position_after(self, num_steps: int, start: int = 0) -> int:
        """Return the position after `num_steps` steps, the first of which takes sequence `start`."""
        for size, first, count in self._runs(start):
            if count is None or num_steps <= count:
                return first + num_steps * size.global_batch_size
            num_steps -= count
        raise AssertionError("the last size has no end")

    def num_steps(self, end: int, start: int = 0) -> int:
        """Return how many whole steps from `start` on take only sequences below `end`."""
        total = 0
        for size, first, count in self._runs(start):
            whole = max(end - first, 0) // size.global_batch_size
            if count is None or whole < count:
                return total + whole
            total += count
        raise AssertionError("the last size has no end")

    def _runs(self, start: int) -> Iterator[tuple[StepSize, int, int | None]]:
        """Yield the size, the first sequence and the number of steps of each run of equal steps from `start`
        on; the last run has no end (None)."""
        while True:
            i = bisect_right(self._firsts, start) - 1
            if i + 1 == len(self.sizes):
                yield self.sizes[i], start, None
                return
            size = self.sizes[i]
            count = -(-(self._firsts[i + 1] - start) // size.global_batch_size)
            yield size, start, count
            start += count * size.global_batch_size
