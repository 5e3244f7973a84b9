"""Progress of work that takes minutes: a bar on a terminal, a line per minute elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from titanlite.log import tell

SECONDS_PER_LINE = 60.0
LINE = "{desc}: {percentage:.0f}% of {total_fmt} [{elapsed}, {remaining} left, {rate_fmt}{postfix}]"
COUNT = "{desc}: {n_fmt}{unit} [{elapsed}, {rate_fmt}{postfix}]"  # for an unknown total


class Progress(tqdm):
    """tqdm's bar if standard error is a terminal. Otherwise a line per minute, because a bar would fill a
    file with carriage returns, and a line at the end if tqdm would leave the bar (`leave`, `delay`)."""

    def __init__(self, *args: Any, **options: Any):
        self._lines, self._leaves = not sys.stderr.isatty(), options.get("leave", True)
        self._began = self._last_line = time.monotonic()
        if self._lines:
            options |= {"bar_format": LINE if args or options.get("total") else COUNT, "leave": False}
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if not self._lines:
            return bool(super().display(msg, pos))
        if time.monotonic() - self._last_line >= SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            tell(self)
        return False  # tells tqdm that there is no bar to clear

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._leaves = self._leaves and kind is None  # the line of an error is the last one
        super().__exit__(kind, *error)

    def close(self) -> None:
        if self._lines and self._leaves and not self.disable and time.monotonic() - self._began >= self.delay:
            tell(self)
        super().close()
