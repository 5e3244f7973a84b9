"""The logger: one line per event, with time and rank. Only this module sets up logging.

By default rank 0 reports progress, and every rank reports warnings and errors.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Control characters except newline and tab, invisible changes of the writing direction, and lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

logger = logging.getLogger("titanlite")


def set_up_logging(rank: int, verbose: bool) -> None:
    """Log to standard error, with the rank in front of each line. `verbose`: report progress; otherwise only
    warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"[rank{rank}] %(asctime)s %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    # Warnings of libraries about deliberate choices. Each is named, so that no other warning is hidden.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    # The gradient norm over a mesh with two axes takes two all-reduces of one number, which torch warns
    # about.
    redistribute = logging.getLogger("torch.distributed.tensor._redistribute")
    redistribute.addFilter(lambda record: "While redistributing from" not in record.getMessage())


def printable(text: object) -> str:
    """The text with each control character except newline and tab replaced by its escape, such as `\\x1b`.
    Otherwise text from a file or a model could send commands to the terminal."""
    return UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], str(text))


class Terminal(io.TextIOWrapper):
    """Standard output to a terminal: writes text made printable."""

    def write(self, text: str) -> int:
        return super().write(printable(text))


def protect_terminal() -> None:
    """Make all text that is printed to standard output printable, if that is a terminal. Files and pipes get
    the text unchanged."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty():
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = Terminal(sys.stdout.detach(), encoding, errors, line_buffering=True)


def tell(message: object) -> None:
    """Print each line of a message for the user to standard error."""
    lines = "".join(f"titanlite: {line}\n" for line in printable(message).split("\n"))
    with suppress(OSError):  # for example, the terminal is closed
        print(lines, end="", file=sys.stderr, flush=True)


def write_error(text: str) -> None:
    """Write text to standard error, which may be closed."""
    with suppress(OSError):
        print(printable(text), end="", file=sys.stderr, flush=True)


class _Formatter(logging.Formatter):
    """Writes the time of each line, and the date before the first line of each day."""

    _day = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        day, now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)).split()
        before, self._day = self._day, day
        return now if day == before else f"{day} {now}"

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextmanager
def without_warnings_of(package: str) -> Iterator[None]:
    """In the body, a package logs errors only: huggingface_hub would log each of its attempts for half a
    minute."""
    log = logging.getLogger(package)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
