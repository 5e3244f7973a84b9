"""A preparation whose output is in a bucket: what its workers share.

    OUTPUT/00000.bin, 00000.idx ...           the files of a shard, once it is assembled
    OUTPUT/.prepare/shard-00000-KEY.json      written after these files: the shard's entry and report
    OUTPUT/.prepare/scan-000000-KEY.npz       the scan of a split, if filters compare documents
    OUTPUT/.prepare/offsets-KEY.npy ...       the duplicates that one worker has found in all scans
    OUTPUT/.prepare/lock-0-of-1               the lease of a worker, with the key of its job
    OUTPUT/dataset.json                       last, created only if there is none

A dataset without dataset.json does not exist. Splits are tokenised and shards assembled in a folder of the
local disk (stages.py), each worker in its own. An object is whole or missing. The name of a record has the
key of its stage, a hash of all inputs, so a listing says what is done. Worker processes use a bucket
themselves: they are spawned, never forked.

A file of at most bucket_objects.SMALL_BYTES is created only if there is none. A larger one is sent in parts,
on no such condition: a process that stood still meanwhile may replace a shard of the job that has taken its
place. That job finds another tag before it creates dataset.json and ends, and the same command makes the
shard again. If the shard is replaced after that, its hash is not the one in dataset.json."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, TypeVar

from titanlite.checkpoint.digest import write_file
from titanlite.config.component import ConfigError
from titanlite.config.json_file import parse
from titanlite.data.remote_shards import RemoteTokens
from titanlite.data.shards import PreparedTokens, TokenShards
from titanlite.files import hash_file, hash_stream
from titanlite.log import logger
from titanlite.storage import Lock, storage_of

T = TypeVar("T")
V = TypeVar("V")
WORK, DESCRIPTION = ".prepare", "dataset.json"
LOCKS = "lock-*"
OF_SHARDS = re.compile(r"\d{5,}\.(bin|idx|mask)")  # names of files
CONNECTIONS = 32
BLOCK_BYTES = 8 << 20
POLL_S = 1.0  # between two looks at a lock


def is_made(output: PurePath) -> bool:
    """Return whether there is a complete dataset at `output`, or on a local disk anything else."""
    if isinstance(output, Path):
        return os.path.lexists(output)
    return bool(storage_of(output).list(output, DESCRIPTION))


def open_made(output: PurePath) -> PreparedTokens:
    """Return the complete dataset at `output`."""
    return TokenShards(output) if isinstance(output, Path) else RemoteTokens(str(output), Path())


def check_output(output: PurePath) -> bool:
    """Return whether there is unfinished work in a bucket. Raises ConfigError if no dataset can be made at
    `output`: the bucket is missing or refuses, or has other objects there."""
    storage = storage_of(output)
    storage.check_writable(output, "output")
    with _errors(output):
        names = {path.name for path in storage.list(output)}
        if names and not names & {WORK, DESCRIPTION}:
            raise exists(output)
        if {WORK, DESCRIPTION} <= names:  # a process was killed after it had completed the dataset
            storage.delete(output / WORK)
        storage.lock(output / WORK / "lock")  # not taken: finds out whether the store heeds conditions
    return names >= {WORK} and DESCRIPTION not in names


def exists(output: PurePath) -> ConfigError:
    """Return the error that there is something at `output`."""
    return ConfigError(f"{output} exists; choose another, or delete it", "output")


class SharedWork:
    """The objects of the preparation of `output`, of the job with the key `job`. Picklable: worker processes
    send the files that they have made. `names`: of the finished work in the bucket, as last listed.
    `is_made`: whether the dataset is complete. `is_over`: whether the work may be deleted."""

    def __init__(self, output: PurePath, job: str, own_lock: str, lock: Lock | None = None):
        self.output, self.folder, self.job, self._own_lock = output, output / WORK, job, own_lock
        self._storage, self._lock = storage_of(output), lock
        self.names: set[str] = set()
        self.is_made = self.is_over = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "names": set()}

    def look(self) -> None:
        """Bring `names` up to date."""
        self.names = {path.name for path in self._storage.list(self.folder)}

    def check(self) -> None:
        """Raise ConfigError if another process has taken this worker's place, after it stood still for a
        minute."""
        if self._lock is not None and self._lock.is_lost() and not is_made(self.output):
            raise self._overtaken()

    def delete_others(self, names: Collection[str]) -> None:
        """Delete the work of earlier jobs: all but the objects with these names, and locks."""
        others = [name for name in self.names - set(names) if not name.startswith(LOCKS[:-1])]
        self.for_all(lambda name: self._storage.delete(self.folder / name), others)

    # ---- objects

    def record(self, name: str, content: dict[str, Any]) -> None:
        """Write the record of finished work."""
        write_file(self.folder / name, json.dumps(content).encode())

    def records(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Read records."""
        return self.for_all(lambda name: parse(self._storage.read(self.folder / name)), names)

    def has(self, name: str) -> bool:
        """Return whether there is the object of some work now."""
        try:
            return self._storage.size(self.folder / name) >= 0
        except FileNotFoundError:
            return False

    def send(self, file: Path, name: str) -> None:
        """Write a file of finished work."""
        self._send(file, self.folder / name)

    def send_file(self, file: Path) -> str:
        """Write a file of the dataset. Returns its tag."""
        target = self.output / file.name
        self._send(file, target)
        return self._storage.tag(target)

    def fetch(self, name: str, file: Path) -> None:
        """Copy a file of finished work to the local disk."""
        with self._storage.open(self.folder / name) as reader, open(file, "wb") as writer:
            while block := reader.read(BLOCK_BYTES):
                writer.write(block)

    def for_all(self, call: Callable[[V], T], values: Iterable[V]) -> list[T]:
        """Call `call` with each value, for many values at a time."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(call, values))

    def _send(self, file: Path, target: PurePath) -> None:
        """Create an object. One with this content is left as it is; one of an earlier job is replaced."""
        for _ in range(2):
            writer = self._storage.create(target)
            try:
                with open(file, "rb") as reader:
                    while block := reader.read(BLOCK_BYTES):
                        writer.write(block)
                writer.close()
                return
            except FileExistsError:
                writer.abort()
                with self._storage.open(target) as stored:
                    if hash_stream(stored, target) == hash_file(file):
                        return
            except BaseException:
                writer.abort()
                raise
            if not self._has_place():
                raise self._overtaken()
            self._storage.delete(target)
        raise self._overtaken()

    def _has_place(self) -> bool:
        return self._storage.lock(self.folder / self._own_lock).owner() == self.job

    def _overtaken(self) -> ConfigError:
        return ConfigError(f"{self.output}: another process has begun to prepare it; this one ends", "output")

    # ---- locks

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Only one worker is in the body, which resolves duplicates."""
        lock = self._storage.lock(self.folder / "lock-resolve")
        _take(lock, "another worker to resolve duplicates")
        try:
            yield
        finally:
            lock.release()

    # ---- the end

    def complete(self, folder: Path, tags: Mapping[str, Mapping[str, str]]) -> None:
        """Complete the dataset with report.json and dataset.json of a local folder. `tags`: by the name of
        each shard's record, the tags of the shard's files. Raises ConfigError if a file is missing or was
        changed, if another process has taken this worker's place, or if there is another dataset."""
        if self._has_place():
            self._check_files(tags)
        elif not is_made(self.output):  # asked later: a worker that completes it then deletes the locks
            raise self._overtaken()
        self._send(folder / "report.json", self.output / "report.json")
        try:
            write_file(self.output / DESCRIPTION, (folder / DESCRIPTION).read_bytes())
        except FileExistsError:
            raise exists(self.output) from None
        self.is_made = True

    def _check_files(self, tags: Mapping[str, Mapping[str, str]]) -> None:
        """Raise ConfigError if a shard's file is missing or was changed, after deleting the shard's record.
        Delete the shards that an earlier job had more than this one."""
        stored = {
            path.name: version.tag.strip('"')
            for path, version in self._storage.files_below(self.output).items()
            if path.parent == self.output
        }
        for record, files in tags.items():
            for name, tag in files.items():
                if stored.pop(name, None) != tag.strip('"'):
                    self._storage.delete(self.folder / record)
                    raise ConfigError(
                        f"{self.output / name} was deleted or changed; start the same command again, which "
                        "makes it again"
                    )
        others = [self.output / name for name in stored if OF_SHARDS.fullmatch(name)]
        self.for_all(self._storage.delete, others)


@contextmanager
def joined(output: PurePath, worker: tuple[int, int], job: str) -> Iterator[SharedWork]:
    """Hold the lease of a worker, so that only one process runs it. Raises ConfigError if workers of another
    total number, or of another job, are running."""
    storage, folder, own = storage_of(output), output / WORK, f"lock-{worker[0]}-of-{worker[1]}"
    with _errors(output):
        lock = storage.lock(folder / own)
        _take(lock, f"another process that prepares {output.name}")
    work = SharedWork(output, job, own, lock)
    try:
        lock.write_owner(job)  # before a look at the others, so that one of two processes sees the other
        for name, text in _held(folder, own):
            _, _, total = name.rpartition("-of-")
            if total != str(worker[1]):
                raise ConfigError(
                    f"{output}: a preparation by {total} workers is running; wait for it, or join it with "
                    "the same number of workers"
                )
            if text not in ("", job):
                raise ConfigError(
                    f"{output}: another worker is preparing it from other files, filters or another "
                    "tokenizer; wait for it, or give all workers the same input"
                )
        work.look()
        work.is_made = is_made(output)  # listed later: a worker that completes it then deletes the work
        yield work
    except ConfigError:
        if worker[1] == 1 and not lock.is_lost() and all(path.match(LOCKS) for path in storage.list(folder)):
            work.is_over = True  # no work is done
        raise
    finally:
        lock.release()
        if work.is_over or work.is_made:
            with suppress(OSError):
                storage.delete(folder)


def _held(folder: PurePath, own: str) -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of the locks that other workers hold."""
    for path in storage_of(folder).list(folder, "lock-*-of-*"):
        if path.name != own:
            lock = storage_of(folder).lock(path)
            if lock.try_take():
                lock.release()
            else:
                yield path.name, lock.owner()


def _take(lock: Lock, holder: str) -> None:
    is_told = False
    while not lock.try_take():
        if not is_told:
            logger.info(f"waiting for {holder}")
            is_told = True
        time.sleep(POLL_S)


@contextmanager
def _errors(output: PurePath) -> Iterator[None]:
    """Raise an error of the storage as a ConfigError, except that of a store that does not answer, which ends
    the command with exit code 1."""
    try:
        yield
    except OSError as e:
        if e.errno == errno.EREMOTEIO:
            raise
        raise ConfigError(f"{output} cannot be written to: {e.strerror or e}", "output") from None
