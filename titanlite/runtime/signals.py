"""Requests to stop or to save, by signal or by file.

SIGTERM, SIGINT, SIGHUP, SIGUSR1, or a file STOP in the run folder: save and end with exit code 75, which asks
a scheduler to run the job again. SIGUSR2: save and continue. A signal handler only notes the request.
train.py lets all ranks agree on it and acts between two steps, so it is enough that one rank gets the signal.
A second SIGTERM, SIGINT or SIGHUP ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath
from types import FrameType
from typing import Any

from titanlite.runtime.environment import is_first_local_rank
from titanlite.storage import storage_of

END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # a second one of these ends the process at once
STOP = (*END, signal.SIGUSR1)
SAVE = (signal.SIGUSR2,)
AGAIN_S = 3.0  # seconds; a launcher and a terminal may both send the signal of one Ctrl-C
LOOK_S = 1.0  # seconds between two looks for the STOP file

_told_to_end: list[signal.Signals] = []  # the signals of END that this process has got


class Stopped(BaseException):
    """The run was asked to stop and takes no further step. The message says where it stopped.

    Derived from BaseException, because it may be raised anywhere and must not be handled as an error there.
    """

    exit_code = 75


class StopRequests:
    """The requests that this process has got. `leaves`: a request to stop before the training loop ends the
    process from within the handler; otherwise the handler raises Stopped."""

    def __init__(self, leaves: bool = False) -> None:
        self._leaves = leaves
        self._file: PurePath | None = None
        self._looked = -LOOK_S
        self._stop_at: float | None = None
        self._ended_at: float | None = None  # time of the first signal of END
        self._save = False
        self._name = ""  # of the last signal of STOP
        self._stepping = False

    def begin(self, stop_file: PurePath | None) -> None:
        """The training loop begins: from now on a request waits for the end of a step. `stop_file`: the path
        of the STOP file on rank 0, None on other ranks. Raises Stopped if a signal came before: Python drops
        an exception that a handler raises in a destructor or in the callback of a weak reference."""
        self.raise_if_early()
        self._file, self._stepping = stop_file, True

    def raise_if_early(self) -> None:
        """Raises Stopped if a signal has asked to stop before the training loop."""
        if self._stop_at is not None and not self._stepping:
            raise Stopped(f"stopped by {self._name} before the first step; nothing is lost")

    def end(self) -> None:
        """The run has ended: from now on a request changes nothing, unless it comes twice."""
        self._stepping = True

    @property
    def stop(self) -> bool:
        """Whether the run was asked to stop. Looks for the STOP file at most once a second."""
        now = time.monotonic()
        if self._file is not None and self._stop_at is None and now - self._looked >= LOOK_S:
            self._looked = now
            with suppress(OSError):  # a file system that does not answer does not end the run
                if storage_of(self._file).exists(self._file):
                    self._stop_at = now
        return self._stop_at is not None

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call."""
        save, self._save = self._save, False
        return save

    def done(self) -> None:
        """The run has ended: delete the STOP file, so that it does not stop the next start."""
        if self._file is not None:
            with suppress(OSError):
                storage_of(self._file).delete(self._file)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in SAVE:
            self._save = True
            return
        now, name = time.monotonic(), signal.Signals(number).name
        self._name = name
        if number in END:
            _told_to_end.append(signal.Signals(number))
            if self._ended_at is not None and now - self._ended_at > AGAIN_S:
                _say(f"{name} again: quitting without saving")
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._ended_at = self._ended_at or now
        first, self._stop_at = self._stop_at is None, self._stop_at or now
        try:
            self.raise_if_early()
        except Stopped as stopped:
            if not self._leaves:
                raise
            if is_first_local_rank():
                _say(str(stopped))
            os._exit(stopped.exit_code)
        if first and self._file is not None:  # on rank 0 only
            _say(
                f"{name}: finishing this step and saving; "
                f"repeat it after {AGAIN_S:.0f} s to quit without saving"
            )


def was_told_to_end() -> bool:
    """Whether this process has got a signal of END."""
    return bool(_told_to_end)


def _say(text: str) -> None:
    """Write a line to standard error without its buffer: the signal may have interrupted a write to the
    buffer."""
    with suppress(OSError):
        os.write(2, f"titanlite: {text}\n".encode())


def handled_signals() -> list[signal.Signals]:
    """The signals that the launcher and the ranks handle; under nohup, which ignores SIGHUP, not SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in (*STOP, *SAVE) if number != signal.SIGHUP or not ignored]


@contextmanager
def stop_requests(leaves: bool = False) -> Iterator[StopRequests]:
    """Note signals as requests in the body. Other threads than the main thread get no signals. An error of
    the body after a request to stop before the training loop becomes Stopped: the handler's exception may
    have broken an import. `leaves`: see StopRequests; for the imports, of which some drop every error."""
    requests = StopRequests(leaves)
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, requests._handle) for number in handled_signals()}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # the launcher blocks them until now
    try:
        yield requests
    except Exception:
        requests.raise_if_early()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        outer = getattr(before.get(signal.SIGTERM), "__self__", None)
        if isinstance(outer, StopRequests):
            outer.end()
