"""The logger: one line an event, with time and rank. Nothing else in titanlite sets up logging.

By default rank 0 reports progress and every rank reports warnings and errors.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import warnings
from contextlib import suppress

# Control characters but newline and tab, invisible changes of direction, and halves of characters.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

logger = logging.getLogger("titanlite")


def set_up_logging(rank: int, verbose: bool) -> None:
    """Log to standard error with the rank in front; quiet ranks report only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"[rank{rank}] %(asctime)s %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    # Said by libraries about choices made here on purpose; each is named, so that nothing else is hidden.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    # A norm over a mesh of two axes takes two all-reduces of one number.
    redistribute = logging.getLogger("torch.distributed.tensor._redistribute")
    redistribute.addFilter(lambda record: "While redistributing from" not in record.getMessage())


def printable(text: object) -> str:
    """The text with control characters as `\\x1b`: what comes from files, or from a model, must not steer the
    terminal. Newlines and tabs stay."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], str(text))


def for_terminal(text: str) -> str:
    """The text as it is where standard output is a file or a pipe, printable where it is a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def tell(what: object) -> None:
    """Print a line for the user, or one for each line of a report, to standard error, whether or not anybody
    is left to read it."""
    lines = "".join(f"titanlite: {line}\n" for line in printable(what).split("\n"))
    with suppress(OSError):
        print(lines, end="", file=sys.stderr, flush=True)


class _Formatter(logging.Formatter):
    """The time of each line; the date, too, of the first line and of the first one of a new day."""

    _day = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        day, now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)).split()
        before, self._day = self._day, day
        return now if day == before else f"{day} {now}"

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
