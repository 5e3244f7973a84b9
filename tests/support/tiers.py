"""The tiers of tests: the default one, which `pytest` runs, and the full one, which `pytest -m full` runs."""

from __future__ import annotations

from typing import Any

import pytest


def full(*values: Any) -> Any:
    """Values of pytest.mark.parametrize whose test is in the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)
