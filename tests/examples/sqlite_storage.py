"""A storage from outside the package: all files of a run in one SQLite database. To use it, put this file
into the current directory or install it, and write

    [job]
    imports = ["sqlite_storage"]
    dump_folder = "sqlite:///data/runs.db/first"

SQLite limits a file to 1 GB, so this suits small models.
"""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import ClassVar

from titanlite.config.component import ConfigError
from titanlite.storage import LOCAL, FolderId, Lock, NewFile, P, Storage


@dataclass(frozen=True, kw_only=True)
class SQLite(Storage, name="sqlite"):
    """A database at a path that ends in .db. What follows in the path is the name of a file in it."""

    commit_rule: ClassVar[str] = "rename"

    def path(self, text: str) -> PurePath:
        path = SQLitePath(text.removeprefix("sqlite://"))
        if not any(part.endswith(".db") for part in path.parts):
            raise ConfigError(f"{text} names no database: its path has no part that ends in .db")
        return path

    def check_writable(self, folder: PurePath, key: str) -> None:
        LOCAL.check_writable(split(folder)[0].parent, key)

    def exists(self, path: PurePath) -> bool:
        return self.is_folder(path) or bool(rows(path, "SELECT 1 FROM files WHERE name = :name"))

    def is_folder(self, path: PurePath) -> bool:
        return bool(rows(path, "SELECT 1 FROM files WHERE substr(name, 1, :length) = :folder LIMIT 1"))

    def size(self, path: PurePath) -> int:
        found = rows(path, "SELECT length(data) FROM files WHERE name = :name")
        if not found:
            raise FileNotFoundError(f"{path} does not exist")
        return int(found[0][0])

    def list(self, folder: P, pattern: str = "*") -> list[P]:
        below = "SELECT substr(name, 1 + :length) FROM files WHERE substr(name, 1, :length) = :folder"
        names = {str(row[0]).partition("/")[0] for row in rows(folder, below)} - {""}
        return [folder / name for name in names if fnmatchcase(name, pattern)]

    def open(self, path: PurePath) -> io.BytesIO:
        found = rows(path, "SELECT data FROM files WHERE name = :name")
        if not found:
            raise FileNotFoundError(f"{path} does not exist")
        return io.BytesIO(found[0][0])

    def create(self, path: PurePath) -> NewFile:
        if self.exists(path):
            raise FileExistsError(f"{path} exists")
        return SQLiteFile(path)

    def put(self, path: PurePath, data: bytes) -> None:
        rows(path, "INSERT OR REPLACE INTO files VALUES (:name, :data)", data=data)

    def append(self, path: PurePath, data: bytes) -> None:
        add = "ON CONFLICT (name) DO UPDATE SET data = CAST(data || excluded.data AS BLOB)"
        rows(path, f"INSERT INTO files VALUES (:name, :data) {add}", data=data)

    def rename(self, path: PurePath, target: PurePath) -> None:
        if self.exists(target):
            raise FileExistsError(f"{target} exists")
        which = "name = :name OR substr(name, 1, :length) = :folder"
        new_name = "UPDATE files SET name = :target || substr(name, :length)"
        try:
            rows(path, f"{new_name} WHERE {which}", target=split(target)[1])
        except sqlite3.IntegrityError:
            raise FileExistsError(f"{target} exists") from None

    def delete(self, path: PurePath) -> None:
        rows(path, "DELETE FROM files WHERE name = :name OR substr(name, 1, :length) = :folder")

    def make_folder(self, path: PurePath) -> None:
        LOCAL.make_folder(split(path)[0].parent)
        for folder in [path, *path.parents][: len(split(path)[1].split("/"))]:
            rows(folder, "INSERT OR IGNORE INTO files VALUES (:folder, '')")

    def sync(self, path: PurePath) -> None:
        """Nothing to do: SQLite syncs each transaction."""

    def free_bytes(self, folder: PurePath) -> int | None:
        return LOCAL.free_bytes(split(folder)[0].parent)

    def lock(self, path: PurePath) -> Lock:
        database, name = split(path)
        return LOCAL.lock(database.with_name(f"{database.name}-{name.replace('/', '-')}"))

    def folder_id(self, folder: PurePath) -> FolderId:
        database, name = split(folder)
        found = LOCAL.folder_id(database)
        return found._replace(path=f"{found.path}/{name}")


class SQLitePath(PurePosixPath):
    """The path of the database, and in it the name of a file."""

    storage = SQLite()

    def __str__(self) -> str:
        return f"sqlite://{super().__str__()}"


class SQLiteFile:
    """A file that is written to the database when it is closed."""

    def __init__(self, path: PurePath):
        self._path, self._data = path, io.BytesIO()

    def write(self, data: bytes | memoryview, /) -> int:
        return self._data.write(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        try:
            rows(self._path, "INSERT INTO files VALUES (:name, :data)", data=self._data.getvalue())
        except sqlite3.IntegrityError:
            raise FileExistsError(f"{self._path} exists") from None

    def abort(self) -> None:
        pass


def split(path: PurePath) -> tuple[Path, str]:
    """The database of a path, and the name of the file in it."""
    index = next(i for i, part in enumerate(path.parts) if part.endswith(".db"))
    return Path(*path.parts[: index + 1]), "/".join(path.parts[index + 1 :])


@contextmanager
def connected(database: Path) -> Iterator[sqlite3.Connection]:
    """A connection for one transaction: several processes and threads use the database."""
    with closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, data BLOB)")
        yield connection


def rows(path: PurePath, statement: str, **values: object) -> list[tuple]:
    """The rows that an SQL statement about `path` returns. An error of SQLite is an OSError."""
    database, name = split(path)
    about = {"name": name, "folder": f"{name}/", "length": len(name) + 1}
    try:
        if not database.exists() and statement.startswith("SELECT"):
            return []
        with connected(database) as connection:
            return connection.execute(statement, {**about, **values}).fetchall()
    except sqlite3.IntegrityError:
        raise
    except sqlite3.Error as e:
        raise OSError(f"{path}: {e}") from e
