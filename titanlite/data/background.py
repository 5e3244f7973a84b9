"""An iterator over worker processes that is read by a thread, so that the wait for its next item can end.

Reading from a worker can block for ever at places that have no timeout: before the worker answers for the
first time, and in the middle of a message, when a worker is stopped or its file system hangs.
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
LOOK_S = 0.5  # between two looks for what ends a wait
AHEAD, BURST = 8, 4  # items that are read before they are asked for; how many of them are read at a time
END_S = 10.0  # for workers to end by themselves


class Background(Generic[Item]):
    """The items of `start()`, which is called in a thread and starts worker processes, and `next()` of its
    result.

    `while_waiting(waited_s, worker)` is called every LOOK_S that an item does not come, and may raise to end
    the wait; `worker` names the process whose turn it is. The workers are then killed.
    """

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
        # Before Python ends the daemonic children it still has, by a SIGTERM that loader workers ignore; and
        # because a thread that is in torch's code when the interpreter ends aborts the process.
        self._end = partial(_end, self._room, self._thread, self._workers)
        atexit.register(self._end)
        for _ in range(AHEAD):
            self._room.put(True)

    def __next__(self) -> Item:
        item = self._wait()
        self._taken += 1
        if self._taken % BURST == 0:  # to wake the thread for each item would cost 3% of a fast loader
            for _ in range(BURST):
                self._room.put(True)
        return item

    def close(self) -> None:
        """End the workers. Those that were killed for being stuck are not waited for."""
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
                    self._look(time.monotonic() - began)
            if error is not None:
                self._look_for_the_dead(error)
                raise error
            return item
        except BaseException:
            self._kill()
            raise

    def _look(self, waited_s: float) -> None:
        self._look_for_the_dead()
        if self.while_waiting is not None:
            self.while_waiting(waited_s, self._whose_turn())

    def _look_for_the_dead(self, error: BaseException | None = None) -> None:
        for k, worker in enumerate(self._workers):
            if (code := worker.exitcode) is not None:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                reason = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
                raise LoaderError(f"loader worker {k} (pid {worker.pid}) {how}{reason}") from error

    def _whose_turn(self) -> str:
        if not self._workers:
            pids = ", ".join(str(worker.pid) for worker in self._children())
            return f"one of the starting loader workers (pid {pids})"
        k = self._taken % len(self._workers)  # they take turns
        return f"loader worker {k} (pid {self._workers[k].pid})"

    def _children(self) -> list[BaseProcess]:
        """The processes that `start` started, in order: their names end in ascending numbers, `-3`, or
        `-36:3` where this process is itself the 36th child of another."""
        found = set(multiprocessing.active_children()) - self._others
        return sorted(found, key=lambda child: int(re.split("[-:]", child.name)[-1]))

    def _kill(self) -> None:
        self._killed = True
        if not self._workers:  # the thread may be about to start another one
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
            room.get_nowait()  # requests that the thread has not begun
    room.put(False)
    thread.join(END_S)
    for worker in workers:
        worker.kill()


def _read(start: Callable[[], Iterator[Any]], room: SimpleQueue[bool], ready: SimpleQueue[Any]) -> None:
    """In the thread, which knows no Background, so that one that is dropped is deleted."""
    try:
        items = start()
        ready.put((None, None))
        while room.get():
            ready.put((next(items), None))
    except BaseException as e:
        ready.put((None, e))
