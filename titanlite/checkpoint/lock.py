"""The lock on a run folder, held from the start of a run to its end, so that only one run uses the folder.

It is the lock of the run's storage on the file LOCK."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import PurePath

from titanlite.config.component import ConfigError
from titanlite.log import logger
from titanlite.storage import Lock, storage_of

POLL_S, MAX_POLL_S = 0.2, 2.0  # seconds between two tries, which are requests if the folder is in a bucket
WAIT_S = 120.0  # a restart may begin before the last process of the earlier start has ended


class FolderLock:
    """The lock on the run folder `folder`. Used on rank 0. Leaving its context releases the lock."""

    def __init__(self, folder: PurePath):
        self.folder, self._path = folder, folder / "LOCK"
        self._lock: Lock | None = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, wait_s: float | None = None) -> bool:
        """Lock the folder, which is made if it is missing. Returns False if this process had the lock before.
        Raises ConfigError if another process holds the lock for longer than `wait_s` (None: WAIT_S), or if
        the folder cannot be written to."""
        if self._lock is not None:
            return False
        storage = storage_of(self.folder)
        try:
            storage.make_folder(self.folder)
            self._lock = storage.lock(self._path)
        except OSError as e:
            if e.errno == errno.EREMOTEIO:  # a store that does not answer, which may be temporary
                raise
            raise ConfigError(f"{self.folder} cannot be written to: {e}", "job.dump_folder") from None
        wait_s = WAIT_S if wait_s is None else wait_s
        deadline, pause_s, has_warned = time.monotonic() + wait_s, POLL_S, False
        while not self._lock.try_take():
            if time.monotonic() >= deadline:
                in_use = self._in_use()
                self.close()
                raise ConfigError(f"{in_use}; stop it, or choose another --job.dump_folder")
            if not has_warned:
                logger.warning(f"{self._in_use()}; waiting up to {wait_s:.0f} s for it to end")
                has_warned = True
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, MAX_POLL_S)
        return True

    def _in_use(self) -> str:
        assert self._lock is not None
        return f"{self.folder} is in use by {self._lock.owner() or 'another process'}"

    def write_owner(self) -> None:
        """Write into the file which process holds the lock. Raises ConfigError if the disk is full."""
        assert self._lock is not None
        try:
            self._lock.write_owner(f"process {os.getpid()} on {socket.gethostname()}")
        except OSError as e:
            if e.errno == errno.EREMOTEIO:
                raise
            raise ConfigError(f"{self._path} cannot be written to: {e}", "job.dump_folder") from None

    def renew(self) -> None:
        """Lock the folder again if it was removed or moved while this process had the lock. Raises
        ConfigError if another process has locked the folder since."""
        if self._lock is not None and self._lock.is_lost():
            self.close()
            self.take(wait_s=0)
            self.write_owner()

    def close(self) -> None:
        """Release the lock."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
