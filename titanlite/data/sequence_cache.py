"""The cache of sequences whose files are on a storage: one SQLite database per node, for all of its ranks,
loader workers and runs.

An entry is the bytes of one sequence with their CRC-32, under the content that its number belongs to
(PackedSequences.content, made of the SHA-256 of the files) and that number. SQLite lets many processes read
beside one that writes, and makes each transaction whole or not at all when a process is killed. The process
that downloads for a run (downloads.py) owns the entries that it wrote; it evicts only its own and those of
ended processes. A reader that misses an entry asks for it in the table `wanted`, and waits."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.data.order import NEVER
from titanlite.errors import LoaderError
from titanlite.files import make_folder
from titanlite.log import logger

NUMBERS = 1 << 40  # sequences of one content: an entry's id is (number of the content) * NUMBERS + its number
GIVE_UP_S = 300.0  # a reader waits so long for a storage that answers with errors
MAX_WAL_BYTES = 64 << 20
PAGE = 2048  # bytes; with 4096, a sequence of 1025 two-byte tokens would take twice its size
PRAGMAS = {"page_size": PAGE, "journal_mode": "WAL", "synchronous": "NORMAL", "mmap_size": 1 << 30}
SCHEMA = """
CREATE TABLE IF NOT EXISTS contents (number INTEGER PRIMARY KEY, content TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE IF NOT EXISTS uses (id INTEGER PRIMARY KEY, owner INTEGER, next_use INTEGER);
CREATE INDEX IF NOT EXISTS by_use ON uses (owner, next_use);
CREATE TABLE IF NOT EXISTS owners (number INTEGER PRIMARY KEY AUTOINCREMENT);
CREATE TABLE IF NOT EXISTS wanted (id INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS errors (id INTEGER PRIMARY KEY, message TEXT, is_final INTEGER);
"""


class SequenceCache:
    """What readers use. Picklable; each process and thread has its own connection."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.check: Callable[[], None] = _nothing
        """Is called while `read` waits. May raise to end the wait."""
        self._connections: dict[tuple[int, int], sqlite3.Connection] = {}
        self._contents: dict[str, int] = {}

    @property
    def file(self) -> Path:
        return self.folder / "sequences.db"

    @property
    def db(self) -> sqlite3.Connection:
        place = os.getpid(), threading.get_ident()  # SQLite's connections do not survive a fork
        if place not in self._connections:
            make_folder(self.folder)
            db = sqlite3.connect(self.file, timeout=120, isolation_level=None, check_same_thread=False)
            for name, value in PRAGMAS.items():
                db.execute(f"PRAGMA {name} = {value}")
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'errors'").fetchone():
                db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
            self._connections[place] = db
        return self._connections[place]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connections": {}, "check": _nothing}

    def first_id(self, content: str) -> int:
        """Return the id of sequence 0 of a content."""
        if content not in self._contents:
            query = "SELECT number FROM contents WHERE content = ?"
            row = self.db.execute(query, (content,)).fetchone()
            if row is None:
                self.db.execute("INSERT OR IGNORE INTO contents (content) VALUES (?)", (content,))
                row = self.db.execute(query, (content,)).fetchone()
            self._contents[content] = row[0] * NUMBERS
        return self._contents[content]

    def read(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of sequences. Asks for those that are missing, and waits until they are there.
        Raises ConfigError if one can never be read, and LoaderError if it could not be for GIVE_UP_S."""
        try:
            found = self._present(ids)
            return found if len(found) == len(set(ids)) else found | self._wait(sorted({*ids} - {*found}))
        except sqlite3.DatabaseError as e:
            raise LoaderError(f"{self.file}: {e}; if it is damaged, delete {self.folder}") from None

    def _present(self, ids: Iterable[int]) -> dict[int, bytes]:
        found = {}
        for id_ in ids:
            row = self.db.execute("SELECT data FROM entries WHERE id = ?", (id_,)).fetchone()
            if row is not None and zlib.crc32(row[0][4:]) == int.from_bytes(row[0][:4], "little"):
                found[id_] = row[0][4:]
            elif row is not None:
                logger.warning(f"{self.file}: a sequence is damaged, and is downloaded again")
                with self.transaction():
                    self.delete([id_])
        return found

    def _wait(self, missing: list[int]) -> dict[int, bytes]:
        began, pause, found = time.monotonic(), 0.001, dict[int, bytes]()
        self.db.executemany("INSERT OR IGNORE INTO wanted VALUES (?)", [(id_,) for id_ in missing])
        try:
            while True:
                found |= self._present(missing)
                missing = [id_ for id_ in missing if id_ not in found]
                if not missing:
                    return found
                self.check()
                waited_s = time.monotonic() - began
                for id_ in missing if waited_s > 0.2 else ():
                    query = "SELECT message, is_final FROM errors WHERE id = ?"
                    message, is_final = self.db.execute(query, (id_,)).fetchone() or ("", False)
                    if is_final:
                        raise ConfigError(message)
                    if message and waited_s > GIVE_UP_S:
                        raise LoaderError(f"{message}; gave up after {waited_s:.0f} s")
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        finally:
            ids = [(id_,) for id_ in (*found, *missing)]
            self.db.executemany("DELETE FROM wanted WHERE id = ?", ids)

    @contextmanager
    def transaction(self) -> Any:
        """Write what the body writes, all or nothing."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise

    def delete(self, ids: Sequence[int]) -> None:
        """Delete entries, in a transaction."""
        for table in ("entries", "uses"):
            self.db.executemany(f"DELETE FROM {table} WHERE id = ?", [(id_,) for id_ in ids])


class OwnedCache(SequenceCache):
    """What the process that downloads uses. The database has at most `max_bytes` on the disk, with its log of
    transactions."""

    def __init__(self, folder: Path, max_bytes: int):
        super().__init__(folder)
        self._wal_bytes = min(MAX_WAL_BYTES, max_bytes // 8)
        self.max_bytes = max_bytes - self._wal_bytes * 3 // 2 - (32 << 10)
        self.db.execute(f"PRAGMA wal_autocheckpoint = {self._wal_bytes // 2 // PAGE}")
        self.db.execute(f"PRAGMA journal_size_limit = {self._wal_bytes // 2}")
        with self.transaction():
            self.owner = self.db.execute("INSERT INTO owners DEFAULT VALUES").lastrowid
            self._lock = open(self._lock_file(self.owner or 0), "wb")  # noqa: SIM115 -- until the process ends
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.others, self._ended = list[int](), "()"
        self.find_others()

    def __enter__(self) -> OwnedCache:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the entries to other runs."""
        self._lock.close()

    @property
    def batch_bytes(self) -> int:
        """The most bytes to give to `put` at a time."""
        return self._wal_bytes // 4

    @property
    def used_bytes(self) -> int:
        pages, free = (
            self.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
        return (pages - free) * PAGE

    def _lock_file(self, owner: int) -> Path:
        return self.folder / f"owner-{owner}.lock"

    def find_others(self) -> bool:
        """Find out which other owners' processes have ended, and forget those without entries. Returns
        whether more have ended than before."""
        before, ended = self._ended, list[int]()
        self.others = []
        for (owner,) in self.db.execute(
            "SELECT number FROM owners WHERE number != ?", (self.owner,)
        ).fetchall():
            with open(self._lock_file(owner), "wb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    self.others.append(owner)
                    continue
            if self.db.execute("SELECT 1 FROM uses WHERE owner = ? LIMIT 1", (owner,)).fetchone():
                ended.append(owner)
            else:
                self.db.execute("DELETE FROM owners WHERE number = ?", (owner,))
                self._lock_file(owner).unlink(missing_ok=True)
        self._ended = f"({', '.join(map(str, ended))})"
        return self._ended not in (before, "()")

    def missing(self, ids: Sequence[int]) -> list[int]:
        """Return which entries are not there."""
        present = set[int]()
        for begin in range(0, len(ids), 500):
            some = ids[begin : begin + 500]
            marks = ", ".join("?" * len(some))
            present |= {row[0] for row in self.db.execute(f"SELECT id FROM uses WHERE id IN ({marks})", some)}
        return [id_ for id_ in ids if id_ not in present]

    def of_ended(self, after: int, count: int) -> list[int]:
        """Return the first `count` entries of ended processes with ids above `after`."""
        if self._ended == "()" or after == NEVER:
            return []
        rows = f"uses NOT INDEXED WHERE id > ? AND owner IN {self._ended} ORDER BY id LIMIT ?"
        return [row[0] for row in self.db.execute(f"SELECT id FROM {rows}", (after, count))]

    def set_uses(self, next_uses: dict[int, int]) -> None:
        """Write when entries are used next, by id, and take over those of ended processes. Entries of other
        owners stay as they are."""
        query = (
            f"UPDATE uses SET owner = ?, next_use = ? WHERE id = ? AND (owner = ? OR owner IN {self._ended})"
        )
        with self.transaction():
            rows = [(self.owner, next_use, id_, self.owner) for id_, next_use in next_uses.items()]
            self.db.executemany(query, rows)

    def put(self, entries: dict[int, tuple[bytes, int]], horizon: int) -> bool:
        """Write entries, by id: bytes, and when they are used next. Evicts as `_evict` does. Returns False,
        and writes nothing, if there is no room."""
        try:
            with self.transaction():
                for id_, (data, next_use) in entries.items():
                    crc = zlib.crc32(data).to_bytes(4, "little")
                    self.db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", (id_, crc + data))
                    self.db.execute(
                        "INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", (id_, self.owner, next_use)
                    )
                    self.db.execute("DELETE FROM errors WHERE id = ?", (id_,))
                while self.used_bytes > self.max_bytes:
                    if not self._evict(max(len(entries) // 4, 1), horizon):
                        raise _NoRoom
        except _NoRoom:
            return False
        except sqlite3.OperationalError as e:
            if "full" not in str(e):
                raise
            self.max_bytes = self.used_bytes - 2 * self.batch_bytes
            logger.warning(
                f"{self.file}: the disk is full; the cache stays below {self.max_bytes >> 20:,} MiB"
            )
            return self.max_bytes > 0 and self.put(entries, horizon)
        return True

    def share(self, horizon: int) -> None:
        """If the cache is nearly full and other owners need it, too, evict down to an equal share."""
        if not self.others or self.used_bytes < self.max_bytes * 7 // 8:
            return
        total, own = (
            self.db.execute(f"SELECT count(*) FROM uses {where}").fetchone()[0]
            for where in ("", f"WHERE owner = {self.owner}")
        )
        excess = own - total // (1 + len(self.others))
        while excess > 0:
            with self.transaction():
                excess = excess - 1000 if self._evict(min(excess, 1000), horizon) else 0

    def _evict(self, count: int, horizon: int) -> int:
        """Delete entries of ended processes or, if there are none, those own entries whose next use is
        latest, except the ones to be used before the sequence `horizon` and those that a reader waits for.
        Held-out sequences, whose next use is -1, are the last. Returns how many."""
        kept = "id NOT IN (SELECT id FROM wanted)"
        of_ended = f"SELECT id FROM uses WHERE owner IN {self._ended} AND {kept} LIMIT ?"
        ids = [row[0] for row in self.db.execute(of_ended, (count,))]
        own = (
            f"SELECT id FROM uses WHERE owner = ? AND (next_use < 0 OR next_use >= ?) AND {kept} "
            "ORDER BY next_use DESC LIMIT ?"
        )
        ids = ids or [row[0] for row in self.db.execute(own, (self.owner, horizon, count))]
        self.delete(ids)
        return len(ids)

    def wanted(self) -> list[int]:
        """Return the entries that readers wait for."""
        return [row[0] for row in self.db.execute("SELECT id FROM wanted")]

    def fail(self, id_: int, message: str, is_final: bool) -> None:
        """Record why an entry could not be downloaded; `is_final`: and never will be."""
        self.db.execute("INSERT OR REPLACE INTO errors VALUES (?, ?, ?)", (id_, message, is_final))

    def forget_errors(self) -> None:
        """Delete the errors of earlier runs."""
        self.db.execute("DELETE FROM errors")


class _NoRoom(Exception):
    pass


def _nothing() -> None:
    pass
