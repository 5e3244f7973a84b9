"""Background: reads an iterator over worker processes in a thread, so that waiting for an item can time out.

Reading from a worker can block forever at places without a timeout: before the worker's first answer, and in
the middle of a message, when the worker is stopped or its file system hangs.
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
LOOK_S = 0.5  # between two checks for dead workers
AHEAD, BURST = 8, 4  # items to prefetch, and items to request at a time
END_S = 10.0  # for workers to end by themselves


class Background(Generic[Item]):
    """An iterator over the items of `start()`. `start` is called in a thread and starts worker processes.

    `while_waiting(waited_s, worker)` is called every LOOK_S while no item arrives; `worker` names the process
    whose turn it is. It may raise to end the wait, which kills the workers. Raises LoaderError for a worker
    that died."""

    def __init__(
        self, start: Callable[[], Iterator[Item]], while_waiting: Callable[[float, str], None] | None = None
    ):
        self.while_waiting = while_waiting
        self._room: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._others, self._taken = set(multiprocessing.active_children()), 0
        self._workers: list[BaseProcess] = []
        self._killed = False
        arguments = (start, self._room, self._ready)
        self._thread = threading.Thread(target=_read, args=arguments, name="loader", daemon=True)
        self._thread.start()
        self._wait()  # nothing else runs while it forks
        self._workers += self._children()
        # At exit Python ends its daemonic children by SIGTERM, which loader workers ignore, and a thread that
        # is in torch's code when the interpreter ends aborts the process. So end both before that.
        self._end = partial(_end, self._room, self._thread, self._workers)
        atexit.register(self._end)
        for _ in range(AHEAD):
            self._room.put(True)

    def __next__(self) -> Item:
        item = self._wait()
        self._taken += 1
        if self._taken % BURST == 0:  # waking the thread for each item would cost 3% of a fast loader
            for _ in range(BURST):
                self._room.put(True)
        return item

    def close(self) -> None:
        """End the workers. Workers that were killed for being stuck are not waited for."""
        if not self._killed:
            self._end()
        if not self._thread.is_alive():
            atexit.unregister(self._end)

    def __del__(self) -> None:
        self._room.put(False)

    def _wait(self) -> Any:
        began = time.monotonic()
        try:
            while True:
                try:
                    item, error = self._ready.get(timeout=LOOK_S)
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
            self.while_waiting(waited_s, self._whose_turn())

    def _check_workers(self, error: BaseException | None = None) -> None:
        """Raise LoaderError for the first worker that died."""
        for k, worker in enumerate(self._workers):
            if (code := worker.exitcode) is not None:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                reason = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
                raise LoaderError(f"loader worker {k} (pid {worker.pid}) {how}{reason}") from error

    def _whose_turn(self) -> str:
        if not self._workers:
            pids = ", ".join(str(worker.pid) for worker in self._children())
            return f"one of the starting loader workers (pid {pids})"
        k = self._taken % len(self._workers)  # they take turns
        return f"loader worker {k} (pid {self._workers[k].pid})"

    def _children(self) -> list[BaseProcess]:
        """Return the processes that `start` started, in order. Their names end in ascending numbers: `-3`, or
        `-36:3` if this process is itself the 36th child of another process."""
        started = set(multiprocessing.active_children()) - self._others
        return sorted(started, key=lambda child: int(re.split("[-:]", child.name)[-1]))

    def _kill(self) -> None:
        self._killed = True
        if not self._workers:  # the thread may be about to start a worker
            self._room.put(False)
            deadline = time.monotonic() + END_S
            while self._thread.is_alive() and time.monotonic() < deadline:
                for worker in self._children():
                    worker.kill()
                self._thread.join(0.05)
        for worker in self._workers or self._children():
            worker.kill()


def _end(room: SimpleQueue[bool], thread: threading.Thread, workers: list[BaseProcess]) -> None:
    with suppress(Empty):
        while True:
            room.get_nowait()  # requests that the thread has not started on
    room.put(False)
    thread.join(END_S)
    for worker in workers:
        worker.kill()


def _read(start: Callable[[], Iterator[Any]], room: SimpleQueue[bool], ready: SimpleQueue[Any]) -> None:
    """Run in the thread. It holds no reference to the Background, which can therefore be deleted."""
    try:
        items = start()
        ready.put((None, None))
        while room.get():
            ready.put((next(items), None))
    except BaseException as e:
        ready.put((None, e))
