"""The tiers of tests: the default one, which `pytest` runs, and the full one, which `pytest -m full` runs. A
run may be divided into parts: `pytest -m full --part=1/4`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full(*values: Any) -> Any:
    """Values of pytest.mark.parametrize whose test is in the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)


def sampled(values: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Values of pytest.mark.parametrize, of which those that are not in `default` are in the full tier."""
    return [value if value in default else full(value) for value in values]


def part(text: str) -> tuple[int, int]:
    """K and N of a part K/N, such as 1/4: one of N parts of the tests. Raises ValueError if it is not K/N
    with 1 <= K <= N."""
    numbers = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise ValueError(text)
    return int(numbers[1]), int(numbers[2])


def in_part(test: str, k: int, n: int) -> bool:
    """Whether the test with this node id is in part K of N. Each test is in exactly one part, by a hash of
    its node id."""
    return zlib.crc32(test.encode()) % n == k - 1
