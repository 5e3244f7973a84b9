"""Filters: steps of `titanlite prepare` that remove documents, in the order of their `[[filters]]` tables.

A step either judges a document by itself (`FilterFunction`) or compares it with all others (`LshSignature`:
documents that share a value in any band are one, and the first of them in the corpus stays). Nothing here
knows a language: words are what blanks separate. The defaults are Gopher's (Rae et al. 2021, arXiv
2112.11446, table A1)."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titanlite.config.component import Component, ConfigError
from titanlite.data.order import hash64, key_of

FilterFunction = Callable[[str], str | None]  # why the document is removed, or None


@dataclass(frozen=True)
class LshSignature:
    """`of` gives a document's signature: uint64 [count]."""

    count: int
    of: Callable[[str], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Filter(Component):
    """Kind: `[[filters]] name = ...`."""

    def build(self) -> FilterFunction | LshSignature:
        """The step. Raises ConfigError if a library that it needs is missing."""
        raise NotImplementedError


def _check_shares(section: Filter, *keys: str) -> None:
    for key in keys:
        for share in np.atleast_1d(getattr(section, key)).tolist():
            if not 0 <= share <= 1:
                raise ConfigError(f"{share} is not a share: between 0 and 1", key)


@dataclass(frozen=True, kw_only=True)
class Length(Filter, name="length"):
    """Removes documents that are too short or too long."""

    min_characters: int = 0
    """Fewer are too few."""
    max_characters: int = 0
    """More are too many; 0: no limit."""
    min_words: int = 50
    """Fewer are too few; 0 for scripts that do not separate words by blanks."""
    max_words: int = 100_000
    """More are too many; 0: no limit."""

    def __post_init__(self) -> None:
        for unit in ("characters", "words"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low < 0 or (high != 0 and high < low):
                raise ConfigError(f"{low} to {high} is no range", f"min_{unit}")

    def build(self) -> FilterFunction:
        def judge(text: str) -> str | None:
            words = len(text.split())
            for count, unit, low, high in (
                (len(text), "characters", self.min_characters, self.max_characters),
                (words, "words", self.min_words, self.max_words),
            ):
                if count < low:
                    return f"{count} {unit}, fewer than {low}"
                if high and count > high:
                    return f"{count} {unit}, more than {high}"
            return None

        return judge


@dataclass(frozen=True, kw_only=True)
class MeanWordLength(Filter, name="mean_word_length"):
    """Removes documents whose words are on average too short or too long to be prose."""

    min: float = 3.0
    """Characters; less is too short."""
    max: float = 10.0
    """Characters; more is too long."""

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise ConfigError(f"{self.min:g} to {self.max:g} is no range", "min")

    def build(self) -> FilterFunction:
        def judge(text: str) -> str | None:
            words = text.split()
            mean = sum(map(len, words)) / max(len(words), 1)
            inside = self.min <= mean <= self.max
            return None if inside else f"mean word length {mean:.2f}, outside {self.min:g} to {self.max:g}"

        return judge


@dataclass(frozen=True, kw_only=True)
class Alphabetic(Filter, name="alphabetic"):
    """Removes documents in which too few words hold a letter (of any alphabet)."""

    min_share: float = 0.8
    """Share of the words with at least one letter; less is too little."""

    def __post_init__(self) -> None:
        _check_shares(self, "min_share")

    def build(self) -> FilterFunction:
        def judge(text: str) -> str | None:
            words = text.split()
            share = sum(any(map(str.isalpha, w)) for w in words) / max(len(words), 1)
            return _below(share, self.min_share, "of the words hold a letter")

        return judge


@dataclass(frozen=True, kw_only=True)
class Symbols(Filter, name="symbols"):
    """Removes documents in which a symbol, such as the hash sign or the ellipsis, is too frequent. Each
    symbol is counted by itself, as in Gopher's rules."""

    symbols: list[str] = field(default_factory=lambda: ["#", "..."])
    """Symbols to count. The one character \u2026 counts as three dots."""
    max_share: float = 0.1
    """Occurrences of one symbol per word of the document. More is too much."""

    def __post_init__(self) -> None:
        _check_shares(self, "max_share")
        if not self.symbols or not all(self.symbols):
            raise ConfigError("give at least one symbol, and none empty", "symbols")

    def build(self) -> FilterFunction:
        symbols = [symbol.replace("\u2026", "...") for symbol in self.symbols]

        def judge(text: str) -> str | None:
            num_words, text = max(len(text.split()), 1), text.replace("\u2026", "...")
            counts = {symbol: text.count(symbol) for symbol in symbols}
            most = max(counts, key=counts.__getitem__)
            what = f"{most!r} per word"
            return _above(counts[most] / num_words, self.max_share, what, percent=False)

        return judge


@dataclass(frozen=True, kw_only=True)
class RepeatedLines(Filter, name="repeated_lines"):
    """Removes documents that repeat their own lines: menus, boilerplate, loops."""

    max_line_share: float = 0.3
    """Share of the lines that came before in the document; more is too much."""
    max_character_share: float = 0.2
    """Share of the characters that stand in such lines; more is too much."""

    def __post_init__(self) -> None:
        _check_shares(self, "max_line_share", "max_character_share")

    def build(self) -> FilterFunction:
        def judge(text: str) -> str | None:
            lines = [line for line in map(str.strip, text.splitlines()) if line]
            repeats = len(lines) - len(set(lines))
            characters = sum(map(len, lines)) - sum(map(len, set(lines)))
            return _above(repeats / max(len(lines), 1), self.max_line_share, "of the lines are repeats") or (
                _above(
                    characters / max(sum(map(len, lines)), 1),
                    self.max_character_share,
                    "of the characters are in repeated lines",
                )
            )

        return judge


@dataclass(frozen=True, kw_only=True)
class RepeatedNGrams(Filter, name="repeated_ngrams"):
    """Removes documents that repeat their own phrases of n words."""

    max_top_share: list[float] = field(default_factory=lambda: [0.20, 0.18, 0.16])
    """Share of the characters that the commonest 2-, 3-, 4-gram (and so on) covers, counting overlaps again;
    more is too much."""
    max_repeated_share: list[float] = field(default_factory=lambda: [0.15, 0.14, 0.13, 0.12, 0.11, 0.10])
    """Share of the characters inside 5-, 6-, ... 10-grams (and so on) that came before; more is too much."""

    def __post_init__(self) -> None:
        _check_shares(self, "max_top_share", "max_repeated_share")

    def build(self) -> FilterFunction:
        def judge(text: str) -> str | None:
            words = text.split()
            lengths, hashes = np.array([len(w) for w in words], dtype=np.int64), word_hashes(words)
            total = max(int(lengths.sum()), 1)
            for n, limit in enumerate(self.max_top_share, 2):
                if len(words) > n:
                    grams = ngram_hashes(hashes, n)
                    _, first, counts = np.unique(grams, return_index=True, return_counts=True)
                    top = int(counts.max())
                    sizes = np.convolve(lengths, np.ones(n, dtype=np.int64), "valid")
                    covered = top * int(
                        sizes[first[counts == top]].max()
                    )  # of equally common ones the longest
                    what = f"of the characters are one {n}-gram"
                    if top > 1 and (reason := _above(covered / total, limit, what)):
                        return reason
            for n, limit in enumerate(self.max_repeated_share, 5):
                if len(words) > n:
                    covered = int(lengths[_repeated(ngram_hashes(hashes, n), n)].sum())
                    what = f"of the characters are in repeated {n}-grams"
                    if reason := _above(covered / total, limit, what):
                        return reason
            return None

        return judge


@dataclass(frozen=True, kw_only=True)
class ExactDuplicates(Filter, name="exact_duplicates"):
    """Removes all but the first of documents with equal text (blanks at both ends aside)."""

    def build(self) -> LshSignature:
        def of(text: str) -> np.ndarray:
            digest = hashlib.blake2b(text.strip().encode(), digest_size=8).digest()
            return np.frombuffer(digest, dtype="<u8")

        return LshSignature(1, of)


@dataclass(frozen=True, kw_only=True)
class NearDuplicates(Filter, name="near_duplicates"):
    """Removes all but the first of documents that share most of their phrases, by MinHash (Broder 1997) with
    locality-sensitive hashing. Two documents whose sets of n-grams have Jaccard similarity s are found with
    probability 1 - (1 - s^band_size)^num_bands; with the defaults (FineWeb's) 77% at s = 0.75, 99% at 0.85,
    1% at 0.4. Whatever is linked through a third one is one group."""

    ngram: int = 5
    """Words a phrase. Each character of scripts without blanks counts as a word."""
    num_bands: int = 14
    """Groups of hashes; one that agrees is enough."""
    band_size: int = 8
    """Hashes in a group; all must agree."""

    def __post_init__(self) -> None:
        for key in ("ngram", "num_bands", "band_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{getattr(self, key)} is below 1", key)

    def build(self) -> LshSignature:
        try:
            import regex
            from datasketch import MinHash
        except ImportError:
            raise ConfigError(
                "near_duplicates needs datasketch and regex: pip install 'titanlite[data]'", "filters"
            ) from None
        hashes: dict[str, Any] = {"num_perm": self.num_bands * self.band_size, "hashfunc": int}
        blank = MinHash(**hashes, seed=1, scheme="affine32")

        ascii_words = re.compile(r"\w+", re.ASCII).findall  # the same where it can be used, and faster
        any_words = regex.compile(WORDS, regex.V1).findall

        def of(text: str) -> np.ndarray:
            lower = text.lower()
            found = ascii_words(lower) if text.isascii() else any_words(lower)
            words = word_hashes(found or [c for c in text if not c.isspace()])
            grams = np.unique(ngram_hashes(words, min(self.ngram, max(len(words), 1))) >> np.uint64(32))
            sketch = blank.copy()
            sketch.update_batch(grams.tolist())
            bands = sketch.hashvalues.reshape(self.num_bands, self.band_size).astype(np.uint64)
            keys = np.arange(self.num_bands, dtype=np.uint64)  # a band matches only itself
            for column in bands.T:
                keys = hash64(keys ^ column, 0)
            return keys

        return LshSignature(self.num_bands, of)


# Runs of letters, digits and the marks on them; of scripts without blanks between words every character.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
WORDS = rf"[{_UNSPACED}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]+"


def word_hashes(words: Sequence[str]) -> np.ndarray:
    """A hash of each word: uint64 [len(words)]. Equal on every machine, unlike Python's own."""
    known = {w: zlib.crc32(w.encode()) for w in set(words)}
    return hash64(np.fromiter((known[w] for w in words), np.uint64, len(words)), key_of("word"))


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """A hash of each run of `n` words: uint64 [len(words) - n + 1]."""
    grams = np.zeros(max(len(words) - n + 1, 0), dtype=np.uint64)
    for i in range(n):
        grams = hash64(grams ^ words[i : i + len(grams)], i)
    return grams


def _repeated(grams: np.ndarray, n: int) -> np.ndarray:
    """Which words stand in an n-gram that came before: bool [len(grams) + n - 1]."""
    order = np.argsort(grams, kind="stable")
    again = np.zeros(len(grams) + n - 1, dtype=np.int64)
    again[order[1:][grams[order[1:]] == grams[order[:-1]]]] = 1
    return np.convolve(again, np.ones(n, dtype=np.int64))[: len(again)] > 0


def _above(share: float, limit: float, what: str, percent: bool = True) -> str | None:
    if share <= limit:
        return None
    return f"{share:.1%} {what}, more than {limit:.1%}" if percent else f"{share:.2f} {what}, over {limit:g}"


def _below(share: float, limit: float, what: str) -> str | None:
    return None if share >= limit else f"{share:.1%} {what}, less than {limit:.1%}"
