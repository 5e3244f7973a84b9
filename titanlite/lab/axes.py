"""Keys with several values to try on a command line, such as `--optimizer.lr=1e-4:3e-3:5`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.config.component import ConfigError
from titanlite.config.overrides import split_overrides

NUMBER = r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?"
WHOLE = r"\d[\d_]*"


@dataclass(frozen=True)
class Axis:
    """A key and the values to try, as they would be written on the command line. `is_range`: the values are
    numbers at equal ratios."""

    key: str
    values: tuple[str, ...]
    is_range: bool = False


def take_axes(overrides: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """Return the axes among overrides, and the other overrides. `--key=LOW:HIGH:NUM` stands for NUM values
    from LOW to HIGH at equal ratios, rounded to three digits; `--key=a,b` for those values. A value with
    white space, quotes or brackets is one value. Raises ConfigError."""
    axes, rest = list[Axis](), list[str]()
    for key, text in split_overrides(overrides):
        numbers = re.fullmatch(f"({NUMBER}):({NUMBER}):({WHOLE})", text)
        if numbers:
            axes.append(Axis(key, _range(key, numbers[1], numbers[4], numbers[7]), is_range=True))
        elif re.fullmatch(f"{NUMBER}:{NUMBER}(:.*)?", text):
            raise _at(key, f"{text} is not LOW:HIGH:NUM, such as 1e-4:3e-3:5")
        elif "," in text and not re.search(r"\s", text) and text[0] not in "[{\"'":
            axes.append(Axis(key, tuple(text.split(","))))
        else:
            rest.append(f"--{key}={text}")
    keys = [axis.key for axis in axes]
    for axis in axes:
        if keys.count(axis.key) > 1:
            raise _at(axis.key, "it has more than one range of values")
        num_values = len(set(axis.values))
        if axis.is_range and num_values < len(axis.values):
            raise _at(axis.key, f"only {num_values} of its {len(axis.values)} values differ when rounded")
        if "" in axis.values or num_values < len(axis.values):
            raise _at(axis.key, f"{','.join(axis.values)} has an empty value, or one twice")
    return axes, rest


def _range(key: str, low: str, high: str, num: str) -> tuple[str, ...]:
    start, end, intervals = float(low), float(high), int(num) - 1
    if not 0 < start < end < math.inf or intervals < 1:
        raise _at(key, f"{low}:{high}:{num} is not LOW:HIGH:NUM with 0 < LOW < HIGH and 2 or more values")
    numbers = [start * (end / start) ** (i / intervals) for i in range(intervals + 1)]
    if re.fullmatch(WHOLE, low) and re.fullmatch(WHOLE, high):
        return tuple(str(round(number)) for number in numbers)
    return tuple(f"{number:.3g}" for number in numbers)


def _at(key: str, text: str) -> ConfigError:
    return ConfigError(f"command line, --{key}: {text}")
