"""A client of a bucket that counts the bytes that are read."""

from __future__ import annotations

import threading
from typing import Any


class CountedBytes:
    """obstore's client, which counts the bytes that it reads."""

    def __init__(self, client: Any):
        self.client, self.count, self.mutex = client, 0, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def get_ranges(self, *args: Any, **options: Any) -> Any:
        ranges = self.client.get_ranges(*args, **options)
        with self.mutex:
            self.count += sum(map(len, ranges))
        return ranges

    def get(self, *args: Any, **options: Any) -> Any:
        result = self.client.get(*args, **options)
        with self.mutex:
            self.count += result.meta["size"]
        return result
