"""Lets torchrun's agent fork ranks from the launcher's fork server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from titanlite.runtime.fork_server import ForkServer

RANK = (sys.executable, "-u", "-m", "titanlite.cli")  # the command of a rank, without its words


class RankHandler(SubprocessHandler):
    """torchrun's handler of a rank, with a process that `server` has forked. The arguments are torchrun's."""

    def __init__(self, server: ForkServer, *, stdout: str | None, stderr: str | None, **arguments: Any):
        self._server, self._output = server, (stdout or "", stderr or "")
        super().__init__(stdout=stdout, stderr=stderr, **arguments)

    def _popen(self, args: tuple, env: dict[str, str]) -> Any:
        if args[: len(RANK)] == RANK:  # and not the program that binds a process to a NUMA node
            rank = self._server.fork(env, *self._output)
            if rank is not None:
                return rank
        return super()._popen(args, env)


@contextmanager
def forked_by(server: ForkServer | None) -> Iterator[None]:
    """In the body, torchrun's agents let `server` fork their ranks; None: they start ranks themselves."""
    if server is None:
        yield
        return
    # torchrun has no parameter for the class of its handlers.
    setattr(api, "get_subprocess_handler", partial(RankHandler, server))  # noqa: B010
    try:
        yield
    finally:
        setattr(api, "get_subprocess_handler", SubprocessHandler)  # noqa: B010
