"""Ranks for tests: processes forked from a server that has imported titanlite. Several ranks have a gloo
process group, or, with GPUs, make theirs as under titanlite's launcher; a single rank has none.

A rank starts in hundredths of a second instead of the seconds of its imports, and each call has new ranks: no
state is left from earlier tests, and no idle rank's threads poll. The server is Python's
multiprocessing.forkserver with our preloading. It has no thread and no process group, which would not survive
the fork. Linux only."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from titanlite.runtime.environment import NOTES

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400  # of one call of seconds: machines may be busy
GRACE_S = 120.0  # between SIGTERM and SIGKILL; torchrun has 30, too few on a busy machine
# Signals that end a process whose native code has failed. titanlite has none: pyproject.toml runs such a test
# once more, and pytest counts it as "rerun". It does the same for a rank that hangs after another was killed,
# because gloo very rarely does not notice the end of a peer; pytest's summary of warnings has its stacks.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


class Ranks:
    """One process per rank, which runs `function(*args)` and ends. It sees no GPU, unless `gpus` is true.

    The function must be importable by its name. Wait with `results` or `exits`: when one of them returns or
    raises, every rank has ended."""

    def __init__(self, world_size: int, function: Callable[..., Any], *args: Any, gpus: bool = False):
        name = getattr(function, "__qualname__", "")
        assert "<" not in name, f"{name} is inside another function: ranks import theirs by its name"
        self._folder = tempfile.TemporaryDirectory(prefix="titanlite-ranks-")
        context = _server()
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            group = (rank, 1 if gpus else world_size, f"file://{self._folder.name}/store")
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
            if gpus:
                environment = os.environ | _as_launched(rank, world_size, self._folder.name)
            process = context.Process(target=_rank, args=(theirs, group, environment, function, args))
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def results(self, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """The return values by rank. If a rank fails, ends the other ranks, which may be stuck in a
        collective, and raises AssertionError with the traceback of the first failed rank, and with the ranks
        whose native code has crashed."""
        values: dict[int, Any] = {}
        until = time.monotonic() + timeout_s
        with self._ending():
            while missing := [rank for rank in range(len(self.processes)) if rank not in values]:
                # A rank's loader workers hold its pipe, too: only the process says that it has ended.
                pipes = {self._connections[rank]: rank for rank in missing}
                ends = {self.processes[rank].sentinel: rank for rank in missing}
                ready = wait([*pipes, *ends], max(until - time.monotonic(), 0))
                assert ready, f"no answer from ranks {missing} in {timeout_s} s"
                for rank in sorted({(pipes | ends)[one] for one in ready}):
                    if not self._connections[rank].poll():
                        raise AssertionError(f"rank {rank} died with exit code {self._code(rank)}")
                    try:
                        ok, value = pickle.loads(self._connections[rank].recv_bytes())
                    except (EOFError, ConnectionResetError):
                        raise AssertionError(f"rank {rank} died with exit code {self._code(rank)}") from None
                    assert ok, f"rank {rank}:\n{value}{self._crashes()}"
                    values[rank] = value
            for connection in self._connections:
                connection.close()
            for process in self.processes:
                process.join(GRACE_S)
        return [values[rank] for rank in range(len(values))]

    def exits(self, timeout_s: float = TIMEOUT_S, signal_peers: bool = False) -> list[int]:
        """The exit codes by rank, or negative signals, of a function that ends its process.

        Once a rank fails, the other ranks have GRACE_S to end; with `signal_peers` they get SIGTERM first, as
        from torchrun. Raises AssertionError if a rank does not end, after it has written its stacks to its
        standard error."""
        until = time.monotonic() + timeout_s
        told = False
        with self._ending():
            while living := [process for process in self.processes if process.exitcode is None]:
                ready = wait([*self._open(), *(process.sentinel for process in living)], 1)
                for rank, connection in enumerate(self._connections):
                    if connection in ready:
                        self._assert_silent(rank)
                if any(process.exitcode for process in self.processes) and not told:
                    told, until = True, min(until, time.monotonic() + GRACE_S)
                    for process in living if signal_peers else ():
                        process.terminate()
                if time.monotonic() > until:
                    break
            ended = {rank: process.exitcode for rank, process in enumerate(self.processes)}
            hung = [rank for rank, code in ended.items() if code is None]
            for rank in hung:
                os.kill(self.processes[rank].pid, signal.SIGABRT)  # faulthandler
                self.processes[rank].join(10)
            lost = ", after another rank was killed" if -signal.SIGKILL in ended.values() else ""
            assert not hung, f"ranks {hung} have not ended{lost}; exit codes by rank: {ended}"
        return [process.exitcode or 0 for process in self.processes]

    def _code(self, rank: int) -> str:
        self.processes[rank].join(GRACE_S)
        return f"{self.processes[rank].exitcode}{self._crashes()}"

    def _crashes(self) -> str:
        """The ranks that a signal of CRASHES has ended, for messages: empty if there is none."""
        wait(
            [process.sentinel for process in self.processes], 0.5
        )  # the error of a peer may come before the end
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        crashes = {
            rank: signal.Signals(-code).name for rank, code in codes.items() if code and -code in CRASHES
        }
        return "".join(f"\nrank {rank} has crashed in native code: {name}" for rank, name in crashes.items())

    def _open(self) -> list[Connection]:
        return [connection for connection in self._connections if not connection.closed]

    def _assert_silent(self, rank: int) -> None:
        """Raise AssertionError if the function, which should end its process, has returned or raised."""
        try:
            _, value = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._connections[rank].close()
        else:
            codes = [process.exitcode for process in self.processes]
            raise AssertionError(f"rank {rank} did not end its process: {value}\nexit codes: {codes}")

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End all ranks after the body, also if it raises."""
        try:
            yield
        finally:
            for process in self.processes:
                process.kill()
                process.join()
            for connection in self._connections:
                connection.close()
            self._folder.cleanup()


def _as_launched(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """The variables that titanlite's launcher sets for one of several ranks."""
    if world_size == 1:
        return {}
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, NOTES: folder}


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The values that `function(*args)` returns on each rank of a new process group."""
    return Ranks(world_size, function, *args).results()


@cache
def _server() -> Any:
    """The multiprocessing context whose processes are forked. Its server starts with the first process and
    ends with this process."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))  # for the preloading
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _rank(
    connection: Connection,
    group: tuple[int, int, str],
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run in the forked process. `group`: the rank, the number of ranks, and the address where they meet."""
    import torch
    import torch.distributed as dist

    os.environ.clear()  # the server's is that of its start
    os.environ.update(environment)
    faulthandler.enable()  # says where a rank was that is ended by a signal such as SIGSEGV
    signal.alarm(2 * TIMEOUT_S)  # if the test process was killed and nobody waits
    multiprocessing.set_start_method(None, force=True)  # the loader's workers start as in any run
    torch.set_num_threads(1)
    try:
        rank, world_size, store = group
        if world_size > 1:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    connection.send_bytes(pickle.dumps(answer))
    with suppress(EOFError):
        connection.recv_bytes()  # none comes: the ranks end together, since one may still talk to another
    leave(0)


def write_output_to(path: Path) -> None:
    """Append the output of this rank and of its children to a file."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def leave(code: int) -> NoReturn:
    """End the rank's process at once, because gloo's threads can abort an interpreter that finalises."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
