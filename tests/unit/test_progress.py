"""Pins progress in a file: no carriage returns, a line now and then; and the bar on a terminal."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest

from titanlite import progress
from titanlite.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, seconds: float, **options: Any) -> str:
    """What ten pieces of work, which take `seconds` each, write to standard error."""
    clock = [0.0]
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "time", type("Clock", (), {"monotonic": lambda: clock[0]}))
    with Progress(total=10, desc="working", unit="doc", **options) as bar:
        for i in range(10):
            clock[0] += seconds
            bar.set_postfix(tokens=i, refresh=False)
            bar.update(1)
            bar.refresh()
    return stderr.getvalue()


def test_a_file_gets_whole_lines_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = work(monkeypatch, io.StringIO(), seconds=25).splitlines(keepends=True)
    assert len(lines) == 4
    assert all(line.startswith("titanlite: working: ") and line.endswith("]\n") for line in lines)
    assert "30% of 10 [" in lines[0]
    assert "tokens=2]" in lines[0]
    assert not any("\r" in line for line in lines)


def test_a_file_gets_one_line_of_short_work(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = work(monkeypatch, io.StringIO(), seconds=5).splitlines()
    assert line.startswith("titanlite: working: 100% of 10 [")


def test_a_file_gets_no_line_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    with pytest.raises(KeyError), Progress(total=10, desc="working", unit="doc"):
        raise KeyError
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("options", [{"leave": False}, {"delay": 51}, {"disable": True}], ids=str)
def test_a_file_gets_nothing_of_what_tqdm_would_not_leave(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    assert work(monkeypatch, io.StringIO(), seconds=5, **options) == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = work(monkeypatch, Terminal(), seconds=0)
    assert "\rworking: 100%|" in text
    assert time.monotonic() > 0, "the clock of the test is the module's alone"
