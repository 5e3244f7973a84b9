"""The data order: pure functions of a seed and a sequence number, in explicit integer arithmetic.

`permute` is a keyed bijection on [0, n), and `unpermute` its inverse: a balanced Feistel network with cycle
walking (Black & Rogaway 2002), which costs O(1) per index and no memory. For small n, where a Feistel network
is measurably biased, it sorts random keys instead. `Mixture` maps the number of a training sequence to a
source and a sequence in that source; every block of MIXING_BLOCK training sequences holds each source's exact
quota. numpy's random generators are not used, because their values may change between versions (NEP 19).
Tests pin golden values."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

NEVER = 1 << 62  # number of a sequence that no run reaches
MIXING_BLOCK = 1000  # sequences in a mixing block: weights are exact to 1/1000
ROUNDS = 8  # Feistel rounds; with 4 to 6 the statistics match a random permutation's at n >= 1000
TABLE = 4096  # largest n whose permutation is a table

_U64 = np.uint64


def key_of(*purpose: object) -> int:
    """Return a 64-bit key for a named purpose, such as `key_of("epoch", seed, fingerprint, epoch)`."""
    return int.from_bytes(hashlib.sha256(repr(purpose).encode()).digest()[:8], "little")


def hash64(x: np.ndarray, key: int) -> np.ndarray:
    """Hash uint64 [...] to uint64 [...] by splitmix64's finaliser (Steele et al. 2014), keyed by `key`."""
    with np.errstate(over="ignore"):
        x = (x ^ _U64(key)) + _U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        return x ^ (x >> _U64(31))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Map `index` (int64, in [0, n)) by the permutation of [0, n) that `key` selects."""
    if n <= TABLE:
        return _table(n, key)[index]
    half = _U64(((n - 1).bit_length() + 1) // 2)
    return _walk(index, n, half, lambda left, right: _rounds(left, right, half, _round_keys(key)))


def unpermute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """The inverse of `permute`."""
    if n <= TABLE:
        return np.argsort(_table(n, key), kind="stable")[index]
    half = _U64(((n - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)[::-1]  # a Feistel network backwards is itself with its halves exchanged
    return _walk(index, n, half, lambda left, right: _rounds(right, left, half, keys)[::-1])


def _walk(
    index: np.ndarray,
    n: int,
    half: np.uint64,
    network: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]],
) -> np.ndarray:
    """Apply a network that permutes [0, 4^half), with 4^half >= n, until the result is in [0, n): fewer than
    4 times on average."""
    out = np.array(index, dtype=np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        x = out[outside]
        left, right = network(x >> half, x & ((_U64(1) << half) - _U64(1)))
        out[outside] = (left << half) | right
        outside = out >= _U64(n)
    return out.astype(np.int64)


def _rounds(
    left: np.ndarray, right: np.ndarray, half: np.uint64, keys: Sequence[int]
) -> tuple[np.ndarray, ...]:
    mask = (_U64(1) << half) - _U64(1)
    for round_key in keys:
        left, right = right, left ^ (hash64(right, round_key) & mask)
    return left, right


@lru_cache(maxsize=64)
def _table(n: int, key: int) -> np.ndarray:
    return np.argsort(hash64(np.arange(n, dtype=np.uint64), key), kind="stable")


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(int(k) for k in hash64(np.arange(1, ROUNDS + 1, dtype=np.uint64), key))


def quotas(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` in proportion to `weights` by largest remainder; ties go to the earlier weight."""
    exact = [w / sum(weights) * total for w in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (counts[k] - exact[k], k))
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return counts


def shuffled(local_numbers: np.ndarray, size: int, fingerprint: str) -> np.ndarray:
    """Shuffle the sequences of a source with `size` sequences by a key of its content."""
    return permute(local_numbers, size, key_of("holdout", fingerprint))


def unshuffled(local_numbers: np.ndarray, size: int, fingerprint: str) -> np.ndarray:
    """The inverse of `shuffled`."""
    return unpermute(local_numbers, size, key_of("holdout", fingerprint))


class Proportions:
    """The sources of consecutive sequences in fixed proportions: the sequences from number `first` on.

    Each block of MIXING_BLOCK sequences holds each source's exact quota, in a separate order per block.
    `before`: number of sequences of each source with numbers below `first`."""

    def __init__(self, weights: Sequence[float], seed: int, first: int = 0, before: Sequence[int] = ()):
        self.quotas = quotas(weights, MIXING_BLOCK)
        self.first, self._seed = first, seed
        self._before = np.array(before or [0] * len(self.quotas), dtype=np.int64)
        self._cumulative = np.cumsum([0, *self.quotas])

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence (int64 [n]), and how many sequences with lower numbers have the
        same source (int64 [n]), for sequence numbers (int64 [n]) of at least `first`."""
        block, place = np.divmod(np.asarray(numbers, dtype=np.int64) - self.first, MIXING_BLOCK)
        source, taken = np.zeros_like(block), np.zeros_like(block)
        for b in np.unique(block):
            here = block == b
            sources, before = self._places(int(b))
            source[here] = k = sources[place[here]]
            taken[here] = self._before[k] + int(b) * np.asarray(self.quotas)[k] + before[place[here]]
        return source, taken

    def taken(self, end: int) -> list[int]:
        """Count the sequences of each source among those with numbers below `end`, which is at least
        `first`."""
        whole, rest = divmod(end - self.first, MIXING_BLOCK)
        sources, _ = self.locate(np.arange(end - rest, end))
        counts = np.bincount(sources, minlength=len(self.quotas))
        return (self._before + whole * np.asarray(self.quotas) + counts).tolist()

    def before(self, k: int) -> int:
        """Return how many sequences of source k have numbers below `first`."""
        return int(self._before[k])

    def number(self, k: int, taken: np.ndarray) -> np.ndarray:
        """Return the numbers of the sequences of source k that have `taken` (int64 [n]) sequences of that
        source before them: the inverse of `locate`."""
        block, rank = np.divmod(taken - self._before[k], self.quotas[k])
        place = rank.copy()
        for b in np.unique(block) if self.quotas[k] < MIXING_BLOCK else ():
            places = np.flatnonzero(self._places(int(b))[0] == k)
            place[block == b] = places[rank[block == b]]
        return self.first + block * MIXING_BLOCK + place

    def _places(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each place in block `b`, and how many earlier places in the block have the
        same source."""
        purpose = ("mix", self._seed, b) if self.first == 0 else ("mix", self._seed, self.first, b)
        shuffled = permute(np.arange(MIXING_BLOCK), MIXING_BLOCK, key_of(*purpose))
        sources = np.searchsorted(self._cumulative, shuffled, side="right") - 1
        before = np.empty(MIXING_BLOCK, dtype=np.int64)
        by_source = np.argsort(sources, kind="stable")
        before[by_source] = np.arange(MIXING_BLOCK) - self._cumulative[sources[by_source]]
        return sources, before


class Mixture:
    """Maps the number of a training sequence to a source and a sequence in that source.

    `sizes`: number of sequences in each source. Every epoch of a source contains each of its sequences once,
    in a new order. The orders are keyed by the `fingerprints` of their contents, so a source keeps its order
    if sources are added or rearranged.

    `weights`: of the sequences from number 0 on. `changes`: later weights, by the number of the first
    sequence that they hold for, in ascending order. A source continues where it was, so a change repeats and
    omits no sequence of an epoch. The sequences before a change do not depend on it. A change to the same
    proportions changes nothing."""

    def __init__(
        self,
        sizes: Sequence[int],
        fingerprints: Sequence[str],
        weights: Sequence[float],
        seed: int,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
    ):
        self.sizes, self.fingerprints, self.seed = list(sizes), list(fingerprints), seed
        self.stages = [Proportions(weights, seed)]
        for first, later in changes:
            if quotas(later, MIXING_BLOCK) != self.stages[-1].quotas:  # otherwise, the mixing blocks continue
                self.stages.append(Proportions(later, seed, first, self.stages[-1].taken(first)))
        self._firsts = [stage.first for stage in self.stages]

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source (int64 [n]) and the sequence within that source (int64 [n]) for global sequence
        numbers (int64 [n])."""
        numbers = np.asarray(numbers, dtype=np.int64)
        stage = np.searchsorted(self._firsts, numbers, side="right") - 1
        source, taken = np.zeros_like(numbers), np.zeros_like(numbers)
        for i in np.unique(stage):
            here = stage == i
            source[here], taken[here] = self.stages[i].locate(numbers[here])
        sequence = np.zeros_like(numbers)
        for k in np.unique(source):
            here = source == k
            sequence[here] = self._epoch_sequence(int(k), taken[here])
        return source, sequence

    def taken(self, num_sequences: int) -> list[int]:
        """Count how many of training sequences [0, num_sequences) come from each source."""
        stage = self.stages[bisect_right(self._firsts, num_sequences) - 1]
        return stage.taken(num_sequences)

    def next_use(self, k: int, sequence: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for sequences of source k (int64 [n]), when each comes next after `taken` (int64 [n])
        sequences of that source: how many sequences of the source come before that use, and the global number
        of the use; NEVER if the last weights leave the source out."""
        uses = np.empty_like(sequence)
        epochs, left = taken // self.sizes[k], np.ones(len(sequence), dtype=bool)
        while left.any():  # twice at most: in this epoch or in the next one
            for e in np.unique(epochs[left]):
                here = left & (epochs == e)
                index = unpermute(sequence[here], self.sizes[k], self._epoch_key(k, int(e)))
                uses[here] = e * self.sizes[k] + index
            left &= uses < taken
            epochs = epochs + left
        numbers = np.full_like(uses, NEVER)
        stage = np.searchsorted([stage.before(k) for stage in self.stages], uses, side="right") - 1
        for i in np.unique(stage):
            if self.stages[i].quotas[k]:
                numbers[stage == i] = self.stages[i].number(k, uses[stage == i])
        return uses, numbers

    def _epoch_sequence(self, k: int, taken: np.ndarray) -> np.ndarray:
        epoch, index = np.divmod(taken, self.sizes[k])
        sequence = np.empty_like(index)
        for e in np.unique(epoch):
            here = epoch == e
            sequence[here] = permute(index[here], self.sizes[k], self._epoch_key(k, int(e)))
        return sequence

    def _epoch_key(self, k: int, epoch: int) -> int:
        return key_of("epoch", self.seed, self.fingerprints[k], epoch)
