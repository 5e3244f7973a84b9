"""The program of the launcher's fork server (titanlite/runtime/fork_server.py): imports what ranks need, and
forks a rank whenever the launcher asks for one.

    python -m titanlite.tools.fork_server SOCKET WORDS...    started by the launcher only

A process can be forked as long as it has neither threads nor a CUDA context nor a client of a bucket: imports
start none, and the server does nothing else. The job is read in the rank, so that a restart sees modules of
`[job] imports` as they are then."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from titanlite import cli
from titanlite.runtime.environment import asking_nvml, replace_environment
from titanlite.runtime.parent import die_with_launcher

MODULES = (
    "titanlite.train",
    "numpy.ma",  # a run imports these late
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.pipelining",
)


def main() -> int:
    """Serve until the launcher ends, and run titanlite in each rank."""
    die_with_launcher()
    import_modules()
    with socket.socket(fileno=int(sys.argv[1])) as launcher:
        connection = serve(launcher)
    return 0 if connection is None else run_rank(connection, sys.argv[2:])


def import_modules() -> None:
    """Import what a rank imports before its first step."""
    with asking_nvml():
        for name in MODULES:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise each rank's garbage collector visits, and so copies, all that was imported


def serve(launcher: socket.socket) -> socket.socket | None:
    """Fork a rank for each connection to a rank that the launcher sends. Returns the connection in the rank,
    and None in the server when the launcher has closed its end."""
    with suppress(ConnectionError):  # the launcher has ended without reading what it got
        launcher.sendall(b"r")  # ready
        while numbers := socket.recv_fds(launcher, 1, 1)[1]:
            with socket.socket(fileno=numbers[0]) as connection:
                child = os.fork()
                if child == 0:
                    if fork_for_launcher():
                        return connection.dup()
                    os._exit(0)
            os.waitpid(child, 0)
    return None


def fork_for_launcher() -> bool:
    """Fork a process that becomes the launcher's child when this process ends. Returns True in it."""
    parent = os.getpid()
    if os.fork():
        return False
    while os.getppid() == parent:
        os.sched_yield()
    die_with_launcher()
    os.setsid()  # as torchrun's ranks: a Ctrl-C goes to the launcher only, which passes it on
    return True


def run_rank(connection: socket.socket, words: Sequence[str]) -> int:
    """Tell the launcher the process id of this rank, and run `titanlite WORDS` as the launcher asks."""
    with connection, connection.makefile("rw") as stream:
        request = json.load(stream)
        stream.write(str(os.getpid()))
    become_rank(request["environment"], request["output"], words)
    return cli.main()


def become_rank(environment: dict[str, str], output: Sequence[str], words: Sequence[str]) -> None:
    """Let this process look as a new process that runs `titanlite WORDS`. `output`: the files that get its
    standard output and its errors; "": none."""
    import numpy as np

    replace_environment(environment)
    for number, path in enumerate(output, start=1):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
    np.random.seed()  # otherwise all ranks, after each restart, would draw the same numbers
    importlib.invalidate_caches()
    sys.argv = [str(cli.__file__), *words]
    show_as([sys.executable, "-u", "-m", "titanlite.cli", *words])


def show_as(command: Sequence[str]) -> None:
    """Let ps show this process with a command that is not longer than its own: ranks beside the server."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    if start > 0 and len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    sys.exit(main())
