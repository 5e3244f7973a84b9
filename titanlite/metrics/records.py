"""Files of records that a run appends to, such as metrics.jsonl."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from titanlite.files import named, write_atomically


def append(path: Path, data: bytes) -> None:
    """Append to a file all of `data` or, if the disk is full, nothing. Raises OSError."""
    # `cp -rl` copies a run folder as hard links, and the copy must not get the records of this run.
    if path.exists() and path.stat().st_nlink > 1:
        write_atomically(path, path.read_bytes())
    with open(path, "ab") as file, named(path):
        end, written = file.tell(), 0
        try:
            while written < len(data):
                written += os.write(file.fileno(), data[written:])
        except OSError:
            file.truncate(end)
            raise


def cut(
    path: Path, split: Callable[[bytes], Sequence[bytes]], step_of: Callable[[bytes], int], from_step: int
) -> None:
    """Leave only the records up to `from_step` in a file. All other records move to
    `<name>.superseded.<ending>`: records of later steps, a last record that a kill has cut short, and damaged
    records. Raises OSError.

    `split`: splits a file's content into records. `step_of`: the step of a record; raises ValueError for a
    damaged record.
    """
    if not path.exists():
        return
    content, kept, removed = path.read_bytes(), list[bytes](), list[bytes]()
    for record in split(content):
        record = record if record.endswith(b"\n") else record + b"\n"
        try:
            is_kept = 0 <= step_of(record) <= from_step
        except ValueError:
            is_kept = False
        (kept if is_kept else removed).append(record)
    if removed:
        append(path.with_suffix(f".superseded{path.suffix}"), b"".join(removed))
    if (remaining := b"".join(kept)) != content:
        write_atomically(path, remaining)


def end_last_line(path: Path) -> None:
    """End the last line of a file of lines, if a kill has cut it short, so that it damages no other line."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        append(path, b"\n")
