"""Files that a run only appends to, for people and their tools: nothing that happens to them ends a run.

A file that is damaged or no file at all is moved aside at the start. What cannot be written while a disk is
full is kept in memory, and written once there is room.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO

from titanlite.files import FileFault, open_own, write_atomically
from titanlite.log import logger

MOST_KEPT = 10_000  # records in memory: some MiB
MOST_DIGITS = 18  # of a step


class Records:
    """A file of records, each of which is written whole or not at all.

    `prepare` makes room for the file before it is opened. It is called again later if it raises OSError.
    """

    def __init__(self, path: Path, prepare: Callable[[], None]):
        self._path, self._prepare = path, prepare
        self._prepared = False
        self._file: IO[str] | None = None
        self._waiting = deque[bytes]()
        self._num_lost = 0
        self._fails = False
        self.append()

    def append(self, *records: bytes) -> None:
        """Write the records, or keep them until they can be written."""
        self._waiting.extend(records)
        while len(self._waiting) > MOST_KEPT:
            self._waiting.popleft()
            self._num_lost += 1
        num_waiting = len(self._waiting)
        try:
            self._write_waiting()
        except (OSError, FileFault) as e:
            if not self._fails:
                logger.error(f"{self._path}: {_reason(e)}; its records are kept until they can be written")
            self._fails = True
            return
        if self._fails:
            lost = f"; {self._num_lost} older ones are lost" if self._num_lost else ""
            logger.info(f"{self._path}: can be written again; {num_waiting} kept records are written{lost}")
            self._fails, self._num_lost = False, 0

    def _write_waiting(self) -> None:
        if not self._prepared:
            self._prepare()
            self._prepared = True
        if self._waiting and self._file is None:
            self._file = open_own(self._path)
        while self._waiting and self._file is not None:
            _write_whole(self._file, self._waiting[0])
            self._waiting.popleft()

    def close(self) -> None:
        """Try once more to write what is kept, and close the file."""
        self.append()
        if self._waiting:
            logger.error(f"{self._path}: its last {len(self._waiting)} records could not be written")
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def cut(
    path: Path,
    split: Callable[[bytes], Sequence[bytes]],
    step_of: Callable[[bytes], int],
    begins: bytes,
    from_step: int,
) -> None:
    """Leave the records up to `from_step` in the file. Those of later steps, and a torn last one, move to
    `<name>.superseded.<ending>`. A damaged file is moved aside; its readable records stay.

    `split`: a file's content into records. `step_of`: a record's step; raises ValueError for a damaged one.
    `begins`: what stands before the step in each record; it tells a last one that a kill has torn from a
    damaged one.
    """
    if not os.path.lexists(path):
        return
    try:
        with open_own(path) as file, open(file.fileno(), "rb", closefd=False) as data:
            data.seek(0)
            content = data.read()
    except (OSError, FileFault) as e:
        move_aside(path, _reason(e))
        return
    kept, later, num_damaged = list[bytes](), list[bytes](), 0
    records = split(content)
    for i, record in enumerate(records, 1):
        ended = record.endswith(b"\n")
        try:
            step = step_of(record)
            if not 0 <= step < 10**MOST_DIGITS:
                raise ValueError("no run takes such a step")
            is_later = step > from_step
        except ValueError:
            if ended or i < len(records) or not _is_torn(record, begins):
                num_damaged += 1
                continue
            is_later = True  # torn by a kill: its step is written again
        (later if is_later else kept).append(record if ended else record + b"\n")
    if later:
        _append(path.with_suffix(f".superseded{path.suffix}"), b"".join(later))
    whole = b"".join(kept)
    if num_damaged or not (content + b"\n").startswith(whole):
        damage = f"{num_damaged} of its {len(records)} records are damaged"
        move_aside(path, damage if num_damaged else "its steps are not in order")
        write_atomically(path, whole)
    elif len(whole) < len(content):
        os.truncate(path, len(whole))
    elif len(whole) > len(content):
        _append(path, b"\n")


def _is_torn(record: bytes, begins: bytes) -> bool:
    """Whether a kill may have left this of a record."""
    digits = re.match(rb"\d*", record[len(begins) :])
    is_step = digits is not None and len(digits[0]) <= MOST_DIGITS
    return begins.startswith(record[: len(begins)]) and is_step and b"\0" not in record


def _append(path: Path, data: bytes) -> None:
    """Append to a file of the run folder; what is no file is moved aside."""
    try:
        file = open_own(path)
    except FileFault as e:
        move_aside(path, str(e))
        file = open_own(path)
    with file:
        _write_whole(file, data)


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
    logger.warning(f"{path}: {reason}; moved to {aside.name}, and the run goes on with a new one")


def _reason(error: OSError | FileFault) -> str:
    return getattr(error, "strerror", None) or str(error)
