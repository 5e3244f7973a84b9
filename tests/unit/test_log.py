"""Pins the lines of the log: rank, time, and the date where a reader needs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from titanlite.log import logger, set_up_logging


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = handlers, level, propagate


def test_the_date_is_in_the_first_line_of_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(rank=3, verbose=True)
    noon = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))
    for i, hours in enumerate((0, 1, 11, 12, 13, 60)):
        record = logging.makeLogRecord({"msg": f"line {i}", "levelno": logging.INFO})
        record.created = noon + 3600 * hours
        logger.handle(record)
    assert capsys.readouterr().err.splitlines() == [
        "[rank3] 2026-11-22 12:00:00 line 0",
        "[rank3] 13:00:00 line 1",
        "[rank3] 23:00:00 line 2",
        "[rank3] 2026-11-23 00:00:00 line 3",
        "[rank3] 01:00:00 line 4",
        "[rank3] 2026-11-25 00:00:00 line 5",
    ]
