"""Runs benchmark cases on several devices, one case at a time per device."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def on_devices(devices: list[str], work: list[T], act: Callable[[str, T], R]) -> list[R]:
    """Call `act(device, item)` for each item, on a device that is free. Returns the results in the order of
    `work`."""
    free: queue.Queue[str] = queue.Queue()
    for device in devices:
        free.put(device)

    def one(item: T) -> R:
        device = free.get()
        try:
            return act(device, item)
        finally:
            free.put(device)

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(one, work))
