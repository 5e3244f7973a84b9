"""What a run logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from titanlite.log import logger


@contextmanager
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The logger hands nothing on once a run has set it up."""
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
