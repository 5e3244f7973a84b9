"""Requests from outside, by signal or by file: stop soon, or save now.

SIGTERM, SIGINT, SIGHUP, SIGUSR1, or a file STOP in the run folder: save and end with exit code 75, "requeue
me". SIGUSR2: save and go on. A handler only notes the request; train.py agrees on it over all ranks and acts
between two steps, so one rank that is told is enough. A second SIGTERM, SIGINT or SIGHUP ends the process at
once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the second one does not wait
STOP = (*END, signal.SIGUSR1)
SAVE = (signal.SIGUSR2,)
AGAIN_S = 3.0  # a launcher and a terminal may each send what was meant once
LOOK_S = 1.0  # between two looks for the file


class Stopped(BaseException):
    """The run was asked to stop before there was a step to save. No Exception: it may arise anywhere, and
    what handles errors there must not take it for one."""

    exit_code = 75


class StopRequests:
    """What this process was asked for."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._looked = -LOOK_S
        self._stop_at: float | None = None
        self._ended_at: float | None = None  # by one of END
        self._save = False
        self._stepping = False

    def begin(self, stop_file: Path | None) -> None:
        """From now on there is something to save, so a request waits for the end of a step. `stop_file`: on
        rank 0, where STOP may appear."""
        self._file, self._stepping = stop_file, True

    @property
    def stop(self) -> bool:
        """Whether to stop. Looks for the file once a second."""
        now = time.monotonic()
        if self._file is not None and self._stop_at is None and now - self._looked >= LOOK_S:
            self._looked = now
            if os.path.exists(self._file):  # False where Path.exists raises: a stale mount, say
                self._stop_at = now
        return self._stop_at is not None

    def take_save(self) -> bool:
        """Whether to save; the request is then taken."""
        save, self._save = self._save, False
        return save

    def done(self) -> None:
        """The run has ended: the file is taken away, so that the next one does not."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in SAVE:
            self._save = True
            return
        now, name = time.monotonic(), signal.Signals(number).name
        if number in END:
            if self._ended_at is not None and now - self._ended_at > AGAIN_S:
                _say(f"{name} again: ending without saving")
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._ended_at = self._ended_at or now
        first, self._stop_at = self._stop_at is None, self._stop_at or now
        if not self._stepping:
            raise Stopped(f"stopped by {name} before the first step; nothing is lost")
        if first and self._file is not None:  # one rank says it
            _say(f"{name}: finishing the step, then saving; again after {AGAIN_S:.0f} s: not saving")


def _say(text: str) -> None:
    """A line to standard error, past its buffer, in which the handler may have interrupted a writer."""
    with suppress(OSError):
        os.write(2, f"titanlite: {text}\n".encode())


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Handle signals in the body; in the main thread, the only one that gets them."""
    requests = StopRequests()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        heard = [n for n in (*STOP, *SAVE) if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, requests._handle) for number in heard}  # nohup is heeded
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # a launcher holds them back until now
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
