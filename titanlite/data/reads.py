"""How much a run reads of each source: exact counts at every place of the data order."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction

from titanlite.data.order import Mixture
from titanlite.data.sources import Source


@dataclass(frozen=True)
class SourceReads:
    """The sequences that a run reads of one source. `place`: the number of the source in the mixture."""

    source: Source
    mixture: Mixture
    place: int

    @property
    def epoch(self) -> int:
        """Number of training sequences in an epoch of the source."""
        return self.mixture.sizes[self.place]

    @property
    def limit(self) -> int | None:
        """Number of sequences that max_epochs allows; None without a limit."""
        epochs = self.source.max_epochs
        return math.floor(Fraction(str(epochs)) * self.epoch) if epochs else None

    def taken(self, position: int) -> int:
        """Return how many of the training sequences before `position` are of this source."""
        return self.mixture.taken(position)[self.place]

    def position_after(self, count: int, end: int) -> int | None:
        """Return the position after the source's first `count` sequences, of which the last is the one before
        it; None if the sequences before `end` have fewer."""
        if self.taken(end) < count:
            return None
        return bisect_left(range(end), count, key=self.taken)

    def exceeded_at(self, end: int) -> int | None:
        """Return the number of the first training sequence that exceeds max_epochs; None if there is none
        before `end`."""
        limit = self.limit
        position = None if limit is None else self.position_after(limit + 1, end)
        return None if position is None else position - 1
