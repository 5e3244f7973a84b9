"""Filters: remove documents in `titanlite prepare`, in the order of their `[[filters]]` tables.

A filter either examines one document at a time (FilterFunction) or removes documents that resemble an earlier
document (LshSignature). Filters do not depend on a language: words are separated by blanks. The defaults are
from Gopher (Rae et al. 2021, arXiv 2112.11446, table A1)."""

from __future__ import annotations

import hashlib
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titanlite.config.component import Component, ConfigError, check_at_least
from titanlite.data.order import hash64, key_of

FilterFunction = Callable[[str], str | None]  # text -> reason to remove the document, or None to keep it


@dataclass(frozen=True)
class LshSignature:
    """A signature for locality-sensitive hashing. `compute`: text -> uint64 [num_bands]. Documents that have
    the same value in any band are duplicates; the first document is kept."""

    num_bands: int
    compute: Callable[[str], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Filter(Component, makes=(Callable, LshSignature)):  # type: ignore[arg-type]
    """Base of filters: `[[filters]] name = "..."` selects a subclass by its name.

    A filter is a frozen dataclass whose fields are its keys. `imports` in the preparation's TOML file
    registers filters from other modules; tests/examples/length_filter.py is an example."""

    @abstractmethod
    def build(self) -> FilterFunction | LshSignature:
        """Return the function that judges one document, or the signature that finds duplicates.

        Called in every process. The result must depend on the text alone, so that the dataset does not depend
        on the number of processes. Raises ConfigError if a library is missing."""


class TextFilter(Filter):
    """Base of the filters that examine one document at a time."""

    @abstractmethod
    def reason_to_remove(self, text: str) -> str | None:
        """Return why a document is removed, or None to keep it."""

    def build(self) -> FilterFunction:
        return self.reason_to_remove


def _check_shares(section: Filter, *keys: str) -> None:
    for key in keys:
        for share in np.atleast_1d(getattr(section, key)).tolist():
            if not 0 <= share <= 1:
                raise ConfigError(f"{share} is not between 0 and 1", key)


@dataclass(frozen=True, kw_only=True)
class Length(TextFilter, name="length"):
    """Removes short and long documents."""

    min_characters: int = 0
    """Minimum number of characters."""
    max_characters: int = 0
    """Maximum number of characters; 0: no limit."""
    min_words: int = 50
    """Minimum number of words; 0 for scripts without blanks between words."""
    max_words: int = 100_000
    """Maximum number of words; 0: no limit."""

    def __post_init__(self) -> None:
        for unit in ("characters", "words"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low < 0 or (high != 0 and high < low):
                raise ConfigError(f"{low} to {high} is not a range", f"min_{unit}")

    def reason_to_remove(self, text: str) -> str | None:
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


@dataclass(frozen=True, kw_only=True)
class MeanWordLength(TextFilter, name="mean_word_length"):
    """Removes documents whose mean word is too short or too long for prose."""

    min: float = 3.0
    """Minimum mean length of words, in characters."""
    max: float = 10.0
    """Maximum mean length of words, in characters."""

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise ConfigError(f"{self.min:g} to {self.max:g} is not a range", "min")

    def reason_to_remove(self, text: str) -> str | None:
        words = text.split()
        mean = sum(map(len, words)) / max(len(words), 1)
        inside = self.min <= mean <= self.max
        return None if inside else f"mean word length {mean:.2f}, outside {self.min:g} to {self.max:g}"


@dataclass(frozen=True, kw_only=True)
class Alphabetic(TextFilter, name="alphabetic"):
    """Removes documents with too few words with a letter of any alphabet."""

    min_share: float = 0.8
    """Minimum share of words that contain a letter."""

    def __post_init__(self) -> None:
        _check_shares(self, "min_share")

    def reason_to_remove(self, text: str) -> str | None:
        words = text.split()
        share = sum(any(map(str.isalpha, w)) for w in words) / max(len(words), 1)
        if share >= self.min_share:
            return None
        return f"{share:.1%} of the words contain a letter, less than {self.min_share:.1%}"


@dataclass(frozen=True, kw_only=True)
class Symbols(TextFilter, name="symbols"):
    """Removes documents in which one symbol is too frequent, as in Gopher's rules."""

    symbols: list[str] = field(default_factory=lambda: ["#", "..."])
    """Symbols to count. The character \u2026 counts as three dots."""
    max_share: float = 0.1
    """Maximum number of occurrences of one symbol per word."""

    def __post_init__(self) -> None:
        _check_shares(self, "max_share")
        if not self.symbols or not all(self.symbols):
            raise ConfigError("give at least one symbol; none may be empty", "symbols")

    def reason_to_remove(self, text: str) -> str | None:
        symbols = [symbol.replace("\u2026", "...") for symbol in self.symbols]
        num_words, text = max(len(text.split()), 1), text.replace("\u2026", "...")
        counts = {symbol: text.count(symbol) for symbol in symbols}
        most = max(counts, key=counts.__getitem__)
        share = counts[most] / num_words
        return None if share <= self.max_share else f"{share:.2f} {most!r} per word, over {self.max_share:g}"


@dataclass(frozen=True, kw_only=True)
class RepeatedLines(TextFilter, name="repeated_lines"):
    """Removes documents that repeat their lines, which are compared without the blanks around them. Blank
    lines are left out."""

    max_line_share: float = 0.3
    """Maximum share of lines that occurred earlier."""
    max_character_share: float = 0.2
    """Maximum share of characters in lines that occurred earlier."""

    def __post_init__(self) -> None:
        _check_shares(self, "max_line_share", "max_character_share")

    def reason_to_remove(self, text: str) -> str | None:
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


@dataclass(frozen=True, kw_only=True)
class RepeatedNGrams(TextFilter, name="repeated_ngrams"):
    """Removes documents that repeat their phrases of n words."""

    max_top_share: list[float] = field(default_factory=lambda: [0.20, 0.18, 0.16])
    """Maximum share of characters in the most frequent n-gram, for n = 2, 3, 4 and so on. Overlapping
    occurrences each count in full; a single occurrence counts nothing."""
    max_repeated_share: list[float] = field(default_factory=lambda: [0.15, 0.14, 0.13, 0.12, 0.11, 0.10])
    """Maximum share of characters in n-grams that occurred earlier, for n = 5, 6, 7 and so on."""

    def __post_init__(self) -> None:
        _check_shares(self, "max_top_share", "max_repeated_share")

    def reason_to_remove(self, text: str) -> str | None:
        words = text.split()
        lengths, hashes = np.array([len(w) for w in words], dtype=np.int64), word_hashes(words)
        total = max(int(lengths.sum()), 1)
        for n, limit in enumerate(self.max_top_share, 2):
            if len(words) > n:
                grams = ngram_hashes(hashes, n)
                _, first, counts = np.unique(grams, return_index=True, return_counts=True)
                top = int(counts.max())
                sizes = np.convolve(lengths, np.ones(n, dtype=np.int64), "valid")
                covered = top * int(sizes[first[counts == top]].max())  # longest of equally frequent ones
                subject = f"of the characters are one {n}-gram"
                if top > 1 and (reason := _above(covered / total, limit, subject)):
                    return reason
        for n, limit in enumerate(self.max_repeated_share, 5):
            if len(words) > n:
                covered = int(lengths[_repeated(ngram_hashes(hashes, n), n)].sum())
                subject = f"of the characters are in repeated {n}-grams"
                if reason := _above(covered / total, limit, subject):
                    return reason
        return None


@dataclass(frozen=True, kw_only=True)
class ExactDuplicates(Filter, name="exact_duplicates"):
    """Removes all but the first of documents with equal text, apart from blanks around it."""

    def build(self) -> LshSignature:
        def compute(text: str) -> np.ndarray:
            digest = hashlib.blake2b(text.strip().encode(), digest_size=8).digest()
            return np.frombuffer(digest, dtype="<u8")

        return LshSignature(1, compute)


@dataclass(frozen=True, kw_only=True)
class NearDuplicates(Filter, name="near_duplicates"):
    """Removes all but the first of documents that share most of their phrases, by MinHash (Broder 1997).
    Two documents whose n-grams have Jaccard similarity s are detected with probability
    1 - (1 - s^band_size)^num_bands: with the defaults, which are FineWeb's, 77% at s = 0.75, 99% at 0.85 and
    1% at 0.4. If A duplicates B and B duplicates C, all three are one group. Hashes are compared, not
    texts."""

    ngram: int = 5
    """Words per phrase; in scripts without blanks each character is a word."""
    num_bands: int = 14
    """Number of bands. Documents with one equal band are duplicates."""
    band_size: int = 8
    """Hashes per band."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "ngram", "num_bands", "band_size")

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

        ascii_words = re.compile(r"\w+", re.ASCII).findall  # equal for ASCII text, and faster
        any_words = regex.compile(WORDS, regex.V1).findall

        def compute(text: str) -> np.ndarray:
            lower = text.lower()
            spelled = ascii_words(lower) if text.isascii() else any_words(lower)
            words = word_hashes(spelled or [c for c in text if not c.isspace()])
            grams = np.unique(ngram_hashes(words, min(self.ngram, max(len(words), 1))) >> np.uint64(32))
            sketch = blank.copy()
            sketch.update_batch(grams.tolist())
            bands = sketch.hashvalues.reshape(self.num_bands, self.band_size).astype(np.uint64)
            keys = np.arange(self.num_bands, dtype=np.uint64)  # equal values in different bands do not match
            for column in bands.T:
                keys = hash64(keys ^ column, 0)
            return keys

        return LshSignature(self.num_bands, compute)


# Runs of letters, digits and their marks; in scripts without blanks between words, each character.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
WORDS = rf"[{_UNSPACED}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]+"


def word_hashes(words: Sequence[str]) -> np.ndarray:
    """Hash each word: uint64 [len(words)]. Equal on every machine, unlike Python's own hash."""
    known = {w: zlib.crc32(w.encode()) for w in set(words)}
    return hash64(np.fromiter((known[w] for w in words), np.uint64, len(words)), key_of("word"))


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """Hash each run of `n` words: uint64 [len(words) - n + 1]."""
    grams = np.zeros(max(len(words) - n + 1, 0), dtype=np.uint64)
    for i in range(n):
        grams = hash64(grams ^ words[i : i + len(grams)], i)
    return grams


def _repeated(grams: np.ndarray, n: int) -> np.ndarray:
    """Return which words are in an n-gram that occurred earlier: bool [len(grams) + n - 1]."""
    order = np.argsort(grams, kind="stable")
    again = np.zeros(len(grams) + n - 1, dtype=np.int64)
    again[order[1:][grams[order[1:]] == grams[order[:-1]]]] = 1
    return np.convolve(again, np.ones(n, dtype=np.int64))[: len(again)] > 0


def _above(share: float, limit: float, subject: str) -> str | None:
    return None if share <= limit else f"{share:.1%} {subject}, more than {limit:.1%}"
