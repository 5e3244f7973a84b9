"""A lock on the run folder, held from the start of a run to its end, so that one run uses the folder.

A POSIX record lock on the file LOCK: it ends with the process however the process ends, child processes do
not inherit it, and it works on NFS."""

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
from titanlite.files import FileFault, make_folder, open_own
from titanlite.log import logger

WAIT_S = 120.0  # seconds; a restart may come before the last process of the earlier start is gone


class FolderLock:
    """The lock on `folder`. Making it raises ConfigError if another process holds the lock for longer than
    WAIT_S."""

    def __init__(self, folder: Path):
        make_folder(folder)
        self._path = folder / "LOCK"
        try:
            self._file: IO[str] | None = open_own(self._path)
        except FileFault as e:
            raise ConfigError(f"{self._path}: {e}; delete it", "job.dump_folder") from None
        until, told = time.monotonic() + WAIT_S, False
        while not self._try():
            if time.monotonic() >= until:
                holder = self._holder()
                self.close()
                raise ConfigError(
                    f"{folder} is in use by {holder}; stop it, or choose another --job.dump_folder"
                )
            if not told:
                logger.warning(
                    f"{folder} is in use by {self._holder()}; waiting {WAIT_S:.0f} s at most for it to end"
                )
                told = True
            time.sleep(0.2)

    def write_owner(self) -> None:
        """Write into the file which process holds the lock. Raises ConfigError if the disk is full."""
        assert self._file is not None
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        except OSError as e:
            raise ConfigError(f"{self._path} cannot be written to: {e}", "job.dump_folder") from None

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            with suppress(OSError):  # a full disk; the file is closed all the same
                self._file.close()
            self._file = None

    def _try(self) -> bool:
        assert self._file is not None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                return False
            logger.warning(
                f"{self._path} cannot be locked ({e}): make sure that no second run uses this folder"
            )
        return True

    def _holder(self) -> str:
        assert self._file is not None
        self._file.seek(0)
        return self._file.read().strip() or "another process"
