"""Starts the ranks' processes early, so that they import PyTorch while the launcher imports it and checks
the job. Each then waits for the environment of its rank. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from titanlite.runtime.environment import changed_variables, current_environment, waiting_environment
from titanlite.runtime.signals import SAVE, STOP


class _Waiting(NamedTuple):
    """A process, and the file descriptor to which its environment is written."""

    process: subprocess.Popen
    write_fd: int


def rank_command(words: Sequence[str]) -> list[str]:
    """The command of a rank that runs `titanlite WORDS`."""
    return [sys.executable, "-u", "-m", "titanlite.cli", *words]


class WaitingRanks:
    """`count` processes of the command `titanlite WORDS`. The context manager starts them and ends those that
    have not become ranks. Call prepare_to_launch before."""

    def __init__(self, words: Sequence[str], count: int):
        self._command, self._count = rank_command(words), count
        self._waiting: list[_Waiting] = []

    def __enter__(self) -> WaitingRanks:
        self._before = current_environment()
        # Ranks inherit the mask and lift it when they have handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP, *SAVE))
        try:
            for _ in range(self._count):
                self._waiting.append(_start(self._command))
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that have not become ranks."""
        for process, write_fd in self._waiting:
            process.kill()
            os.close(write_fd)
            process.wait()
        self._waiting = []

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen | None:
        """Let one of the processes run as the rank with this environment. Returns None if none is left, as
        after a restart. If the command is another one, it ends all of them."""
        if list(command) != self._command:
            self.close()
        if not self._waiting:
            return None
        process, write_fd = self._waiting.pop(0)
        with suppress(BrokenPipeError), open(write_fd, "w") as file:  # the agent sees that it has ended
            file.write(changed_variables(self._before, environment))
        return process


def _start(command: Sequence[str]) -> _Waiting:
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            env=waiting_environment(read_fd),
            pass_fds=[read_fd],
            start_new_session=True,  # as torchrun: the terminal's signals reach ranks through the launcher
        )
    except BaseException:
        os.close(write_fd)
        raise
    finally:
        os.close(read_fd)
    return _Waiting(process, write_fd)
