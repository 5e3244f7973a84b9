"""Ends this process when the process that started it ends. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from titanlite.runtime.environment import launcher_pid, take_tune_pid


def die_with_launcher() -> None:
    """On Linux, let the kernel kill this rank when the launcher dies. Ranks left behind by a launcher that
    was killed with SIGKILL would keep the devices and the run folder's lock."""
    _end_with_parent(launcher_pid(), signal.SIGKILL)


def stop_with_tune() -> None:
    """On Linux, let the kernel send SIGTERM to this run of `titanlite tune`, so that it saves and ends, when
    the thread of tune that started it ends. Does nothing in a process that tune has not started."""
    pid = take_tune_pid()
    if pid is not None:
        _end_with_parent(pid, signal.SIGTERM)


def _end_with_parent(parent: int | None, number: signal.Signals) -> None:
    """On Linux, let this process get a signal when its parent ends. `parent`: the parent's process id, if
    known."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), number)  # the parent ended before the call to prctl
