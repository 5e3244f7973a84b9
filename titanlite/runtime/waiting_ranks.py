"""Processes that become ranks. Each imports PyTorch and titanlite and then waits for the environment of its
rank, while the launcher imports them, too, and checks the job. Started one after the other, both would take
the seconds of these imports. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from titanlite.runtime.environment import prepare_to_launch, waiting_environment
from titanlite.runtime.signals import SAVE, STOP


class WaitingRanks:
    """`count` processes of the command `titanlite WORDS`. As a context manager it ends those that have not
    become ranks; they also end when this process does."""

    def __init__(self, words: Sequence[str], count: int):
        self.module_and_words = ["titanlite.cli", *words]
        self._command = (sys.executable, "-u", "-m", *self.module_and_words)  # as torchrun spells it
        prepare_to_launch(count)
        self._waiting = [_start(self._command) for _ in range(count)]

    def __enter__(self) -> WaitingRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process, pipe in self._waiting:
            os.close(pipe)
            process.kill()
        for process, _ in self._waiting:
            process.wait()
        self._waiting = []

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen | None:
        """Let one of the processes run as the rank with this environment. Returns None if none is left, as
        after a restart, or if they have another command."""
        if not self._waiting or tuple(command) != self._command:
            return None
        process, pipe = self._waiting.pop(0)
        with suppress(BrokenPipeError), open(pipe, "w") as file:  # its exit code tells that it has ended
            json.dump(dict(environment), file)
        return process


def _start(command: Sequence[str]) -> tuple[subprocess.Popen, int]:
    """A process and the file descriptor to which its environment is written."""
    reads, writes = os.pipe()
    # Ranks inherit the mask and lift it when they have handlers. A session of its own: the terminal's signals
    # reach ranks through the launcher alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP, *SAVE))
    try:
        process = subprocess.Popen(
            command, env=waiting_environment(reads), pass_fds=[reads], start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP, *SAVE))
        os.close(reads)
    return process, writes
