"""A pool of worker processes for preparation and packing. The workers exit when their parent exits."""

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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _no_setup(state: None) -> None:
    pass


@contextmanager
def worker_pool(
    processes: int, begin: Callable[[Any], None] = _no_setup, state: Any = None
) -> Iterator[Executor]:
    """Yield a pool of `processes` workers, which first call `begin(state)`. A single worker is a thread.

    An error in the body kills the workers. Futures of a killed worker raise BrokenProcessPool.
    """
    before = set(active_children())
    pool: Executor
    if processes <= 1:
        pool = ThreadPoolExecutor(1, initializer=begin, initargs=(state,))
    else:  # spawned, not forked: this process may have threads, CUDA or process groups
        pool = ProcessPoolExecutor(processes, get_context("spawn"), begin_worker, (begin, state))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - before:
            child.kill()
        raise
    finally:
        pool.shutdown()


def begin_worker(begin: Callable[[Any], None], state: Any) -> None:
    """In a new process that is to end with its parent: call `begin(state)`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    begin(state)


def _exit_with_parent() -> None:
    # A worker has both ends of its queue open, so it would wait forever for a parent that was killed.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
