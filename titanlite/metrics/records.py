"""Files of records that a run appends to, for people and their tools. Nothing that happens to these files
ends a run.

Something else than a file at the path is moved aside at the start. Records that cannot be
written because the disk is full are kept in memory, and written when there is room.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO

from titanlite.files import write_atomically
from titanlite.log import logger

MAX_WAITING = 10_000  # records kept in memory: some MiB


class Records:
    """A file of records. Each record is written whole or not at all.

    `prepare`: see the method prepare; the first call, before the file is opened.
    """

    def __init__(self, path: Path, prepare: Callable[[], None] | None = None):
        self._path = path
        self._file: IO[str] | None = None
        self._waiting = deque[bytes | Callable[[], None]]()  # records and preparations, in order
        self._num_lost = 0
        self._fails = False
        if prepare is not None:
            self.prepare(prepare)

    def prepare(self, change: Callable[[], None]) -> None:
        """Call `change` when all records before it are written, with the file closed; again later if it
        raises OSError."""
        self._waiting.append(change)
        self.append()

    def append(self, *records: bytes) -> None:
        """Write the records, or keep them in memory until they can be written."""
        self._waiting.extend(records)
        while (num_waiting := self._num_waiting()) > MAX_WAITING:
            del self._waiting[next(i for i, item in enumerate(self._waiting) if isinstance(item, bytes))]
            self._num_lost += 1
        try:
            self._write_waiting()
        except OSError as e:
            if not self._fails:
                logger.error(f"{self._path}: {_reason(e)}; its records are kept until they can be written")
            self._fails = True
            return
        if self._fails:
            lost = f"; {self._num_lost} older ones are lost" if self._num_lost else ""
            logger.info(f"{self._path}: can be written again; {num_waiting} kept records are written{lost}")
            self._fails, self._num_lost = False, 0

    def _write_waiting(self) -> None:
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, bytes):
                if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
                    self._close_file()  # the file was removed
                self._file = self._file or _open(self._path)
                _write_whole(self._file, item)
            else:
                self._close_file()
                item()
            self._waiting.popleft()

    def _num_waiting(self) -> int:
        return sum(isinstance(item, bytes) for item in self._waiting)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        """Try once more to write the waiting records, and close the file."""
        self.append()
        if num_waiting := self._num_waiting():
            logger.error(f"{self._path}: its last {num_waiting} records could not be written")
        self._close_file()


def cut(
    path: Path, split: Callable[[bytes], Sequence[bytes]], step_of: Callable[[bytes], int], from_step: int
) -> None:
    """Leave only the records up to `from_step` in the file. All other records move to
    `<name>.superseded.<ending>`: those of later steps, a last record that a kill has cut short, and damaged
    records, with a warning.

    `split`: splits a file's content into records. `step_of`: the step of a record; raises ValueError for a
    damaged record.
    """
    content = read_own(path)
    kept, removed, num_damaged, is_cut_short = list[bytes](), list[bytes](), 0, False
    for record in split(content):
        line_ended = record.endswith(b"\n")
        record = record if line_ended else record + b"\n"
        try:
            is_kept = 0 <= step_of(record) <= from_step
        except ValueError:
            # A kill leaves a last line without an end, which alone is no damage.
            is_kept, num_damaged, is_cut_short = False, num_damaged + line_ended, not line_ended
        (kept if is_kept else removed).append(record)
    superseded = path.with_suffix(f".superseded{path.suffix}")
    if removed:
        _append(superseded, b"".join(removed))
    if (remaining := b"".join(kept)) != content:
        write_atomically(path, remaining)
    if num_damaged:
        records = f"{num_damaged} damaged record{'s' if num_damaged > 1 else ''}"
        records += " and a last record that was cut short" if is_cut_short else ""
        verb = "were" if num_damaged > 1 or is_cut_short else "was"
        logger.warning(f"{path}: {records} {verb} moved to {superseded.name}")


def end_last_line(path: Path) -> None:
    """End the last line of a file of lines, if a kill has cut it short, so that it damages no other line."""
    if (content := read_own(path)) and not content.endswith(b"\n"):
        _append(path, b"\n")


def read_own(path: Path) -> bytes:
    """The content of a file of the run folder; empty without one. Something else at its path, or a file that
    cannot be read, is moved aside."""
    if not os.path.lexists(path):
        return b""
    try:
        return path.read_bytes()
    except OSError as e:
        move_aside(path, _reason(e))
        return b""


def _append(path: Path, data: bytes) -> None:
    """Append to a file of the run folder; anything else at its path is moved aside."""
    try:
        file = _open(path)
    except IsADirectoryError as e:
        move_aside(path, _reason(e))
        file = _open(path)
    with file:
        _write_whole(file, data)


def _open(path: Path) -> IO[str]:
    """Open a file of the run folder for appending. A hard link is replaced by a file of its own: `cp -rl` may
    have copied the run folder, and the copy must not get these records."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 -- Records keeps it open
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        write_atomically(path, read_own(path))
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    return file


def _write_whole(file: IO[str], data: bytes) -> None:
    end, written = os.fstat(file.fileno()).st_size, 0
    try:
        while written < len(data):
            written += os.write(file.fileno(), data[written:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), end)
        raise


def move_aside(path: Path, reason: str) -> None:
    """Give the file or folder the first free name of `<name>.damaged-<number>.<ending>`, with a warning."""
    names = (path.with_name(f"{path.stem}.damaged-{i}{path.suffix}") for i in count())
    aside = next(name for name in names if not os.path.lexists(name))
    os.rename(path, aside)
    logger.warning(f"{path}: {reason}; moved to {aside.name}, and the run continues with a new one")


def _reason(error: OSError) -> str:
    return getattr(error, "strerror", None) or str(error)
