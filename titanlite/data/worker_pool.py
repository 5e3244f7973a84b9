"""A pool of worker processes for preparation and packing. The workers end with their parent."""

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


@contextmanager
def worker_pool(processes: int, begin: Callable[[Any], None], state: Any) -> Iterator[Executor]:
    """Yield a pool of `processes` workers that call `begin(state)` first; a single worker is a thread.

    An error in the body kills the workers. Futures of a worker that was killed raise BrokenProcessPool.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin(state)


def _end_with_parent() -> None:
    # A worker holds both ends of its queue, so it would wait forever for a parent that was killed.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
