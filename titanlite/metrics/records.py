"""Files of records that a run appends to, such as metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import PurePath

from titanlite.storage import storage_of


def utc_now() -> str:
    """The time of a record, such as 2026-11-28T07:00:00.123+00:00."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def append(path: PurePath, data: bytes) -> None:
    """Append to a file all of `data` or, if the storage is full, nothing. Raises OSError."""
    storage_of(path).append(path, data)


def cut(
    path: PurePath, split: Callable[[bytes], Sequence[bytes]], step_of: Callable[[bytes], int], from_step: int
) -> int | None:
    """Leave only the records up to `from_step` in a file. All other records move to
    `<name>.superseded.<ending>`: records of later steps, a last record that a kill has cut short, and damaged
    records. Returns the latest step whose record has moved, if any. Raises OSError.

    `split`: splits a file's content into records. `step_of`: the step of a record; raises ValueError for a
    damaged record.
    """
    storage = storage_of(path)
    if not storage.exists(path):
        return None
    content, kept, removed, latest = storage.read(path), list[bytes](), list[bytes](), None
    for record in split(content):
        record = record if record.endswith(b"\n") else record + b"\n"
        is_kept = False
        with suppress(ValueError):
            step = step_of(record)
            is_kept = 0 <= step <= from_step
            if step > from_step:
                latest = max(step, latest or 0)
        (kept if is_kept else removed).append(record)
    if removed:
        append(path.with_suffix(f".superseded{path.suffix}"), b"".join(removed))
    if (remaining := b"".join(kept)) != content:
        storage.put(path, remaining)
    return latest


def end_last_line(path: PurePath) -> None:
    """End the last line of a file of lines, if a kill has cut it short, so that it damages no other line."""
    storage = storage_of(path)
    if storage.exists(path) and (content := storage.read(path)) and not content.endswith(b"\n"):
        append(path, b"\n")
