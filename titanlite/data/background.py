"""Background: reads an iterator over worker processes in a thread, so that waiting for an item can time out.

Reading from a worker has no timeout. It blocks forever before the worker's first item or in the middle of a
message, if the worker is stopped or its file system hangs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from titanlite.errors import LoaderError

Item = TypeVar("Item")
POLL_S = 0.5  # seconds between two checks for dead workers
PREFETCH, REQUEST_SIZE = 8, 4  # items to prefetch, and items to request at a time
EXIT_TIMEOUT_S = 10.0  # time for workers to exit by themselves


class Background(Generic[Item]):
    """An iterator over the items of `start()`. `start` is called in a thread and starts worker processes.

    `while_waiting(waited_s, worker)` is called every POLL_S while no item arrives; `worker` names the process
    that should send the next item. It may raise to end the wait, which kills the workers. `next` raises
    LoaderError if a worker died."""

    def __init__(
        self, start: Callable[[], Iterator[Item]], while_waiting: Callable[[float, str], None] | None = None
    ):
        self.while_waiting = while_waiting
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._taken, self._killed = 0, False
        other_processes = set(multiprocessing.active_children())
        arguments = (start, self._requests, self._answers)
        self._thread = threading.Thread(target=_read, args=arguments, name="loader", daemon=True)
        self._thread.start()
        _, error = self._answers.get()  # this thread must not run while the other thread forks
        self._workers = _started_since(other_processes)
        if error is not None:
            self._kill()
            raise error
        # At exit Python ends daemonic children by SIGTERM, which loader workers ignore, and a thread that
        # runs torch's code while the interpreter exits aborts the process. So end the workers and the thread
        # first.
        self._end = partial(_end, self._requests, self._thread, self._workers)
        atexit.register(self._end)
        for _ in range(PREFETCH):
            self._requests.put(True)

    def __next__(self) -> Item:
        item = self._wait()
        self._taken += 1
        if self._taken % REQUEST_SIZE == 0:  # waking the thread for each item would cost 3% of a fast loader
            for _ in range(REQUEST_SIZE):
                self._requests.put(True)
        return item

    def close(self) -> None:
        """End the workers. Does not wait for workers that were killed because they were stuck."""
        if not self._killed:
            self._end()
        if not self._thread.is_alive():
            atexit.unregister(self._end)

    def __del__(self) -> None:
        self._requests.put(False)

    def _wait(self) -> Any:
        began = time.monotonic()
        try:
            while True:
                try:
                    item, error = self._answers.get(timeout=POLL_S)
                    break
                except Empty:
                    self._check(time.monotonic() - began)
            if error is not None:
                self._check_workers(error)
                raise error
            return item
        except BaseException:
            self._kill()
            raise

    def _check(self, waited_s: float) -> None:
        self._check_workers()
        if self.while_waiting is not None:
            self.while_waiting(waited_s, self._next_worker())

    def _check_workers(self, error: BaseException | None = None) -> None:
        """Raise LoaderError for the first worker that died."""
        for number, worker in enumerate(self._workers):
            if (code := worker.exitcode) is not None:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                reason = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
                raise LoaderError(f"loader worker {number} (pid {worker.pid}) {how}{reason}") from error

    def _next_worker(self) -> str:
        number = self._taken % len(self._workers)  # workers send items in turn
        return f"loader worker {number} (pid {self._workers[number].pid})"

    def _kill(self) -> None:
        self._killed = True
        for worker in self._workers:
            worker.kill()


def _started_since(other_processes: set[BaseProcess]) -> list[BaseProcess]:
    """Return the child processes that started after `other_processes`, in order. Their names end in ascending
    numbers: `-3`, or `-36:3` if this process is the 36th child of another process."""
    started = set(multiprocessing.active_children()) - other_processes
    return sorted(started, key=lambda child: int(re.split("[-:]", child.name)[-1]))


def _end(requests: SimpleQueue[bool], thread: threading.Thread, workers: list[BaseProcess]) -> None:
    with suppress(Empty):
        while True:
            requests.get_nowait()  # requests that the thread has not begun
    requests.put(False)
    thread.join(EXIT_TIMEOUT_S)
    for worker in workers:
        worker.kill()


def _read(start: Callable[[], Iterator[Any]], requests: SimpleQueue[bool], answers: SimpleQueue[Any]) -> None:
    """The thread's function. It holds no reference to the Background, so that the Background can be
    deleted."""
    try:
        items = start()
        answers.put((None, None))
        while requests.get():
            answers.put((next(items), None))
    except BaseException as e:
        answers.put((None, e))
