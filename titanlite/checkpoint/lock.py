"""The lock on a run folder, held from the start of a run to its end, so that only one run uses the folder.

It is a POSIX record lock on the file LOCK: the system releases it however the process ends, child processes
do not inherit it, and it works on NFS."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from titanlite.config.component import ConfigError
from titanlite.files import make_folder
from titanlite.log import logger

WAIT_S = 120.0  # a restart may begin before the last process of the earlier start has ended


class FolderLock:
    """The lock on the run folder `folder`. Used on rank 0. Leaving its context releases the lock."""

    def __init__(self, folder: Path):
        self.folder, self._path = folder, folder / "LOCK"
        self._file: IO[str] | None = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, wait_s: float | None = None) -> bool:
        """Lock the folder, which is made if it is missing. Returns whether it was not locked before. Raises
        ConfigError if another process holds the lock for longer than `wait_s` (None: WAIT_S), or if the
        folder cannot be written to."""
        if self._file is not None:
            return False
        try:
            make_folder(self.folder)
            self._file = open(self._path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError as e:
            raise ConfigError(f"{self.folder} cannot be written to: {e}", "job.dump_folder") from None
        wait_s = WAIT_S if wait_s is None else wait_s
        deadline, has_warned = time.monotonic() + wait_s, False
        while not self._try(self._file):
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            in_use = f"{self.folder} is in use by {holder}"
            if time.monotonic() >= deadline:
                self.close()
                raise ConfigError(f"{in_use}; stop it, or choose another --job.dump_folder")
            if not has_warned:
                logger.warning(f"{in_use}; waiting up to {wait_s:.0f} s for it to end")
                has_warned = True
            time.sleep(0.2)
        return True

    def write_owner(self) -> None:
        """Write into the file which process holds the lock. Raises ConfigError if the disk is full."""
        assert self._file is not None
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        except OSError as e:
            raise ConfigError(f"{self._path} cannot be written to: {e}", "job.dump_folder") from None

    def renew(self) -> None:
        """Lock the folder again if it was removed while this process had the lock. Raises ConfigError if
        another process has locked the folder since."""
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            self.close()
            self.take(wait_s=0)
            self.write_owner()

    def close(self) -> None:
        """Release the lock."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a full disk; the file is closed all the same
                file.close()

    def _try(self, file: IO[str]) -> bool:
        """Whether this process has the lock now, or the file system has no locks."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                return False
            logger.warning(
                f"{self._path} cannot be locked ({e}): make sure that no second run uses this folder"
            )
        return True
