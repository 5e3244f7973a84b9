"""Ranks that are forked from one process that has imported everything, so that no start of ranks waits for
imports: neither the first, for which N ranks would import at the same time, nor the restart after a crash.

The parent of the ranks is the server of Python's multiprocessing, which has no thread, process group or CUDA
context that would not survive the fork. It ends with the launcher, and the ranks with it."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver

from torch.distributed.elastic.multiprocessing import api

from titanlite.runtime.environment import take_environment
from titanlite.runtime.signals import SAVE, STOP

CONTEXT = multiprocessing.get_context("forkserver")
PROGRAM = "titanlite"  # in place of the path of a program, for torchrun


class ForkedProcess:
    """A rank, with what torchrun uses of subprocess.Popen."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]):
        self._process = CONTEXT.Process(target=_rank, args=(list(words), dict(environment)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, the negative number of the signal that has ended it, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once the rank has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(PROGRAM, timeout or 0.0)
        return code


class Handler:
    """A rank, as torchrun's agent handles it."""

    def __init__(self, args: Sequence[str], environment: Mapping[str, str], local_rank: int):
        self.local_rank_id = local_rank
        self.proc = ForkedProcess(args, os.environ | environment)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send the rank and its children a signal."""
        number = death_sig or signal.SIGTERM
        try:
            os.killpg(self.proc.pid, number)
        except ProcessLookupError:  # it has no session of its own yet, or has ended
            with suppress(ProcessLookupError):
                os.kill(self.proc.pid, number)


def fork_ranks() -> None:
    """Let torchrun fork the ranks that run PROGRAM in place of starting a program for each. Begins to import
    what they need, in another process. Call prepare_to_launch before."""
    CONTEXT.set_forkserver_preload(["titanlite.runtime.imported"])
    # Ranks inherit the mask and lift it when they have handlers: a signal that comes earlier waits and kills
    # no rank, nor their parent.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP, *SAVE))
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP, *SAVE))
    setattr(api, "get_subprocess_handler", _handler)  # noqa: B010 -- torchrun has no parameter for it


def _handler(
    entrypoint: str,
    args: Sequence[str],
    env: Mapping[str, str],
    stdout: str,
    stderr: str,
    local_rank_id: int,
    numa_options: object = None,
) -> Handler:
    """In place of torchrun's function of this name, whose parameters it has."""
    assert entrypoint == PROGRAM
    assert not stdout
    assert not stderr
    return Handler(args, env, local_rank_id)


def _rank(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `titanlite WORDS` in a forked process."""
    os.setsid()  # as torchrun's ranks; the launcher passes signals on
    take_environment(environment)
    multiprocessing.set_start_method(None, force=True)  # the loader's workers start as in any process
    sys.argv = [PROGRAM, *words]
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    from titanlite import cli

    cli.main()  # ends the process
