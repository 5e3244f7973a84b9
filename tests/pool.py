"""A pool of gloo ranks: processes with one process group that run one function after another."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titanlite import mesh

TIMEOUT_S = 400


def _rank(rank: int, world_size: int, store: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    # Groups stay, since torch remembers them, and the threads of one look around a hundred times a second,
    # used or not: the same mesh has the same groups.
    mesh.init_device_mesh = functools.cache(mesh.init_device_mesh)
    while (task := tasks.get()) is not None:
        function, args = task
        try:
            results.put((rank, True, function(*args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()
    results.close()
    results.join_thread()
    os._exit(0)  # gloo's threads can abort a finalising interpreter


class Pool:
    """Call it with a module-level function and its arguments: runs it on every rank, returns the results by
    rank.

    A failure on any rank raises AssertionError with its traceback and ends the pool: its other ranks may be
    stuck in a collective.
    """

    def __init__(self, world_size: int, folder: Path):
        context = mp.get_context("spawn")
        self._tasks = [context.Queue() for _ in range(world_size)]
        self._results = context.Queue()
        self._processes = [
            context.Process(target=_rank, args=(r, world_size, str(folder / "store"), tasks, self._results))
            for r, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for tasks in self._tasks:
            tasks.put((function, args))
        results: dict[int, Any] = {}
        waited = 0
        while len(results) < len(self._processes):
            try:
                rank, ok, value = self._results.get(timeout=1)
            except Empty:
                waited += 1
                dead = [r for r, p in enumerate(self._processes) if not p.is_alive() and r not in results]
                assert not dead, f"rank {dead[0]} died with exit code {self._processes[dead[0]].exitcode}"
                assert waited < TIMEOUT_S, (
                    f"no answer from ranks {set(range(len(self._tasks))) - set(results)}"
                )
                continue
            if not ok:
                self.kill()
                raise AssertionError(f"rank {rank}:\n{value}")
            results[rank] = value
        return [results[r] for r in range(len(results))]

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Let the ranks finish."""
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(10)
        self.kill()
