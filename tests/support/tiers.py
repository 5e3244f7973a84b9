"""The tiers of tests: the default one, which `pytest` runs, and the full one, which `pytest -m full` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full(*values: Any) -> Any:
    """Values of pytest.mark.parametrize whose test is in the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)


def sampled(values: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Values of pytest.mark.parametrize, of which those that are not in `default` are in the full tier."""
    return [value if value in default else full(value) for value in values]
