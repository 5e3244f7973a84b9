"""Starts the ranks' processes as copies of the launcher, which has imported PyTorch. Each waits for the
environment of its rank while the launcher checks the job."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from titanlite.runtime.environment import await_rank, changed_variables, current_environment
from titanlite.runtime.parent import die_with_launcher
from titanlite.runtime.signals import SAVE, STOP, handled_signals
from titanlite.torch_compat import is_copy_without_cuda

POLL_S = 0.01


class RankProcess:
    """A copy of this process, with the methods of subprocess.Popen that torchrun's agent uses."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        """Exit code, or the negative number of the signal that ended it; None: it has not been seen to
        end."""

    def poll(self) -> int | None:
        """`returncode`, after a look at the process."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: the code is lost, as for subprocess.Popen
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        """Send SIGKILL, unless the process has been seen to end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Waiting(NamedTuple):
    """A process, and the file descriptor to which its environment is written."""

    process: RankProcess
    write_fd: int


def rank_command(words: Sequence[str]) -> list[str]:
    """The command of a rank that runs `titanlite WORDS`."""
    return [sys.executable, "-u", "-m", "titanlite.cli", *words]


def can_copy() -> bool:
    """Whether a copy of this process works: on Linux, and without other Python threads, which a copy would
    not have. OpenBLAS ends its threads before a fork, and importing torch makes none of OpenMP's."""
    return sys.platform == "linux" and threading.active_count() == 1


class WaitingRanks:
    """`count` processes that run `titanlite WORDS`; none if this process cannot be copied. The context
    manager starts them and ends those that have not become ranks. Call prepare_to_launch before, and then
    import what they need. `main`: runs the command in sys.argv and returns its exit code."""

    def __init__(self, words: Sequence[str], count: int, main: Callable[[], int]):
        self._words, self._count, self._main = list(words), count, main
        self._waiting: list[_Waiting] = []

    def __enter__(self) -> WaitingRanks:
        self._before = current_environment()
        # Ranks inherit the mask and lift it when they have handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP, *SAVE))
        try:
            for _ in range(self._count if can_copy() else 0):
                self._waiting.append(self._start())
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

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> RankProcess | None:
        """Let one of the processes run as the rank with this environment. Returns None if none is left, as
        after a restart. If the command is another one, it ends all of them."""
        if list(command) != rank_command(self._words):
            self.close()
        if not self._waiting:
            return None
        process, write_fd = self._waiting.pop(0)
        with suppress(BrokenPipeError), open(write_fd, "w") as file:  # the agent sees that it has ended
            file.write(changed_variables(self._before, environment))
        return process

    def _start(self) -> _Waiting:
        read_fd, write_fd = os.pipe()
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # otherwise, the copy would write the buffer, too
            pid = os.fork()
        except BaseException:
            os.close(read_fd)
            os.close(write_fd)
            raise
        if pid == 0:
            self._run_rank(read_fd, write_fd)
        os.close(read_fd)
        return _Waiting(RankProcess(pid), write_fd)

    def _run_rank(self, read_fd: int, write_fd: int) -> NoReturn:
        """In the copy: wait for the environment, and run the command. Never returns, so that nothing of the
        launcher runs in the copy."""
        code = 1
        try:
            os.setsid()  # as torchrun: the terminal's signals reach ranks through the launcher
            die_with_launcher()
            for number in handled_signals():  # instead of the launcher's handlers
                is_interrupt = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
            for fd in (write_fd, *(waiting.write_fd for waiting in self._waiting)):
                os.close(fd)  # otherwise, the copy made before would wait for this one, too
            sys.argv[1:] = self._words
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)  # lines of a rank that is killed are not lost
            torch.default_generator.seed()  # fork has copied these states; Python's `random` reseeds itself
            np.random.seed()
            await_rank(read_fd)
            if is_copy_without_cuda():  # something that was imported has used CUDA
                os.execv(sys.executable, rank_command(self._words))
            code = self._main()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
