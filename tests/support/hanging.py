"""A module for job.imports with which a rank hangs: HANG="RANK PLACE CALL HOW" in the environment, for
example "1 forward 3 sleep"."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from titanlite.data.loader import SequenceLoader
from titanlite.parallel.sharded_model import ShardedModel

PLACES = {"data": (SequenceLoader, "__next__"), "forward": (ShardedModel, "model_inputs")}
HOW = {"stop": lambda: os.kill(os.getpid(), signal.SIGSTOP), "sleep": lambda: time.sleep(3600)}


def hang(place: str, call: int, how: str) -> None:
    """Let this process hang in one call of a method."""
    owner, name = PLACES[place]
    original, num_calls = getattr(owner, name), 0

    def method(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            HOW[how]()
        return original(*args)

    setattr(owner, name, method)


rank, place, call, how = os.environ["HANG"].split()
if os.environ.get("RANK") == rank:
    hang(place, int(call), how)
