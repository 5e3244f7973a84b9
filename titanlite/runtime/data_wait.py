"""DataWait: limits how long a rank waits for its next batch."""

from __future__ import annotations

import time
from collections.abc import Callable

from titanlite.errors import LoaderError
from titanlite.runtime.runtime import Runtime
from titanlite.runtime.signals import Stopped, StopRequests

SHARE = 0.9  # of the timeout of collectives: a stuck rank ends then, before the other ranks time out
STOP_S = 20.0  # seconds that several ranks wait for a batch after a stop; launchers kill after 30


class DataWait:
    """Called by the loader while it waits for a batch. Raises to end the wait: Stopped if a run on one rank
    was asked to stop, LoaderError if the batch took too long.

    A run on one rank can then still save. With several ranks, the other ranks wait in a collective, so the
    run can only end."""

    def __init__(self, rt: Runtime, requests: StopRequests, is_first_step: Callable[[], bool]):
        self._rt, self._requests, self._is_first_step = rt, requests, is_first_step
        self._stop_at: float | None = None

    def __call__(self, waited_s: float, worker: str) -> None:
        now, comm = time.monotonic(), self._rt.comm
        if self._requests.stop:
            self._stop_at = self._stop_at or now
            if self._rt.world_size == 1:
                raise Stopped("stopped while waiting for data; nothing is lost")
        timeout = comm.init_timeout_seconds if self._is_first_step() else comm.train_timeout_seconds
        asked_s = 0.0 if self._stop_at is None else min(waited_s, now - self._stop_at)
        if waited_s > SHARE * timeout or asked_s > STOP_S:
            raise LoaderError(
                f"rank {self._rt.rank}: {worker} has delivered no batch for {waited_s:.0f} s: it is stopped, "
                "or its file system hangs. The run ends; start it again to resume from its last checkpoint"
            )
