"""Amounts of training, such as "250B tokens" or "1.5 epochs", which may be given for a number of steps.

A key takes them if its field is annotated `Steps` or `Interval`. `resolve` converts them to numbers of steps;
until then the field holds an Amount.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Protocol

from titanlite.config.component import ConfigError, suggest

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
UNITS = {  # plural -> singular
    "tokens": "token",
    "sequences": "sequence",
    "steps": "step",
    "epochs": "epoch",
    "tokens/parameter": "token/parameter",
}
DIVISIBLE = ("epochs", "tokens/parameter")  # of the other units, there are whole numbers only
FORM = 'an amount such as "4B tokens", "1.5 epochs" or "20 tokens/parameter"'
MAX_DIGITS = 24  # Decimal has 28


class StepSizes(Protocol):
    """The methods of titanlite.data.step_sizes.StepSizes, a class of a higher layer, that Conversion uses."""

    def position_after(self, num_steps: int) -> int: ...

    def num_steps(self, end: int) -> int: ...


@dataclass(frozen=True)
class StepCount:
    """The annotation of a field that is a number of steps, as an integer or as an Amount.

    By default, the steps are counted from the start of the run. `is_interval`: they are the steps from one
    event to the next, of training.global_batch_size sequences each. `multiple_of`: another key of the
    section; an amount is rounded down to a multiple of its number of steps, at least to that number."""

    is_interval: bool = False
    multiple_of: str = ""


Steps = Annotated[int, StepCount()]
Interval = Annotated[int, StepCount(is_interval=True)]
MultipleOfInterval = Annotated[int, StepCount(is_interval=True, multiple_of="interval")]


@dataclass(frozen=True, repr=False)
class Amount:
    """An amount of training. `value`: above 0. `unit`: one of UNITS.

    Compares greater than every number, because sections check bounds of their fields before amounts are
    resolved. Resolving runs these checks again, on the numbers of steps."""

    value: Fraction
    unit: str

    @classmethod
    def parse(cls, text: str) -> Amount:
        """Return the amount of a text such as "250B tokens". Raises ConfigError, without a key, for any other
        text."""
        number, *words = text.split() or [""]
        match = re.fullmatch(r"(-?\d+(?:_\d+)*(?:\.\d+)?)([A-Za-z]*)", number, re.ASCII)
        if match is None or len(match[1]) > MAX_DIGITS:
            raise ConfigError(f"{text!r} is not {FORM}")
        if not words:
            raise ConfigError(f"{text!r} has no unit; write an integer, or {FORM}")
        unit = {singular: plural for plural, singular in UNITS.items()}.get(" ".join(words), " ".join(words))
        if unit not in UNITS:
            raise ConfigError(f"unknown unit {unit!r} of {text!r}{suggest(unit, UNITS)}")
        if match[2] and match[2] not in SUFFIXES:
            raise ConfigError(f"unknown suffix {match[2]!r} of {text!r}{suggest(match[2].upper(), SUFFIXES)}")
        value = Fraction(match[1].replace("_", "")) * SUFFIXES.get(match[2], 1)
        if value <= 0:
            raise ConfigError(f"{text!r} is not above 0")
        if value.denominator > 1 and unit not in DIVISIBLE:
            raise ConfigError(f"{text!r} is not a whole number of {unit}")
        if value >= 1 << 63:
            raise ConfigError(f"{text!r} is 2^63 {unit} or more, which cannot be counted")
        return cls(value, unit)

    @classmethod
    def parse_place(cls, text: str) -> Amount:
        """Return an amount that is a place in the data order. Raises ConfigError, without a key, for numbers
        of steps, whose sequences depend on the batch size."""
        amount = cls.parse(text)
        if amount.unit == "steps":
            raise ConfigError(f"{text!r} is no place in the data order: give tokens, sequences or epochs")
        return amount

    def sequences(self, conversion: Conversion) -> int:
        """Return the number of training sequences, rounded down. Raises ConfigError, without a key, for
        epochs whose length is not known."""
        tokens_per_unit = {"tokens": 1, "tokens/parameter": conversion.num_parameters}
        if self.unit in tokens_per_unit:
            return int(self.value * tokens_per_unit[self.unit] // conversion.seq_len)
        if self.unit == "steps":
            return conversion.step_sizes.position_after(int(self.value))
        if self.unit == "sequences":
            return int(self.value)
        if conversion.epoch_sequences is None:
            raise ConfigError(f"{str(self)!r} cannot be counted before the data is open")
        return int(self.value * conversion.epoch_sequences)

    def __str__(self) -> str:
        """Return the shortest text that `parse` reads as an equal amount."""
        sizes = [(suffix, size) for suffix, size in reversed(SUFFIXES.items()) if self.value >= size]
        value = Decimal(self.value.numerator) / Decimal(self.value.denominator)
        numbers = [f"{value / size:f}{suffix}" for suffix, size in [*sizes, ("", 1)]]
        return f"{min(numbers, key=len)} {UNITS[self.unit] if self.value == 1 else self.unit}"

    def __repr__(self) -> str:
        return repr(str(self))

    def __lt__(self, other: object) -> bool:
        return False

    def __le__(self, other: object) -> bool:
        return self == other

    def __gt__(self, other: object) -> bool:
        return not isinstance(other, Amount)

    def __ge__(self, other: object) -> bool:
        return not isinstance(other, Amount) or self == other


@dataclass(frozen=True)
class Conversion:
    """The sizes of a run by which its amounts are converted. `epoch_sequences`: the training sequences of all
    sources together; None: not known before the data is open."""

    seq_len: int
    global_batch_size: int
    step_sizes: StepSizes
    num_parameters: int
    epoch_sequences: int | None

    def converts(self, amount: Amount) -> bool:
        """Return False for epochs whose length is not known."""
        return amount.unit != "epochs" or self.epoch_sequences is not None

    def num_steps(self, amount: Amount, is_interval: bool) -> int:
        """Return the number of whole steps in an amount. Raises ConfigError, without a key, if there is
        none."""
        sequences = amount.sequences(self)
        num = sequences // self.global_batch_size if is_interval else self.step_sizes.num_steps(sequences)
        if num < 1:
            size = self.global_batch_size if is_interval else self.step_sizes.position_after(1)
            raise ConfigError(
                f"{str(amount)!r} is less than one step, which takes {size:,} sequences of {self.seq_len:,} "
                "tokens"
            )
        return num


def step_count(hint: object) -> StepCount | None:
    """Return the annotation of a type that takes amounts; None for any other type."""
    marks: Sequence[object] = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, StepCount)), None)
