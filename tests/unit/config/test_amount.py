"""Amounts of training: which texts are amounts, what they are in sequences and steps, and how they compare
until they are resolved."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.amount import DIVISIBLE, UNITS, Amount, Conversion
from titanlite.config.component import ConfigError, check_at_least
from titanlite.data.step_sizes import StepSize, StepSizes

SIZES = [StepSize(0, 4), StepSize(40, 16)]  # ten steps of 4 sequences, then steps of 16


def conversion(sizes: list[StepSize] = SIZES, **changes: Any) -> Conversion:
    facts: dict[str, Any] = {
        "seq_len": 100,
        "global_batch_size": 8,
        "step_sizes": StepSizes(sizes),
        "num_parameters": 1000,
        "epoch_sequences": 60,
    }
    return Conversion(**facts | changes)


@pytest.mark.parametrize(
    ("text", "value", "unit", "canonical"),
    [
        ("250B tokens", 250 * 10**9, "tokens", "250B tokens"),
        ("1.5 epochs", Fraction(3, 2), "epochs", "1.5 epochs"),
        ("1 epochs", 1, "epochs", "1 epoch"),
        ("1 epoch", 1, "epochs", "1 epoch"),
        ("20 tokens/parameter", 20, "tokens/parameter", "20 tokens/parameter"),
        ("5000 steps", 5000, "steps", "5K steps"),
        ("1_000_000 sequences", 10**6, "sequences", "1M sequences"),
        ("1234567 tokens", 1234567, "tokens", "1234567 tokens"),
        ("  1.2345M   tokens ", 1234500, "tokens", "1.2345M tokens"),
        ("0.25T tokens", 25 * 10**10, "tokens", "250B tokens"),
        ("1.536K tokens", 1536, "tokens", "1536 tokens"),
        ("1500M tokens", 15 * 10**8, "tokens", "1.5B tokens"),
        ("0.001K sequences", 1, "sequences", "1 sequence"),
        ("9.2T tokens", 92 * 10**11, "tokens", "9.2T tokens"),
    ],
)
def test_texts_of_amounts(text: str, value: Fraction, unit: str, canonical: str) -> None:
    amount = Amount.parse(text)
    assert (amount.value, amount.unit, str(amount)) == (value, unit, canonical)
    assert repr(amount) == repr(canonical)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", '\'\' is not an amount such as "4B tokens", "1.5 epochs" or "20 tokens/parameter"'),
        ("many tokens", "'many tokens' is not an amount such as "),
        ("4,000 tokens", "'4,000 tokens' is not an amount such as "),
        ("1e9 tokens", "'1e9 tokens' is not an amount such as "),
        (".5 epochs", "'.5 epochs' is not an amount such as "),
        ("1__0 steps", "'1__0 steps' is not an amount such as "),
        ("nan tokens", "'nan tokens' is not an amount such as "),
        ("\u0664 tokens", "is not an amount such as "),
        (f"{'9' * 5000} tokens", "is not an amount such as "),
        ("4B", "'4B' has no unit; write an integer, or an amount such as "),
        ("5000", "'5000' has no unit; write an integer, or an amount such as "),
        ("4B tokns", "unknown unit 'tokns' of '4B tokns'; did you mean 'tokens'? (known: epochs, "),
        ("20 tokens per parameter", "did you mean 'tokens/parameter'? (known: epochs, sequences, steps, "),
        ("4G tokens", "unknown suffix 'G' of '4G tokens' (known: B, K, M, T)"),
        ("4b tokens", "unknown suffix 'b' of '4b tokens'; did you mean 'B'? (known: B, K, M, T)"),
        ("0 tokens", "'0 tokens' is not above 0"),
        ("-1 epochs", "'-1 epochs' is not above 0"),
        ("0.5 steps", "'0.5 steps' is not a whole number of steps"),
        ("1.0001K tokens", "'1.0001K tokens' is not a whole number of tokens"),
        ("10000000T tokens", "'10000000T tokens' is 2^63 tokens or more, which cannot be counted"),
    ],
)
def test_texts_that_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        Amount.parse(text)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@given(st.integers(1, 10**15), st.integers(0, 6), st.sampled_from(sorted(UNITS)))
def test_the_text_of_an_amount_reads_back(digits: int, num_decimals: int, unit: str) -> None:
    value = Fraction(digits, 10**num_decimals if unit in DIVISIBLE else 1)
    amount = Amount(value, unit)
    assert Amount.parse(str(amount)) == amount


@pytest.mark.parametrize(
    ("text", "sequences", "steps", "interval"),
    [
        ("4K tokens", 40, 10, 5),
        ("4399 tokens", 43, 10, 5),  # 3 sequences are no step of 16
        ("5600 tokens", 56, 11, 7),
        ("6 tokens/parameter", 60, 11, 7),
        ("1.5 epochs", 90, 13, 11),
        ("72 sequences", 72, 12, 9),
        ("12 steps", 72, 12, 9),
    ],
)
def test_amounts_by_hand(text: str, sequences: int, steps: int, interval: int) -> None:
    amount = Amount.parse(text)
    assert amount.sequences(conversion()) == sequences
    assert conversion().num_steps(amount, is_interval=False) == steps
    assert conversion().num_steps(amount, is_interval=True) == interval


@given(st.integers(800, 10**7), st.integers(1, 40), st.integers(1, 40), st.integers(1, 400))
def test_the_steps_of_tokens_are_the_most_that_fit(num: int, first: int, then: int, change: int) -> None:
    sizes = [StepSize(0, first), StepSize(change, then)]
    run = conversion(sizes, seq_len=10, global_batch_size=first)
    steps = run.num_steps(Amount(Fraction(num), "tokens"), is_interval=False)
    assert run.step_sizes.position_after(steps) * 10 <= num < run.step_sizes.position_after(steps + 1) * 10


@pytest.mark.parametrize("is_interval", [True, False])
def test_less_than_one_step_is_refused(is_interval: bool) -> None:
    run = conversion([StepSize(0, 8)])
    assert run.num_steps(Amount.parse("800 tokens"), is_interval) == 1
    with pytest.raises(ConfigError) as e:
        run.num_steps(Amount.parse("799 tokens"), is_interval)
    assert str(e.value) == "'799 tokens' is less than one step, which takes 8 sequences of 100 tokens"


def test_epochs_need_their_length() -> None:
    unknown = conversion(epoch_sequences=None)
    assert [unknown.converts(Amount.parse(f"2 {unit}")) for unit in UNITS].count(False) == 1
    with pytest.raises(ConfigError, match="'2 epochs' cannot be counted before the data is open"):
        Amount.parse("2 epochs").sequences(unknown)


def test_an_amount_passes_the_bounds_that_numbers_are_checked_with() -> None:
    class Section:
        freq = Amount.parse("1 epoch")

    amount: Any = Section.freq
    big = 10**30
    assert [amount < big, amount <= big, amount > big, amount >= big] == [False, False, True, True]
    assert [big < amount, big <= amount, big > amount, big >= amount] == [True, True, False, False]
    same, other = Amount.parse("1 epochs"), Amount.parse("2 epochs")
    assert [amount < same, amount <= same, amount > same, amount >= same] == [False, True, False, True]
    assert not any([amount < other, amount <= other, amount > other, amount >= other])
    assert amount != -1
    assert bool(amount)
    check_at_least(Section(), 1, "freq")
