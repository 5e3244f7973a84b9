"""The held-out sequences, which validation reads. They are numbered source by source, because a batch of a
validation is of one source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch, make_batch
from titanlite.data.loader import LoaderLayout
from titanlite.data.order import permute, quotas
from titanlite.data.packing import PackedSequences, TokenSequence
from titanlite.data.remote_shards import RemoteTokens, load


@dataclass(frozen=True)
class HeldOutSource:
    """The first `size` sequences of `packed` in the order of the permutation with this key. `name`: for
    metrics. `weight`: of data.validation_sources; equal for sequences that are held out of training."""

    name: str
    packed: PackedSequences
    key: int
    size: int
    weight: float = 1.0


class HeldOut:
    """All held-out sequences: number n is the (n - start)th of the source whose numbers begin at `start`.

    `names`: of the sources, for metrics. `weights`: of the sources; None if they are equal, so that every
    target counts the same."""

    def __init__(self, sources: Sequence[HeldOutSource]):
        self.sources = list(sources)
        self._ends = np.cumsum([0, *(source.size for source in self.sources)])
        self.names = [source.name for source in self.sources]
        weights = [source.weight for source in self.sources]
        self.weights = weights if len(set(weights)) > 1 else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, numbers: np.ndarray) -> list[tuple[PackedSequences, int]]:
        """Return the source of each held-out sequence (int64 [n]), and its number in that source."""
        place = np.searchsorted(self._ends, numbers, side="right") - 1
        local_numbers = np.array(numbers - self._ends[place])
        for k in np.unique(place):
            source, here = self.sources[k], place == k
            local_numbers[here] = permute(local_numbers[here], len(source.packed), source.key)
        return [(self.sources[k].packed, n) for k, n in zip(place.tolist(), local_numbers.tolist())]

    def ranges(self, num_sequences: int) -> list[range]:
        """Return the numbers of each source's sequences in a validation on `num_sequences` sequences, at most
        all: in proportion to the weights or, if they are equal, to the numbers of sequences."""
        sizes = [source.size for source in self.sources]
        counts = split(num_sequences, self.weights or sizes, sizes)
        return [range(start, start + count) for start, count in zip(self._ends.tolist(), counts)]


class ValidationSequences:
    """The sequences that a run validates on, as batches: the base of the sequences of a run. `layout`: is set
    once the number of ranks is known, before `loader` is called. `num_held_out`: number of sequences to
    validate on."""

    layout: LoaderLayout

    def __init__(self, for_validation: HeldOut, seq_len: int, mask_documents: bool):
        self.for_validation, self.seq_len, self._mask_documents = for_validation, seq_len, mask_documents
        self.num_held_out = len(for_validation)

    @property
    def remote(self) -> list[RemoteTokens]:
        """The datasets on a storage that is not the local disk."""
        shards = [source.packed.shards for source in self.for_validation.sources]
        return [dataset for dataset in shards if isinstance(dataset, RemoteTokens)]

    def held_out(self, numbers: np.ndarray) -> list[TokenSequence]:
        """Return held-out sequences by number in [0, num_held_out) (int64 [n])."""
        located = self.for_validation.locate(numbers)
        load(located)
        return [read(*place, "held-out ", number) for number, place in zip(numbers, located)]

    def batch(
        self, numbers: Sequence[int], sequences: Sequence[TokenSequence], num_sequences: int | None = None
    ) -> Batch:
        """Make a batch of sequences and their global numbers, padded to `num_sequences`."""
        return make_batch(
            numbers,
            sequences,
            seq_len=self.seq_len,
            num_sequences=num_sequences,
            with_positions=self._mask_documents,
        )


def read(packed: PackedSequences, local_number: int, kind: str, number: int) -> TokenSequence:
    """Read a sequence by its number in its source. `kind` and its global number are for messages."""
    try:
        return packed[local_number]
    except ConfigError as e:
        raise ConfigError(f"{kind}sequence {number}: {e}") from None


def split(total: int, weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Split `total`, at most the sum of `sizes`, in proportion to `weights`. No share is above its size: the
    other shares get the rest by weight. No share is 0 if its size is not, as far as `total` suffices."""
    counts, others = [0] * len(sizes), [k for k, size in enumerate(sizes) if size]
    while others:
        shares = dict(zip(others, quotas([weights[k] for k in others], total - sum(counts))))
        full = [k for k in others if shares[k] >= sizes[k]]
        for k in full or others:
            counts[k] = min(shares[k], sizes[k])
        others = [k for k in others if k not in full] if full else []
    for k, count in enumerate(counts):
        largest = counts.index(max(counts))
        if not count and sizes[k] and counts[largest] > 1:
            counts[k], counts[largest] = 1, counts[largest] - 1
    return counts
