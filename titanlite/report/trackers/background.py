"""A writer in a separate thread, so that an outage or a slow server neither delays nor stops training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from titanlite.config.imports import error_with_place
from titanlite.log import logger
from titanlite.metrics.sinks.base import Event, Table, Values, Writer

MAX_WAITING = 10_000  # calls kept in memory: some tens of MiB
RETRY_S = 60.0  # between attempts to open the writer
CLOSE_S = 30.0  # at the end of a run, for what is still waiting

Call = Callable[[Writer], None]


class Background(Writer):
    """Passes all calls to another writer through a bounded queue and a thread. A call returns at once; while
    the queue is full, new calls are dropped and counted.

    `open_writer` opens the writer; it is called in the thread, and again after RETRY_S if it raises.
    `remedy`: advice in the log lines about calls that were dropped or failed.

    The thread starts with the first metrics or sample. By then the loader has forked its workers, and a lock
    that the thread holds cannot be copied into them.
    """

    def __init__(self, name: str, open_writer: Callable[[], Writer], remedy: str = ""):
        self._name, self._open_writer, self._remedy = name, open_writer, remedy
        self._calls = queue.SimpleQueue[Call | None]()
        self._num_dropped = self._num_failures = 0
        self._closing = threading.Event()
        # A daemon: a program must be able to end while a server does not answer.
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)

    def write(self, step: int, values: Values) -> None:
        self._put(lambda writer: writer.write(step, values))
        self._start()

    def sample(self, step: int, text: str) -> None:
        self._put(lambda writer: writer.sample(step, text))
        self._start()

    def event(self, step: int, event: Event, about: Values) -> None:
        self._put(lambda writer: writer.event(step, event, about))

    def table(self, step: int, kind: Table, values: Values) -> None:
        self._put(lambda writer: writer.table(step, kind, values))

    def close(self) -> None:
        """Wait up to CLOSE_S until the writer has taken everything and is closed."""
        if self._calls.empty() and not self._has_started():
            return
        self._closing.set()
        self._calls.put(None)
        self._start()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.error(f"metric sink {self._name} has not finished in {CLOSE_S:g} s{self._remedy}")
        if self._num_dropped:
            logger.error(
                f"metric sink {self._name}: {self._num_dropped} calls were dropped, because {MAX_WAITING:,} "
                f"were waiting{self._remedy}"
            )
        if self._num_failures:
            logger.error(f"metric sink {self._name} failed {self._num_failures} times{self._remedy}")

    def _put(self, call: Call) -> None:
        if self._calls.qsize() < MAX_WAITING:  # only the training loop adds calls
            self._calls.put(call)
            return
        if not self._num_dropped:
            logger.error(
                f"metric sink {self._name} is too slow, training continues: {MAX_WAITING:,} calls are "
                f"waiting, and new ones are dropped{self._remedy}"
            )
        self._num_dropped += 1

    def _has_started(self) -> bool:
        return self._thread.ident is not None

    def _start(self) -> None:
        if not self._has_started():
            self._thread.start()

    def _work(self) -> None:
        writer = self._opened()
        while writer is not None and (call := self._calls.get()) is not None:
            self._try(call, writer)
        if writer is not None:
            self._try(lambda writer: writer.close(), writer)

    def _opened(self) -> Writer | None:
        """The open writer; None if the run ends before it can be opened. The last attempt is made when the
        run ends."""
        is_last = self._closing.is_set()
        while True:
            try:
                return self._open_writer()
            except Exception as e:
                self._failed(e)
            if is_last:
                return None
            is_last = self._closing.wait(RETRY_S)

    def _try(self, call: Call, writer: Writer) -> None:
        try:
            call(writer)
        except Exception as e:
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        if not self._num_failures:
            reason = error_with_place(error)
            logger.error(f"metric sink {self._name} failed, training continues: {reason}{self._remedy}")
        self._num_failures += 1
