"""`titanlite launch`: several trainer processes on this node, through torchrun's agent.

The job is loaded and checked here first, so a mistake is one line before any process starts. torchrun answers
every failure with 1 and every SIGTERM with 30 seconds; here the code of the rank that failed first is passed
on, signals are passed to the ranks, which get the time they need to save, and only a crash is restarted.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher import api as launcher

from titanlite import train
from titanlite.commands import launch_arguments
from titanlite.job import load_job
from titanlite.runtime import prepare_to_launch
from titanlite.signals import AGAIN_S, END, SAVE, STOP, Stopped

FINAL_CODES = {2, 3, Stopped.exit_code}  # a restart would only meet them again


class Agent(LocalElasticAgent):
    """torchrun's agent, which starts and watches this node's ranks, with the two differences above."""

    _stop_at: float | None = None
    _ended_at: float | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._stop_at is not None:
            raise Stopped("stopped before the ranks were started again; nothing is lost")
        # Ranks inherit the mask and lift it when they have handlers: a signal before that waits, and kills
        # none.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP, *SAVE))
        try:
            pids = super()._start_workers(worker_group)
            for number in (*STOP, *SAVE):  # after torchrun has set handlers of its own
                signal.signal(number, self._forward)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP, *SAVE))
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        if self._stop_at is not None:
            self._remaining_restarts = 0
        if result.state is WorkerState.FAILED and codes & FINAL_CODES:
            self._remaining_restarts = 0
            self._exit_barrier_timeout = (
                30  # other nodes end with the same code; the first may host the store
            )
            self._exit_barrier()
        return result

    def _forward(self, number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number)
        if number in END:
            if self._ended_at is not None and now - self._ended_at > AGAIN_S:
                raise SignalException(f"{name.name} again: not waiting any longer", sigval=name)
            self._ended_at = self._ended_at or now
        if number in STOP:
            self._stop_at = self._stop_at or now
            if self._worker_group.state is not WorkerState.HEALTHY and not self._in_exit_barrier:
                raise Stopped(f"stopped by {name.name} while no ranks were running; nothing is lost")
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def main(argv: Sequence[str]) -> int:
    """Options of the launcher, then the trainer's own arguments."""
    options, path, overrides = launch_arguments(argv)
    world_size = options.nproc_per_node * options.max_nodes
    load_job(path, overrides, world_size, allow_imports=True)
    if world_size == 1 and options.max_restarts == 0:
        return train.main([path, *overrides])
    return _torchrun(options, [path, *overrides])


def _torchrun(options: argparse.Namespace, trainer_args: list[str]) -> int:
    prepare_to_launch()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # its report of a failure is one line here, below
            logging.getLogger(name).setLevel(logging.CRITICAL)
    arguments = [
        f"--nproc-per-node={options.nproc_per_node}",
        f"--nnodes={options.nnodes}",
        f"--node-rank={options.node_rank}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={options.rdzv_endpoint or 'localhost:0'}",
        "--rdzv-id=titanlite",
        f"--max-restarts={options.max_restarts}",
        "-m", "titanlite.cli", "train", *trainer_args,
    ]  # fmt: skip
    setattr(launcher, "LocalElasticAgent", Agent)  # noqa: B010 -- launch_agent() has no parameter for it
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 1
        if code != Stopped.exit_code:
            print(f"titanlite: rank {rank} {_describe(failure.exitcode)}", file=sys.stderr)
        return code
    except RendezvousConnectionError:
        where = options.rdzv_endpoint or "the rendezvous on this node"
        print(f"titanlite: no connection to {where}: does the first node's launcher run?", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"titanlite: ended by {error.sigval.name}, without saving", file=sys.stderr)
        return 128 + error.sigval
    return 0


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}; its message is above"
    cause = " (the kernel does that when memory is short)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{cause}; what is above came after it"
