"""Pins what happens to the files for people: damaged records are moved aside and never end a run; records
that a full disk refuses are written later, whole, in order, with one line at the start and one at the end."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from titanlite.log import logger
from titanlite.metrics import records
from titanlite.metrics.sinks.base import Writer
from titanlite.metrics.sinks.jsonl import JsonLines, Tables
from titanlite.metrics.sinks.samples import Samples
from titanlite.metrics.sinks.tensorboard import EventFile


@pytest.fixture(autouse=True)
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """Each message once, whether or not a run has set up the logger before."""
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    level = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)


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
def test_damaged_lines_of_metrics(tmp_path: Path, log: pytest.LogCaptureFixture, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + bad + line(3) + line(5))
    write(JsonLines(path, from_step=3), 4)
    assert path.read_bytes() == line(1) + line(3) + line(4)
    assert (tmp_path / "metrics.superseded.jsonl").read_bytes() == bad + line(5)
    assert log.messages == [f"{path}: 1 damaged record was moved to metrics.superseded.jsonl"]


@pytest.mark.parametrize(
    "end", ['{"step": 2, "text": "é'.encode()[:-1], bytes(300), b'{"step": 2, "tr' + bytes(9)]
)
def test_a_last_line_without_an_end_is_no_damage(
    tmp_path: Path, log: pytest.LogCaptureFixture, end: bytes
) -> None:
    """NULs are what a file system shows, after a power loss, of data that it had not written."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + end)
    write(JsonLines(path, from_step=1), 2)
    assert path.read_bytes() == line(1) + line(2)
    assert (tmp_path / "metrics.superseded.jsonl").read_bytes() == end + b"\n"
    assert log.messages == []


def test_the_warning_names_a_last_line_without_an_end_beside_damage(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + b'{"step": 2, "tr\n' + line(3) + b'{"step": 4, "tr')
    write(JsonLines(path, from_step=3), 4)
    assert path.read_bytes() == line(1) + line(3) + line(4)
    moved = "1 damaged record and a last record that was cut short were moved"
    assert log.messages == [f"{path}: {moved} to metrics.superseded.jsonl"]


def test_samples_of_nulls_are_damage(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """But not a NUL in a sample, which a model of bytes may write."""
    path = tmp_path / "samples.txt"
    path.write_bytes(bytes(300) + b"\n")
    write(Samples(path, from_step=3), 4)
    assert (tmp_path / "samples.superseded.txt").read_bytes() == bytes(300) + b"\n"
    assert path.read_bytes() == sample(4)
    path.write_bytes(content := sample(1).replace(b"n", b"\0"))
    write(Samples(path, from_step=3), 4)
    assert path.read_bytes() == content + sample(4)
    assert len(log.messages) == 1


def test_damaged_samples(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "samples.txt"
    damaged = b"--- step 2\nhalf of \xc3\n" + b"--- step " + b"9" * 5000 + b"\n"
    path.write_bytes(sample(1) + damaged + sample(3))
    write(Samples(path, from_step=3), 4)
    assert (tmp_path / "samples.superseded.txt").read_bytes() == damaged
    assert path.read_bytes() == sample(1) + sample(3) + sample(4)
    assert log.messages == [f"{path}: 2 damaged records were moved to samples.superseded.txt"]


def directory(path: Path) -> None:
    (path / "mine").mkdir(parents=True)


def plain_file(path: Path) -> None:
    path.write_bytes(b"mine")


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def link(path: Path) -> None:
    path.with_name("other").touch()
    path.symlink_to("other")


FILES = [(JsonLines, "metrics.jsonl"), (Samples, "samples.txt")]
KINDS = [
    *[(make, name, directory) for make, name in FILES],
    *[(EventFile, "tb", kind) for kind in (plain_file, os.mkfifo, dangling_link, link)],
]


@pytest.mark.parametrize(("make", "name", "kind"), KINDS)
def test_another_kind_of_file_is_moved_aside(
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
    make: Callable[[Path, int], Writer],
    name: str,
    kind: Callable[[Path], None],
) -> None:
    path = tmp_path / name
    path.with_name(f"{path.stem}.damaged-0{path.suffix}").touch()
    kind(path)
    mode = os.lstat(path).st_mode
    write(make(path, 0), 1)
    aside = path.with_name(f"{path.stem}.damaged-1{path.suffix}")
    assert os.lstat(aside).st_mode == mode
    assert path.stat().st_size > 0
    assert not path.is_symlink()
    assert len(log.messages) == 1
    assert aside.name in log.messages[0]
    assert not (tmp_path / "nowhere").exists()


# ---- a rewind


def test_a_rewind_moves_the_records_of_later_steps(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
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
    assert log.messages == []


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


# ---- a full disk


class FullDisk:
    """Takes `room` more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.room = 1 << 40
        write = os.write

        def limited(file: int, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write(file, data[: self.room])
            self.room -= written
            return written

        monkeypatch.setattr(os, "write", limited)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_lines_that_a_full_disk_refused_are_written_later(
    tmp_path: Path, disk: FullDisk, log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, 0)
    for step in range(1, 8):
        if step == 3:
            disk.room = 10
        if step == 6:
            disk.room = 1 << 40
        sink.write(step, {"train/loss": 2.5})
        written = min(step, 2) if step < 6 else step
        assert path.read_bytes() == b"".join(map(line, range(1, written + 1)))
    sink.close()
    assert log.messages == [
        f"{path}: No space left on device; its records are kept until they can be written",
        f"{path}: can be written again; 4 kept records are written",
    ]


def test_what_is_kept_has_a_limit(
    tmp_path: Path, disk: FullDisk, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_WAITING", 3)
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, 0)
    disk.room = 0
    for step in range(1, 6):
        sink.write(step, {"train/loss": 2.5})
    disk.room = 1 << 40
    write(sink, 6)
    assert path.read_bytes() == line(4) + line(5) + line(6)
    assert (
        log.messages[-1] == f"{path}: can be written again; 3 kept records are written; 3 older ones are lost"
    )


def test_a_disk_that_stays_full(tmp_path: Path, disk: FullDisk, log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, 0)
    sink.write(1, {"train/loss": 2.5})
    disk.room = 5
    write(sink, 2, 3)
    assert path.read_bytes() == line(1)
    assert log.messages[1:] == [f"{path}: its last 2 records could not be written"]


def test_records_that_wait_at_a_rewind_are_superseded(tmp_path: Path, disk: FullDisk) -> None:
    path, superseded = tmp_path / "metrics.jsonl", tmp_path / "metrics.superseded.jsonl"
    sink = JsonLines(path, 0)
    sink.write(1, {"train/loss": 2.5})
    disk.room = 0
    for step in (2, 3):
        sink.write(step, {"train/loss": 9.5})
    sink.event(1, "rewound", {})
    sink.write(2, {"train/loss": 2.5})
    disk.room = 1 << 40
    write(sink, 3)
    assert path.read_bytes() == line(1) + line(2) + line(3)
    assert superseded.read_bytes() == (line(2) + line(3)).replace(b"2.5", b"9.5")


def test_a_rewind_on_a_full_disk(
    tmp_path: Path, disk: FullDisk, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that wait are cut, too, and the limit of what is kept drops records, never the cut."""
    monkeypatch.setattr(records, "MAX_WAITING", 3)
    path, superseded = tmp_path / "metrics.jsonl", tmp_path / "metrics.superseded.jsonl"
    sink = JsonLines(path, 0)
    sink.write(1, {"train/loss": 2.5})
    disk.room = 0
    for step in (2, 3):
        sink.write(step, {"train/loss": 2.5})
    sink.event(1, "rewound", {})
    for step in (2, 3):
        sink.write(step, {"train/loss": 2.5})
    assert path.read_bytes() == line(1)
    disk.room = 1 << 40
    write(sink, 4)
    assert path.read_bytes() == line(1) + line(2) + line(3) + line(4)
    assert not superseded.exists()  # lines 2 and 3 of the first attempt were the oldest of five
    assert log.messages[-1].endswith("; 3 kept records are written; 2 older ones are lost")


def test_a_start_on_a_full_disk(tmp_path: Path, disk: FullDisk) -> None:
    path, superseded = tmp_path / "metrics.jsonl", tmp_path / "metrics.superseded.jsonl"
    path.write_bytes(line(1) + line(2))
    disk.room = 5
    sink = JsonLines(path, from_step=1)
    sink.write(2, {"train/loss": 1.5})
    assert (path.read_bytes(), superseded.read_bytes()) == (line(1) + line(2), b"")
    disk.room = 1 << 40
    write(sink, 3)
    assert path.read_bytes() == line(1) + line(2).replace(b"2.5", b"1.5") + line(3)
    assert superseded.read_bytes() == line(2)


def test_a_hard_link_of_a_copied_run_folder_gets_no_records(tmp_path: Path) -> None:
    path, copy = tmp_path / "metrics.jsonl", tmp_path / "copy.jsonl"
    write(JsonLines(path, 0), 1)
    os.link(path, copy)
    write(JsonLines(path, 1), 2)
    assert (path.read_bytes(), copy.read_bytes()) == (line(1) + line(2), line(1))
