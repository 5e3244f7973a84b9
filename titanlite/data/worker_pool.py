"""A pool of worker processes for preparation: one a core, ended with their parent and on its errors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, connection, get_context, parent_process
from typing import Any


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def worker_pool(processes: int, begin: Callable[[Any], None], state: Any) -> Iterator[Executor]:
    """`processes` workers, each of which calls `begin(state)` first; a single one is a thread.

    Leaving by an error kills them; a worker that is killed raises BrokenProcessPool from its future.
    """
    before = set(active_children())
    pool: Executor
    if processes <= 1:
        pool = ThreadPoolExecutor(1, initializer=begin, initargs=(state,))
    else:  # spawned: this process may hold threads, CUDA, process groups
        pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (begin, state))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - before:
            child.kill()
        raise
    finally:
        pool.shutdown()


def _begin(begin: Callable[[Any], None], state: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin(state)


def _end_with_parent() -> None:
    # A worker holds both ends of its queue, and would wait for a killed parent forever.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
