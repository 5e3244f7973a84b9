"""Pins what happens to the files of records: damaged records are moved, a rewind moves the records of later
steps, and a record that a full disk refuses leaves the file as it was."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from titanlite.metrics.sinks.base import Sinks, Writer
from titanlite.metrics.sinks.events import EventLog
from titanlite.metrics.sinks.jsonl import JsonLines, Tables
from titanlite.metrics.sinks.samples import Samples


def write(sink: Writer, *steps: int) -> None:
    for step in steps:
        sink.write(step, {"train/loss": 2.5})
        sink.sample(step, "once")
    sink.close()


def line(step: int) -> bytes:
    return b'{"step": %d, "train/loss": 2.5}\n' % step


def sample(step: int) -> bytes:
    return b"--- step %d\nonce\n" % step


# ---- damage


BAD_LINES = {
    "no UTF-8": b'{"step": 2, "text": "\xff"}\n',
    "binary": bytes(b for b in range(256) if b != ord("\n")) + b"\n",
    "no object": b"[1]\n",
    "a step that is text": b'{"step": "x"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "a step of 5,000 digits": b'{"step": ' + b"9" * 5000 + b"}\n",
    "empty": b"\n",
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_damaged_lines_of_metrics(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + bad + line(3) + line(5))
    write(JsonLines(path, from_step=3), 4)
    assert path.read_bytes() == line(1) + line(3) + line(4)
    assert (tmp_path / "metrics.superseded.jsonl").read_bytes() == bad + line(5)


@pytest.mark.parametrize(
    "end", ['{"step": 2, "text": "é'.encode()[:-1], bytes(300), b'{"step": 2, "tr' + bytes(9)]
)
def test_a_last_line_without_an_end_is_no_damage(tmp_path: Path, end: bytes) -> None:
    """NULs are what a file system shows, after a power loss, of data that it had not written."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + end)
    write(JsonLines(path, from_step=1), 2)
    assert path.read_bytes() == line(1) + line(2)
    assert (tmp_path / "metrics.superseded.jsonl").read_bytes() == end + b"\n"


def test_samples_of_nulls_are_damage(tmp_path: Path) -> None:
    """But not a NUL in a sample, which a model of bytes may write."""
    path = tmp_path / "samples.txt"
    path.write_bytes(bytes(300) + b"\n")
    write(Samples(path, from_step=3), 4)
    assert (tmp_path / "samples.superseded.txt").read_bytes() == bytes(300) + b"\n"
    assert path.read_bytes() == sample(4)
    path.write_bytes(content := sample(1).replace(b"n", b"\0"))
    write(Samples(path, from_step=3), 4)
    assert path.read_bytes() == content + sample(4)


def test_damaged_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.txt"
    damaged = b"--- step 2\nhalf of \xc3\n" + b"--- step " + b"9" * 5000 + b"\n"
    path.write_bytes(sample(1) + damaged + sample(3))
    write(Samples(path, from_step=3), 4)
    assert (tmp_path / "samples.superseded.txt").read_bytes() == damaged
    assert path.read_bytes() == sample(1) + sample(3) + sample(4)


# ---- a rewind


def test_a_rewind_moves_the_records_of_later_steps(tmp_path: Path) -> None:
    for sink, record, name in (
        (JsonLines(tmp_path / "metrics.jsonl", 0), line, "metrics{}.jsonl"),
        (Samples(tmp_path / "samples.txt", 0), sample, "samples{}.txt"),
    ):
        for step in (1, 2, 3):
            sink.write(step, {"train/loss": 2.5})
            sink.sample(step, "once")
        sink.event(3, "saved", {})
        sink.event(1, "rewound", {})
        assert (tmp_path / name.format("")).read_bytes() == record(1)
        write(sink, 2)
        assert (tmp_path / name.format("")).read_bytes() == record(1) + record(2)
        assert (tmp_path / name.format(".superseded")).read_bytes() == record(2) + record(3)


def test_tables_are_cut_like_metrics(tmp_path: Path) -> None:
    path = tmp_path / "probe.jsonl"
    tables = Tables(tmp_path, from_step=0)
    tables.write(1, {"train/loss": 2.5})
    assert not path.exists()
    for step in (1, 2, 3):
        tables.table(step, "probe", {"blocks": [{"block": "0", "heads": [step, math.nan, -math.inf]}]})
    tables.event(2, "rewound", {})
    tables.close()
    tables = Tables(tmp_path, from_step=1)  # of a resumed run that makes no tables
    tables.close()
    text = '{"step": %d, "blocks": [{"block": "0", "heads": [%d, "nan", "-inf"]}]}\n'
    assert path.read_text() == text % (1, 1)
    assert (tmp_path / "probe.superseded.jsonl").read_text() == text % (3, 3) + text % (2, 2)


def test_a_record_that_a_full_disk_refuses_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_bytes, room = os.write, [1 << 40]

    def limited(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write_bytes(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    path = tmp_path / "metrics.jsonl"
    sinks = Sinks({"metrics.jsonl": JsonLines(path, 0)})
    for step in range(1, 6):
        room[0] = 10 if 2 <= step <= 3 else 1 << 40
        sinks.write(step, {"train/loss": 2.5})
    assert path.read_bytes() == line(1) + line(4) + line(5)


def test_a_hard_link_of_a_copied_run_folder_gets_no_records(tmp_path: Path) -> None:
    path, copy = tmp_path / "metrics.jsonl", tmp_path / "copy.jsonl"
    write(JsonLines(path, 0), 1)
    os.link(path, copy)
    write(JsonLines(path, 1), 2)
    assert (path.read_bytes(), copy.read_bytes()) == (line(1) + line(2), line(1))
    events, copied = tmp_path / "events.jsonl", tmp_path / "copied.jsonl"
    log = EventLog(events, 0)
    os.link(events, copied)
    before = copied.read_bytes()
    log.event(1, "saved", {})
    assert copied.read_bytes() == before != events.read_bytes()
