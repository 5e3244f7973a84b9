"""A training run loads the core only."""

from __future__ import annotations

import subprocess
import sys

SATELLITES = ("titanlite.contrib", "titanlite.corpus", "titanlite.lab", "titanlite.report")


def loaded(statement: str) -> list[str]:
    """The modules of satellites that a fresh process loads with a statement."""
    code = f"import sys; {statement}; print(*sys.modules, sep='\\n')"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return [name for name in names.split() if f"{name}.".startswith(tuple(f"{s}." for s in SATELLITES))]


def test_the_trainer_loads_no_satellite() -> None:
    assert not loaded("import titanlite.train")
    for name in SATELLITES:  # control
        assert loaded(f"import {name}.verbs")
