"""The launcher's fork server: a process that has imported everything a rank needs, and forks the ranks. Then
neither the first start nor a restart after a crash waits for imports. Imports no torch.

The server is titanlite/tools/fork_server.py; this module is the launcher's side. Forked ranks are the
launcher's children, as if it had started them itself: it waits for them, gets their exit codes, and they end
with it. They do not need the server, which may die. Linux only."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from titanlite.log import tell
from titanlite.runtime.signals import SAVE, STOP

PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


class ForkedRank:
    """A rank that was forked for this process, with the methods of subprocess.Popen that torchrun uses."""

    def __init__(self, pid: int):
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, the negative number of the signal that ended the rank, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once the rank has ended. Raises subprocess.TimeoutExpired after `timeout` s."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"rank of process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code


class ForkServer:
    """The fork server of this launcher, which runs from now on. `words`: what its ranks run, as words of the
    command `titanlite`. Call prepare_to_launch before."""

    def __init__(self, words: Sequence[str]):
        self._words = words
        self._start()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        number = str(theirs.fileno())
        # The words are for ps. The mask is for the ranks, which lift it when they have handlers: a signal
        # that comes earlier waits and kills neither a rank nor the server.
        command = [sys.executable, "-u", "-m", "titanlite.tools.fork_server", number, *self._words]
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP, *SAVE))
        try:
            with theirs:
                self._process: subprocess.Popen | None = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], start_new_session=True
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP, *SAVE))

    def wait_until_ready(self) -> None:
        """Wait until the server has imported what the ranks need, or has ended."""
        self._socket.recv(1)

    def fork(self, environment: Mapping[str, str], stdout: str, stderr: str) -> ForkedRank | None:
        """A rank with this environment, whose output goes to these files; "": where the launcher's goes. None
        if the server cannot fork; it is not asked again then. Starts another server if this one has died."""
        if self._process is not None and (code := self._process.poll()) is not None:
            tell(f"the process that forks ranks has ended with exit code {code}; starting another")
            self.close()
            self._start()
        if self._process is None:
            return None
        request = {"environment": dict(environment), "output": [stdout, stderr]}
        try:
            with _adopting():
                return ForkedRank(self._ask(request))
        except OSError as error:
            tell(f"no rank could be forked ({error}); starting ranks as new programs, which takes longer")
            self.close()
            return None

    def _ask(self, request: object) -> int:
        """The process id of a rank that was forked for this request. Raises OSError if none was.

        The rank itself reads the request and answers: if there is no answer, there is no rank."""
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rw") as stream:
            with theirs:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
            json.dump(request, stream)
            stream.flush()
            ours.shutdown(socket.SHUT_WR)
            answer = stream.read()
        if not answer:
            raise OSError("no answer")
        return int(answer)

    def close(self) -> None:
        """End the server. Ranks that it has forked live on."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def fork_server(words: Sequence[str]) -> Iterator[ForkServer | None]:
    """A fork server for ranks that run `titanlite WORDS`, which ends after the body; None where processes
    with torch cannot be forked."""
    if sys.platform != "linux":
        yield None
        return
    server = ForkServer(words)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """In the body, a process becomes this process's child when its parent ends, if its parent was a
    descendant of this process. Raises OSError."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
