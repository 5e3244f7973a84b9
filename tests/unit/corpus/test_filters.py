"""Pins the filters: each gives the verdict of a slow oracle written from its documentation, keeps a
share that equals its limit, and names number and limit where it removes; exact duplicates are those whose
stripped texts are equal; near duplicates are found in proportion to the Jaccard similarity of their sets of
n-grams, with keys that are the same on every machine and in every process (golden values)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from titanlite.config.component import ConfigError
from titanlite.corpus.filters import (
    Alphabetic,
    ExactDuplicates,
    Filter,
    FilterFunction,
    Length,
    LshSignature,
    MeanWordLength,
    NearDuplicates,
    RepeatedLines,
    RepeatedNGrams,
    Symbols,
)

ROOT = Path(__file__).resolve().parents[3]

# Few distinct characters, so that random texts repeat themselves; blanks of several kinds and line ends.
BLANKS = " \t\u00a0\u3000"
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
characters = st.sampled_from(
    list("abA\u00e9\u03b4\u0416\u4f60\u597d\u0e01\U0001f60012_-#.\u2026\u0301")
    + list(BLANKS) * 3
    + ["\n"] * 3
)
fragments = st.sampled_from(
    ["a", "bb", "\u00e9\u00e9\u00e9", "#", "...", "\u2026", "7", "\n", "\n\n", " ", "\r\n"]
)
texts = st.one_of(
    st.text(characters, max_size=60),
    st.lists(fragments, max_size=40).map(" ".join),
    st.lists(st.sampled_from(["a b", " a b", "ccc", "", " ", "\u4f60"]), max_size=12).flatmap(
        lambda lines: st.sampled_from([*LINE_ENDS, "\r\n"]).map(lambda end: end.join(lines))
    ),
    st.sampled_from(["", " ", "\n\n", BLANKS + LINE_ENDS]),
)
# Twentieths: their floats divide as the fractions do, so a share may equal its limit exactly.
limits = st.integers(0, 20).map(lambda i: i / 20)


def exact(limit: float) -> Fraction:
    """The number that was written."""
    return Fraction(str(limit))


def words_of(text: str) -> list[str]:
    """What blanks separate, a character at a time."""
    words, word = list[str](), ""
    for c in text + " ":
        if not c.isspace():
            word += c
        elif word:
            words.append(word)
            word = ""
    return words


def lines_of(text: str) -> list[str]:
    """The lines that hold more than blanks, without the blanks around them."""
    lines, line = list[str](), ""
    for c in text + "\n":
        if c not in LINE_ENDS:
            line += c
        else:
            lines.append(line)
            line = ""
    return [line.strip() for line in lines if words_of(line)]


def share(part: int, whole: int) -> Fraction:
    """Of nothing, nothing."""
    return Fraction(part, whole) if whole else Fraction(0)


def function_of(section: Filter) -> FilterFunction:
    """A filter that looks at one document at a time, built."""
    reason_for = section.build()
    assert not isinstance(reason_for, LshSignature)
    return reason_for


def bands_of(section: Filter) -> Callable[[str], np.ndarray]:
    """Built, with the form of what it gives checked."""
    bands = section.build()
    assert isinstance(bands, LshSignature)

    def signature_of(text: str) -> np.ndarray:
        keys = bands.compute(text)
        assert (keys.dtype, keys.shape) == (np.uint64, (bands.num_bands,))
        return keys

    return signature_of


# ---- judges


@given(texts, *[st.integers(0, 12)] * 4)
@settings(deadline=None)
def test_length(text: str, low_c: int, high_c: int, low_w: int, high_w: int) -> None:
    assume(all(high >= low or high == 0 for low, high in ((low_c, high_c), (low_w, high_w))))
    reason_for = function_of(
        Length(min_characters=low_c, max_characters=high_c, min_words=low_w, max_words=high_w)
    )
    c, w = len(list(text)), len(words_of(text))
    kept = low_c <= c and low_w <= w and (c <= high_c or high_c == 0) and (w <= high_w or high_w == 0)
    assert (reason_for(text) is None) == kept


@given(texts, st.integers(0, 8), st.integers(0, 8))
@settings(deadline=None)
def test_mean_word_length(text: str, low: int, high: int) -> None:
    """In quarters, which are exact."""
    low, high = sorted((low, high))
    reason_for = function_of(MeanWordLength(min=low / 4, max=high / 4))
    words = words_of(text)
    mean = share(sum(len(w) for w in words), len(words))
    assert (reason_for(text) is None) == (Fraction(low, 4) <= mean <= Fraction(high, 4))


@given(texts, limits)
@settings(deadline=None)
def test_alphabetic(text: str, limit: float) -> None:
    words = words_of(text)
    lettered = [w for w in words if any(unicodedata.category(c).startswith("L") for c in w)]
    reason_for = function_of(Alphabetic(min_share=limit))
    assert (reason_for(text) is None) == (share(len(lettered), len(words)) >= exact(limit))


@pytest.mark.parametrize("number", ["\u00b2", "\u00bd", "\u2460", "\u0bf0"])
def test_no_number_is_a_letter(number: str) -> None:
    assert function_of(Alphabetic())(number) is not None


@given(texts, limits, st.lists(st.sampled_from(["#", "...", "\u2026", "a", "a b"]), min_size=1, unique=True))
@settings(deadline=None)
def test_symbols(text: str, limit: float, symbols: list[str]) -> None:
    """The most frequent one counts. Occurrences of a symbol do not overlap: six dots are two ellipses, and so
    is one of a single character with three dots."""
    most, words = 0, max(len(words_of(text)), 1)
    dotted = text.replace("\u2026", "...")
    for symbol in (symbol.replace("\u2026", "...") for symbol in symbols):
        i = count = 0
        while i < len(dotted):
            actual = dotted[i : i + len(symbol)] == symbol
            count += actual
            i += len(symbol) if actual else 1
        most = max(most, count)
    reason_for = function_of(Symbols(symbols=symbols, max_share=limit))
    assert (reason_for(text) is None) == (Fraction(most, words) <= exact(limit))


def test_hashes_and_ellipses_are_judged_apart_as_in_gopher() -> None:
    reason_for = function_of(Symbols())
    words = "word " * 88
    assert reason_for(words + "# " * 6 + "... " * 6) is None
    assert reason_for(words + "# " * 12) == "0.12 '#' per word, over 0.1"
    assert reason_for(words + "... " * 6 + "\u2026 " * 6) == "0.12 '...' per word, over 0.1"


@given(texts, limits, limits)
@settings(deadline=None)
def test_repeated_lines(text: str, of_lines: float, of_characters: float) -> None:
    lines = lines_of(text)
    again = [line for i, line in enumerate(lines) if line in lines[:i]]
    kept = share(len(again), len(lines)) <= exact(of_lines) and (
        share(sum(map(len, again)), sum(map(len, lines))) <= exact(of_characters)
    )
    reason_for = function_of(RepeatedLines(max_line_share=of_lines, max_character_share=of_characters))
    assert (reason_for(text) is None) == kept


def top_shares(words: list[str], n: int) -> list[Fraction]:
    """What each of the commonest n-grams covers: its length at every occurrence; only what repeats counts."""
    grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    most = max(grams.values(), default=0)
    if most < 2:
        return [Fraction(0)]
    total = sum(map(len, words))
    return [Fraction(most * sum(map(len, gram)), total) for gram, count in grams.items() if count == most]


def repeated_share(words: list[str], n: int) -> Fraction:
    """Of words that stand in an n-gram that came before, each counted once (Gopher, table A1)."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    inside = {i + j for i, gram in enumerate(grams) if gram in grams[:i] for j in range(n)}
    return share(sum(len(words[i]) for i in inside), sum(map(len, words)))


runs = st.lists(st.sampled_from(["a", "bb", "\u00e9\u00e9\u00e9", "\u4f60\u597d", "x-y-z"]), max_size=12)
# A run, others, and the run again: long phrases repeat.
phrases = st.tuples(runs, runs, runs).map(lambda r: " ".join([*r[0], *r[1], *r[0], *r[2]]))


@pytest.mark.full
@given(st.one_of(texts, phrases), st.lists(limits, max_size=3), st.lists(limits, max_size=6))
@settings(max_examples=300, deadline=None)
def test_repeated_ngrams(text: str, top: list[float], repeated: list[float]) -> None:
    """Where several n-grams are the commonest, any of them may be the judged one."""
    words = words_of(text)
    tops = [top_shares(words, n) for n in range(2, 2 + len(top))]
    least = all(min(t) <= exact(limit) for t, limit in zip(tops, top))
    most = all(max(t) <= exact(limit) for t, limit in zip(tops, top))
    rest = all(repeated_share(words, n) <= exact(limit) for n, limit in enumerate(repeated, 5))
    kept = function_of(RepeatedNGrams(max_top_share=top, max_repeated_share=repeated))(text) is None
    assert kept in {least and rest, most and rest}


def test_equally_common_ngrams_are_judged_by_their_form() -> None:
    """Which words stand where is all that differs; their lengths and repetitions are the same."""
    reason_for = function_of(RepeatedNGrams(max_top_share=[0.5], max_repeated_share=[]))
    verdicts = set()
    for a, b, c, d in permutations("pqrs"):
        short, long = f"{a} {b}", f"{c * 9} {d * 9}"
        verdicts.add(reason_for(f"{short} x {long} y {short} z {long}"))
    assert len(verdicts) == 1


@pytest.mark.parametrize("section", [RepeatedNGrams(), RepeatedLines(), Symbols()], ids=lambda s: s.name)
@pytest.mark.parametrize("text", ["", " ", "\n\t\u3000", "one", "\u4f60\u597d"])
def test_too_little_text_to_repeat_is_kept(section: Filter, text: str) -> None:
    assert function_of(section)(text) is None


def test_ngrams_of_a_document_of_exactly_n_words() -> None:
    """There is one of them, which is no repetition; a word more may be one."""
    reason_for = function_of(RepeatedNGrams(max_top_share=[0, 0, 0], max_repeated_share=[0] * 6))
    assert reason_for("a b c d e f g h i j") is None
    assert reason_for("a a") is None
    assert reason_for("a a a") is not None


def test_overlapping_repetitions_are_counted_once() -> None:
    """Words 2 to 7 of eight equal ones stand in several 5-grams that came before."""
    reason_for = function_of(RepeatedNGrams(max_top_share=[], max_repeated_share=[0.8]))
    assert reason_for("a " * 8) == "87.5% of the characters are in repeated 5-grams, more than 80.0%"


# At the limit, beyond it, and why.
BOUNDARIES: dict[str, tuple[Filter, str, str, str]] = {
    "min characters": (
        Length(min_characters=5, min_words=0),
        "abcde",
        "abcd",
        "4 characters, fewer than 5",
    ),
    "max characters": (
        Length(max_characters=5, min_words=0),
        "ab de",
        "ab de ",
        "6 characters, more than 5",
    ),
    "min words": (Length(min_words=3), "a b c", "ab cd", "2 words, fewer than 3"),
    "max words": (Length(min_words=0, max_words=3), "a b c", "a b c d", "4 words, more than 3"),
    "default words": (Length(), "a " * 50, "a " * 49, "49 words, fewer than 50"),
    "min mean": (MeanWordLength(), "abc abc", "abc ab", "mean word length 2.50, outside 3 to 10"),
    "max mean": (
        MeanWordLength(max=4.5),
        "abcd abcde",
        "abcde abcde",
        "mean word length 5.00, outside 3 to 4.5",
    ),
    "letters": (
        Alphabetic(),
        "a1 b c d 5",
        "a b c 4 5",
        "60.0% of the words contain a letter, less than 80.0%",
    ),
    "symbols": (
        Symbols(),
        "bb cc dd ee ff gg hh ii jj #",
        "aa bb cc dd ee ff gg hh ii jj ##",
        "0.18 '#' per word, over 0.1",
    ),
    "lines": (
        RepeatedLines(max_character_share=1),
        "a\nb\nc\nd\ne\nf\ng\na\na\na",
        "a\nb\nc\na\n\n a ",
        "40.0% of the lines are repeats, more than 30.0%",
    ),
    "characters in lines": (
        RepeatedLines(max_line_share=0.5),
        "ab\ncdefgh\nab",
        "ab\ncdef\nab",
        "25.0% of the characters are in repeated lines, more than 20.0%",
    ),
    "top 2-gram": (
        RepeatedNGrams(),
        f"a b c a b {'x' * 15}",
        f"a b c a b {'x' * 11}",
        "25.0% of the characters are one 2-gram, more than 20.0%",
    ),
    "top 3-gram": (
        RepeatedNGrams(max_top_share=[1, 0.5]),
        "a b c defghi a b c",
        "a b c d a b c",
        "85.7% of the characters are one 3-gram, more than 50.0%",
    ),
    "repeated 6-grams": (
        RepeatedNGrams(max_top_share=[], max_repeated_share=[1, 0.25]),
        f"a b c d e f {'x' * 12} a b c d e f",
        f"a b c d e f {'x' * 8} a b c d e f",
        "30.0% of the characters are in repeated 6-grams, more than 25.0%",
    ),
}


@pytest.mark.parametrize("case", BOUNDARIES)
def test_what_equals_the_limit_is_kept_and_the_reason_names_number_and_limit(case: str) -> None:
    section, kept, removed, reason = BOUNDARIES[case]
    reason_for = function_of(section)
    assert reason_for(kept) is None
    assert reason_for(removed) == reason


def test_what_has_no_words_has_no_letters_and_no_mean() -> None:
    assert function_of(Alphabetic())(" \n") == "0.0% of the words contain a letter, less than 80.0%"
    assert function_of(MeanWordLength())("") == "mean word length 0.00, outside 3 to 10"


SHARES = [
    (Alphabetic, "min_share"),
    (Symbols, "max_share"),
    (RepeatedLines, "max_line_share"),
    (RepeatedLines, "max_character_share"),
]
LISTS = [(RepeatedNGrams, "max_top_share"), (RepeatedNGrams, "max_repeated_share")]
BAD: list[tuple[type[Filter], str, object, str]] = [
    *(
        (f, key, value, "is not between 0 and 1")
        for f, key in SHARES
        for value in (-0.01, 1.01, 80.0, float("nan"))
    ),
    *(
        (f, key, [0.5, value], "is not between 0 and 1")
        for f, key in LISTS
        for value in (-0.01, 1.01, float("nan"))
    ),
    (Symbols, "symbols", [], "symbol"),
    (Symbols, "symbols", ["#", ""], "symbol"),
    *(
        (NearDuplicates, key, v, f"{v} is below 1")
        for key in ("ngram", "num_bands", "band_size")
        for v in (0, -3)
    ),
]


@pytest.mark.parametrize(("section", "key", "value", "message"), BAD)
def test_a_bad_value_is_refused_with_its_key(
    section: type[Filter], key: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        section(**{key: value})
    assert e.value.key == key


# ---- duplicates


@given(texts, texts)
@settings(deadline=None)
def test_exact_duplicates_are_equal_stripped_texts(a: str, b: str) -> None:
    signature_of = bands_of(ExactDuplicates())
    assert (signature_of(a) == signature_of(b)).all() == (a.strip() == b.strip())
    assert (signature_of(f"\n\u3000{a}\t ") == signature_of(a)).all()


def test_exact_duplicates_differ_by_case_and_inner_blanks() -> None:
    signature_of = bands_of(ExactDuplicates())
    variants = ["a b", "A b", "a  b", "a\u00a0b", "a b.", "\u00e9", "e\u0301", ""]
    assert len({int(signature_of(v)[0]) for v in variants}) == len(variants)


VOCABULARY = [
    "".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz\u00e9\u03b4\u0416", k=3 + i % 7))
    for i in range(3000)
]


def prose(seed: int, num_words: int = 1000) -> list[str]:
    """A long text without phrases in common with another seed's."""
    return random.Random(seed).choices(VOCABULARY, k=num_words)


def scattered(words: list[str], portion: float, seed: int) -> list[str]:
    """With a portion of the words replaced, anywhere."""
    rng, changed = random.Random(f"change {seed}"), list(words)
    for i in rng.sample(range(len(words)), int(portion * len(words))):
        changed[i] = f"new{i}"
    return changed


def in_one_place(words: list[str], portion: float, seed: int) -> list[str]:
    """With a portion of the words replaced, all in one run."""
    length = int(portion * len(words))
    begin = random.Random(f"change {seed}").randrange(len(words) - length)
    return [*words[:begin], *(f"new{i}" for i in range(length)), *words[begin + length :]]


def jaccard(a: list[str], b: list[str], n: int = 5) -> float:
    """The similarity that the bands are to find."""
    x, y = ({tuple(t[i : i + n]) for i in range(len(t) - n + 1)} for t in (a, b))
    return len(x & y) / len(x | y)


def actual(pairs: list[tuple[list[str], list[str]]]) -> int:
    """How many of the pairs share a band, by the default settings."""
    signature_of = bands_of(NearDuplicates())
    return sum(bool((signature_of(" ".join(a)) == signature_of(" ".join(b))).any()) for a, b in pairs)


def test_the_same_text_agrees_in_all_bands() -> None:
    signature_of = bands_of(NearDuplicates())
    for text in (" ".join(prose(0)), "too short", "one", "", "\u4f60\u597d"):
        assert (signature_of(text) == signature_of(text)).all()


def test_case_punctuation_and_blanks_do_not_matter() -> None:
    signature_of, words = bands_of(NearDuplicates()), prose(1, 40)
    for other in (" ".join(words).upper(), ",\n".join(words) + "!", "-".join(words), "\u3000".join(words)):
        assert (signature_of(" ".join(words)) == signature_of(other)).all()


@given(st.text(st.characters(max_codepoint=127), max_size=40))
@settings(deadline=None)
def test_a_dash_beyond_ascii_does_not_matter(text: str) -> None:
    """Text within ASCII has no rules of its own. (Of a text without words a dash is a part.)"""
    assume(any(c.isalnum() or c == "_" for c in text))
    signature_of = bands_of(NearDuplicates(ngram=2, num_bands=4, band_size=1))
    assert (signature_of(text) == signature_of(f"{text} \u2014")).all()


def test_unrelated_texts_agree_in_no_band() -> None:
    signature_of = bands_of(NearDuplicates())
    keys = np.stack([signature_of(" ".join(prose(seed))) for seed in range(20)])
    assert len(np.unique(keys)) == keys.size  # nor does one band's value ever stand in another


def test_the_order_of_the_words_matters() -> None:
    words = prose(2)
    assert actual([(words, sorted(words)), (words, words[::-1])]) == 0


@pytest.mark.parametrize(
    ("change", "portion"), [(in_one_place, 0.03), (scattered, 0.01)], ids=["in one place", "scattered"]
)
def test_slightly_changed_texts_are_found(
    change: Callable[[list[str], float, int], list[str]], portion: float
) -> None:
    """Of 1000 words: similarity above 0.9, found with probability 0.9996. (3% of the words, scattered, spoil
    14% of the phrases: similarity 0.75, found with probability 0.77.)"""
    pairs = [(prose(seed), change(prose(seed), portion, seed)) for seed in range(20)]
    assert all(jaccard(a, b) > 0.89 for a, b in pairs)
    assert actual(pairs) >= 19


def test_texts_that_share_a_third_are_not_found() -> None:
    pairs = [(prose(seed), prose(seed)[:461] + prose(100 + seed, 539)) for seed in range(20)]
    assert all(0.28 < jaccard(a, b) < 0.32 for a, b in pairs)
    assert actual(pairs) <= 2


@pytest.mark.parametrize("portion", [0.005, 0.03, 0.1, 0.3])
def test_hashes_agree_as_often_as_the_texts_are_similar(portion: float) -> None:
    """In bands of one hash, on average over 20 texts; five standard deviations are under 0.04."""
    signature_of, errors = bands_of(NearDuplicates(num_bands=256, band_size=1)), []
    for seed in range(20):
        a, b = prose(seed, 300), scattered(prose(seed, 300), portion, seed)
        errors.append(float((signature_of(" ".join(a)) == signature_of(" ".join(b))).mean()) - jaccard(a, b))
    assert abs(float(np.mean(errors))) < 0.04


@pytest.mark.parametrize(
    "first", ["\u4e00", "\u0e01", "\u3041", "\u1780"], ids=["han", "thai", "kana", "khmer"]
)
def test_unspaced_scripts_count_by_characters(first: str) -> None:
    """Phrases of characters: a text without blanks is similar to itself with a few characters changed."""
    letters = [chr(ord(first) + i) for i in range(46)]
    signature_of, errors = bands_of(NearDuplicates(num_bands=256, band_size=1)), []
    for seed in range(10):
        rng = random.Random(seed)
        a = rng.choices(letters, k=400)
        b = [rng.choice(letters) if rng.random() < 0.03 else c for c in a]
        errors.append(float((signature_of("".join(a)) == signature_of("".join(b))).mean()) - jaccard(a, b))
    assert abs(float(np.mean(errors))) < 0.06
    assert (signature_of("".join(a)) == signature_of(" ".join(a))).all()


def test_short_texts_are_one_phrase() -> None:
    """Of fewer words than a phrase has: alike only if they are equal."""
    signature_of = bands_of(NearDuplicates())
    assert (signature_of("a b c") == signature_of("A, b: c")).all()
    for other in ("a b d", "a b", "a b c d", "c b a"):
        assert not (signature_of("a b c") == signature_of(other)).any()


def test_texts_without_words_are_not_all_one() -> None:
    signature_of = bands_of(NearDuplicates())
    assert not (signature_of("\U0001f600 \U0001f680") == signature_of("...")).any()


@pytest.mark.parametrize(
    ("one", "other"),
    [("\u0915\u093f", "\u0915\u0940"), ("e\u0301t\u0301", "e\u0308t\u0300")],
    ids=["Hindi vowels", "accents"],
)
def test_words_that_differ_in_combining_marks_differ(one: str, other: str) -> None:
    signature_of = bands_of(NearDuplicates())
    assert not (signature_of(f"x {one} y") == signature_of(f"x {other} y")).any()


# A changed value makes a prepared corpus another: neither the library's hashing nor ours may move.
TEXT = "The quick brown fox jumps over the lazy dog, and caf\u00e9 \u0416\u0434\u0443 waits for \u4f60\u597d."
GOLDEN = {
    "near": [
        9150980000904883833,
        338746306725668674,
        2931538095847013353,
        14704013609802393667,
        7457740844247639481,
        2518423560062256188,
        7612752891021063030,
        11123972468574545732,
        15991815484940226595,
        8790547812491089235,
        9598808157701809420,
        1876165342164789448,
        12452255744454615117,
        8199370372937424804,
    ],
    "small": [501730219885839305, 1559694695867686668, 14633158076011923212],
    "exact": [10840010905255088092],
}
SECTIONS: dict[str, Filter] = {
    "near": NearDuplicates(),
    "small": NearDuplicates(ngram=2, num_bands=3, band_size=2),
    "exact": ExactDuplicates(),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_keys(name: str) -> None:
    assert bands_of(SECTIONS[name])(TEXT).tolist() == GOLDEN[name]


@pytest.mark.full
def test_keys_are_equal_in_another_process() -> None:
    """Whatever Python's own hashes are there."""
    program = (
        "import sys; from titanlite.corpus.filters import NearDuplicates; "
        "print(hash('a'), *NearDuplicates().build().compute(sys.argv[1]).tolist())"
    )
    own_hashes = set()
    for hash_seed in ("1", "4242"):
        out = subprocess.run(
            [sys.executable, "-c", program, TEXT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONUTF8": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        own_hashes.add(out[0])
        assert [int(key) for key in out[1:]] == GOLDEN["near"]
    assert len(own_hashes) == 2


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ConfigError, match=r"near_duplicates needs datasketch and regex: pip install") as e:
        NearDuplicates().build()
    assert e.value.key == "filters"


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (Length, {"min_words": -5}),
        (Length, {"min_words": 10, "max_words": 5}),
        (Length, {"min_characters": 2, "max_characters": 1}),
        (MeanWordLength, {"min": 10.0, "max": 3.0}),
        (MeanWordLength, {"min": float("nan")}),
        (MeanWordLength, {"max": float("nan")}),
    ],
)
def test_a_range_that_holds_nothing(section: type[Filter], keys: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="is not a range"):
        section(**keys)
