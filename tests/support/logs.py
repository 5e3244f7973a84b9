"""The log of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from titanlite.log import logger


@contextmanager
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let caplog see the log lines of a run, whose logger does not propagate them."""
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
