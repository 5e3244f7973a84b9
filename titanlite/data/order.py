"""The order of rows: pure functions of a seed and a row number, in explicit integer arithmetic.

`permute` is a keyed bijection on [0, n) -- a balanced Feistel network with cycle walking (Black & Rogaway
2002), O(1) an index and no memory; small n, where a Feistel network is measurably biased, sort random keys
instead. `Mixture` says which source, and which of its rows, training row g is: every block of BLOCK rows
holds each source's exact quota. No numpy random stream is used (their values may change between versions: NEP
19); golden values are pinned in the tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

BLOCK = 1000  # rows in a mixing block: weights are exact to 1/1000, quotas hold in every block
ROUNDS = 8  # Feistel rounds; from 4-6 on its statistics match a random permutation's at n >= 1000
TABLE = 4096  # up to here the permutation is a table

_U64 = np.uint64


def key_of(*parts: object) -> int:
    """A 64-bit key for a named purpose: `key_of("epoch", seed, uid, epoch)`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def hash64(x: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finaliser (Steele et al. 2014), keyed: uint64 [...] to uint64 [...]."""
    with np.errstate(over="ignore"):
        x = (x ^ _U64(key)) + _U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        return x ^ (x >> _U64(31))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """The images of `index` (int64, in [0, n)) under the permutation of [0, n) that `key` names."""
    if n <= TABLE:
        return _table(n, key)[index]
    half = _U64(((n - 1).bit_length() + 1) // 2)
    mask = (_U64(1) << half) - _U64(1)
    out = np.array(index, dtype=np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while (
        outside.any()
    ):  # the network permutes a power of four; walk until back inside [0, n): under 4 tries a row
        x = out[outside]
        left, right = x >> half, x & mask
        for round_key in _round_keys(key):
            left, right = right, left ^ (hash64(right, round_key) & mask)
        out[outside] = (left << half) | right
        outside = out >= _U64(n)
    return out.astype(np.int64)


@lru_cache(maxsize=64)
def _table(n: int, key: int) -> np.ndarray:
    return np.argsort(hash64(np.arange(n, dtype=np.uint64), key), kind="stable")


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(int(k) for k in hash64(np.arange(1, ROUNDS + 1, dtype=np.uint64), key))


def quotas(weights: Sequence[float], total: int) -> list[int]:
    """`total` split in proportion to `weights` by largest remainder; ties go to the earlier one."""
    exact = [w / sum(weights) * total for w in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (counts[k] - exact[k], k))
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return counts


class Mixture:
    """Training row g -> (source k, row r of it), for sources of `sizes` rows each.

    Each source is passed through in full, in a new order every epoch, before any row of it comes again.
    `uids` (content fingerprints) key the orders, so a source keeps its own order when others are added or the
    list is rearranged.
    """

    def __init__(self, sizes: Sequence[int], uids: Sequence[str], weights: Sequence[float], seed: int):
        self.sizes, self.uids, self.seed = list(sizes), list(uids), seed
        self.quotas = quotas(weights, BLOCK)
        self._cumulative = np.cumsum([0, *self.quotas])

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For global row numbers int64 [n]: the source of each, int64 [n], and the row within it, int64
        [n]."""
        block, place = np.divmod(np.asarray(rows, dtype=np.int64), BLOCK)
        source, taken = np.zeros_like(block), np.zeros_like(block)
        for b in np.unique(block):
            here = block == b
            sources, before = self._block(int(b))
            source[here] = k = sources[place[here]]
            taken[here] = int(b) * np.asarray(self.quotas)[k] + before[place[here]]
        row = np.zeros_like(block)
        for k in np.unique(source):
            here = source == k
            row[here] = self._epoch_row(int(k), taken[here])
        return source, row

    def _block(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each place in block `b`: its source, and how many places before it have the same one."""
        shuffled = permute(np.arange(BLOCK), BLOCK, key_of("mix", self.seed, b))
        sources = np.searchsorted(self._cumulative, shuffled, side="right") - 1
        before = np.empty(BLOCK, dtype=np.int64)
        by_source = np.argsort(sources, kind="stable")
        before[by_source] = np.arange(BLOCK) - self._cumulative[sources[by_source]]
        return sources, before

    def taken(self, num_rows: int) -> list[int]:
        """How many of training rows [0, num_rows) come from each source."""
        whole, rest = divmod(num_rows, BLOCK)
        sources, _ = self.locate(np.arange(num_rows - rest, num_rows))
        counts = np.bincount(sources, minlength=len(self.sizes))
        return [whole * quota + int(more) for quota, more in zip(self.quotas, counts)]

    def _epoch_row(self, k: int, taken: np.ndarray) -> np.ndarray:
        epoch, index = np.divmod(taken, self.sizes[k])
        row = np.empty_like(index)
        for e in np.unique(epoch):
            here = epoch == e
            row[here] = permute(index[here], self.sizes[k], key_of("epoch", self.seed, self.uids[k], int(e)))
        return row
