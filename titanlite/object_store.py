"""Runs in a bucket: the storages s3://, gs:// and az://, by obstore (extra `cloud`).

An object store has no folders, no renames and no locks, but it can create an object only if there is none,
and replace it only if it is the version that was read. From these two this module makes what Storage
promises:

Folders that are renamed, which are those of checkpoints. `.partial-step-5-1a2b3c4d` is written to the keys
`step-5/1a2b3c4d/...`. Renaming it to `step-5` creates the object `step-5/COMMIT`, which names these keys; a
checkpoint without COMMIT does not exist. Renaming it again creates a COMMIT elsewhere that names the same
keys, and deletes the first. If a process is killed in between, the next lock of the run folder deletes it.

Files that are appended to are objects NAME.segments/GENERATION.NUMBER, of which the last is replaced while it
is small. Replacing the file begins a generation; the newest counts.

The lock is an object with a lease, which a thread renews. Its times are the store's own.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from operator import methodcaller
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, ClassVar, NamedTuple

from titanlite import bucket_objects as objects
from titanlite.config.component import ConfigError
from titanlite.config.paths import expand_home
from titanlite.storage import FileVersion, FolderId, Lock, NewFile, P, Storage, parse_path

COMMIT, MANIFEST, SEGMENTS = "COMMIT", "manifest.json", ".segments"
PARTIAL = re.compile(r"\.partial-(.+)-([0-9a-f]{8})")
# Names of folders with a COMMIT.
RENAMED = re.compile(r"step-\d+|quarantined-step-\d+-\d+|\.trash-step-\d+-[0-9a-f]{8}")
BUCKET = re.compile(r"[\w$][\w.-]*", re.ASCII)
SEGMENT_BYTES = 256 << 10
LEASE, RENEWAL_S = timedelta(seconds=60), 15.0
ABANDONED = timedelta(days=1)  # the age of a checkpoint that has a manifest, and that nobody commits any more
SILENCE_S = 300.0  # after a request for records that was not answered


class Segments(NamedTuple):
    """The objects of a file that is appended to: the keys of its newest generation in order, and those of
    earlier ones."""

    keys: list[str]
    size: int
    outdated: list[str]

    @property
    def generation(self) -> int:
        return int(self.keys[0].rpartition("/")[2].partition(".")[0]) if self.keys else -1


class Tail(NamedTuple):
    """The last segment of a file that this process appends to."""

    generation: int
    number: int
    data: bytes


class ObjectStore(Storage):
    """Base of the storages of object stores."""

    has_folders: ClassVar[bool] = False
    commit_rule: ClassVar[str] = "create"

    def path(self, text: str) -> PurePath:
        name = text.removeprefix(f"{self.name}://")
        path = PATHS[self.name](name)
        if path.is_absolute() or len(path.parts) < 2 or ".." in path.parts:
            raise ConfigError(f"{text}: expected {self.name}://BUCKET/FOLDER")
        if "/".join(path.parts) != name.removesuffix("/"):
            raise ConfigError(f"{text}: a folder has an empty name or is a dot; leave out // and /./")
        if not BUCKET.fullmatch(path.parts[0]):
            raise ConfigError(f"{text}: no bucket can be called {path.parts[0]!r}")
        return path

    def check_writable(self, folder: PurePath, key: str) -> None:
        """Checks the name, and that obstore is installed: more is not known before the first request."""
        if any(RENAMED.fullmatch(part) for part in folder.parts[1:]):
            raise ConfigError(
                f"{folder}: in a bucket, step-N names a checkpoint of a run; choose another", key
            )
        objects.load_obstore()

    def exists(self, path: PurePath) -> bool:
        return self.is_folder(path) or self._size(path) is not None

    def is_folder(self, path: PurePath) -> bool:
        prefix = _resolved(path)
        if prefix is None or RENAMED.fullmatch(path.name):
            return prefix is not None
        return objects.request(
            path, lambda client: any(len(chunk) for chunk in client.list(prefix, chunk_size=1))
        )

    def size(self, path: PurePath) -> int:
        size = self._size(path)
        if size is None:
            raise objects.missing(path)
        return size

    def list(self, folder: P, pattern: str = "*") -> list[P]:
        prefix = _resolved(folder)
        if prefix is None:
            return []
        listed = objects.request(folder, lambda client: client.list_with_delimiter(prefix))
        files = {PurePosixPath(item["path"]).name for item in listed["objects"]} - {COMMIT}
        folders = {PurePosixPath(name).name for name in listed["common_prefixes"]}
        names = files | {name.removesuffix(SEGMENTS) for name in folders}
        found = [folder / name for name in names if fnmatchcase(name, pattern)]
        found = [path for path in found if not RENAMED.fullmatch(path.name) or _resolved(path) is not None]
        if pattern.startswith(".partial"):
            partial = self._unfinished(folder, [name for name in folders if RENAMED.fullmatch(name)])
            found += [folder / name for name in partial if fnmatchcase(name, pattern)]
        return found

    def files_below(self, folder: P) -> dict[P, FileVersion]:
        prefix, found = objects.key_of(folder), dict[P, FileVersion]()
        for item in objects.listed(folder, prefix):
            name = item["path"].removeprefix(f"{prefix}/")
            found[folder / name] = FileVersion(item["size"], str(item["e_tag"] or ""))
        return found

    def open(self, path: PurePath) -> io.BufferedIOBase:
        key = _resolved(path)
        if key is None:
            raise objects.missing(path)
        if (size := objects.head(path, key)) is not None:
            return io.BufferedReader(objects.Ranges(path, key, size), objects.READ_BYTES)
        if not (segments := _segments(path, key)).keys:
            raise objects.missing(path)
        return io.BytesIO(b"".join(objects.get(path, name) for name in segments.keys))

    def tag(self, path: PurePath) -> str:
        with objects.errors(path):
            return str(objects.client_of(path).head(_existing(path))["e_tag"] or "")

    def read_tagged(self, path: PurePath, tag: str, start: int, size: int) -> bytes:
        options = {"range": (start, start + size)} | ({"if_match": tag} if tag else {})
        with objects.errors(path):
            return bytes(objects.client_of(path).get(_existing(path), options=options).bytes())

    def create(self, path: PurePath) -> NewFile:
        key = _resolved(path)
        if key is None:
            raise objects.missing(path)
        return objects.NewObject(path, key)

    def put(self, path: PurePath, data: bytes) -> None:
        key = _existing(path)
        segments = _segments(path, key)
        if not segments.keys:
            objects.put(path, key, data)
            return
        tail = Tail(segments.generation + 1, 0, data)
        objects.put(path, _segment_key(key, tail), data)
        objects.delete(path, *segments.keys, *segments.outdated, key)
        _tails[str(path)] = tail

    def put_record(self, path: PurePath, data: bytes) -> None:
        with _unless_silent(path):
            self.put(path, data)

    def append(self, path: PurePath, data: bytes) -> None:
        with _unless_silent(path):
            self._append(path, data)

    def _append(self, path: PurePath, data: bytes) -> None:
        key, tail = _existing(path), _tails.get(str(path))
        if tail is None:
            segments = _segments(path, key)
            if objects.head(path, key) is not None:  # a file that nothing was appended to before
                tail = Tail(segments.generation + 1, 0, objects.get(path, key))
            else:
                tail = Tail(max(segments.generation, 0), len(segments.keys), b"")
        elif len(tail.data) >= SEGMENT_BYTES:
            tail = Tail(tail.generation, tail.number + 1, b"")
        tail = tail._replace(data=tail.data + data)
        if str(path) in _tails:
            objects.put(path, _segment_key(key, tail), tail.data)
        else:
            tail = _create_segment(path, key, tail)
            objects.delete(path, key)
        _tails[str(path)] = tail

    def rename(self, path: PurePath, target: PurePath) -> None:
        if not RENAMED.fullmatch(target.name):
            self._rename_file(path, target)
            return
        keys = _resolved(path)
        if keys is None:
            raise objects.missing(path)
        is_partial = PARTIAL.fullmatch(path.name) is not None
        pointer = {"keys": keys, "from": None if is_partial else objects.key_of(path)}
        objects.create(target, f"{objects.key_of(target)}/{COMMIT}", json.dumps(pointer).encode())
        if not is_partial:
            objects.delete(path, f"{objects.key_of(path)}/{COMMIT}")

    def delete(self, path: PurePath) -> None:
        prefix = _resolved(path)
        if prefix is None or (PARTIAL.fullmatch(path.name) and self._may_be_written(path, prefix)):
            return
        below = [*objects.listed(path, prefix), *objects.listed(path, f"{prefix}{SEGMENTS}")]
        objects.delete(path, *([item["path"] for item in below] or [prefix]))
        if RENAMED.fullmatch(path.name):
            objects.delete(path, f"{objects.key_of(path)}/{COMMIT}")
        _tails.pop(str(path), None)

    def make_folder(self, path: PurePath) -> None:
        """Nothing to do: a folder is there with its first object."""

    def sync(self, path: PurePath) -> None:
        """Nothing to do: a request that was answered outlasts a power loss."""

    def free_bytes(self, folder: PurePath) -> int | None:
        return None

    def lock(self, path: PurePath) -> Lock:
        bucket = self.name, path.parts[0]
        if bucket not in objects.checked:
            objects.check_conditions(path)
            objects.checked.add(bucket)
        return _Lease(path)

    def folder_id(self, folder: PurePath) -> FolderId:
        return FolderId(str(folder), 0, 0)

    def _size(self, path: PurePath) -> int | None:
        """The bytes of a file; None if there is none."""
        key = _resolved(path)
        if key is None:
            return None
        if (size := objects.head(path, key)) is not None:
            return size
        segments = _segments(path, key)
        return segments.size if segments.keys else None

    def _rename_file(self, path: PurePath, target: PurePath) -> None:
        """Copy a small file, and delete the first."""
        key, new_key = _existing(path), _existing(target)
        objects.create(target, new_key, objects.get(path, key))
        objects.delete(path, key)

    def _unfinished(self, folder: PurePath, names: Sequence[str]) -> Sequence[str]:
        """The names of folders of checkpoints whose keys no COMMIT names. `names`: of folders of
        checkpoints."""
        committed = {pointer["keys"] for _, pointer in _pointers(folder)}
        found: Any = []
        for name in names:
            prefix = f"{objects.key_of(folder)}/{name}"
            below = objects.request(folder, methodcaller("list_with_delimiter", prefix))["common_prefixes"]
            left = [prefix.rstrip("/") for prefix in below if prefix.rstrip("/") not in committed]
            # SeaweedFS lists empty folders for a while.
            left = [prefix for prefix in left if objects.listed(folder, prefix)]
            found += [f".partial-{name}-{PurePosixPath(prefix).name}" for prefix in left]
        return found

    def _may_be_written(self, path: PurePath, prefix: str) -> bool:
        """Whether an object of an unfinished checkpoint is so new that a process may still be writing to it,
        by the store's own dates. One with a manifest may be finished: a listing did not show its COMMIT, or a
        process that was suspended is about to create it."""
        items = objects.listed(path, prefix)
        age = ABANDONED if any(PurePosixPath(item["path"]).name == MANIFEST for item in items) else LEASE
        return bool(items) and objects.now(path) - max(item["last_modified"] for item in items) < age


@dataclass(frozen=True, kw_only=True)
class S3(ObjectStore, name="s3"):
    """Amazon S3 and stores with its interface. Credentials, region and endpoint: $AWS_ACCESS_KEY_ID,
    $AWS_SECRET_ACCESS_KEY, $AWS_REGION, $AWS_ENDPOINT_URL, or those of the machine's role."""


@dataclass(frozen=True, kw_only=True)
class GoogleCloud(ObjectStore, name="gs"):
    """Google Cloud Storage. Credentials: $GOOGLE_APPLICATION_CREDENTIALS, or those of the machine."""


@dataclass(frozen=True, kw_only=True)
class Azure(ObjectStore, name="az"):
    """Azure Blob Storage. Account and credentials: $AZURE_STORAGE_ACCOUNT_NAME and
    $AZURE_STORAGE_ACCOUNT_KEY, or those of the machine."""


class S3Path(PurePosixPath):
    """The bucket, then the key."""

    storage: ClassVar[Storage] = S3()

    def __str__(self) -> str:
        return f"{self.storage.name}://{super().__str__()}"

    def __eq__(self, other: object) -> bool:  # before Python 3.12, PurePath's ignores the scheme
        return type(other) is type(self) and str(other) == str(self)

    def __hash__(self) -> int:
        return hash((type(self), str(self)))


class GoogleCloudPath(S3Path):
    storage = GoogleCloud()


class AzurePath(S3Path):
    storage = Azure()


PATHS: dict[str, type[PurePosixPath]] = {"s3": S3Path, "gs": GoogleCloudPath, "az": AzurePath}

_tails: dict[str, Tail] = {}  # of the files that this process appends to
_silent_until: dict[str, float] = {}  # by bucket: the time until which no records are written


def location(text: str) -> PurePath:
    """The path that a word of a command names: of the local disk, or a URL of a storage. Raises
    ConfigError."""
    return parse_path(expand_home(text))


def forget_clients() -> None:
    """Close all clients, so that the next one has the environment's credentials. For tests."""
    objects.clients.clear()
    objects.opened_in.clear()
    objects.checked.clear()
    objects.told_at.clear()
    _tails.clear()
    _silent_until.clear()


@contextmanager
def _unless_silent(path: PurePath) -> Iterator[None]:
    """For the body, which writes records. Training waits for them, and would wait for minutes with each one:
    raises OSError at once if a request for records was not answered in the last SILENCE_S."""
    bucket = path.parts[0]
    if time.monotonic() < _silent_until.get(bucket, 0.0):
        raise OSError(errno.EREMOTEIO, "the store did not answer a short time ago", str(path))
    try:
        with objects.impatient():
            yield
    except OSError as e:
        if e.errno == errno.EREMOTEIO:
            _silent_until[bucket] = time.monotonic() + SILENCE_S
        raise


def _resolved(path: PurePath) -> str | None:
    """The key, or the beginning of keys, that a path stands for; None if it is in a folder of a checkpoint
    that does not exist."""
    key = ""
    for part in path.parts[1:]:
        below = f"{key}/{part}".lstrip("/")
        if match := PARTIAL.fullmatch(part):
            below = f"{key}/{match[1]}/{match[2]}".lstrip("/")
        elif RENAMED.fullmatch(part):
            pointer = _pointer(path, f"{below}/{COMMIT}")
            if pointer is None:
                return None
            below = pointer["keys"]
        key = below
    return key


def _existing(path: PurePath) -> str:
    """The key of a file whose folder exists."""
    key = _resolved(path)
    if key is None:
        raise objects.missing(path)
    return key


def _pointer(path: PurePath, key: str) -> dict[str, Any] | None:
    """The content of a COMMIT; None if there is none."""
    with suppress(FileNotFoundError):
        pointer: dict[str, Any] = json.loads(objects.get(path, key))
        return pointer
    return None


def _pointers(folder: PurePath) -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys and contents of all COMMITs in a folder and below."""
    for item in objects.listed(folder, objects.key_of(folder)):
        if item["path"].endswith(f"/{COMMIT}") and (pointer := _pointer(folder, item["path"])) is not None:
            yield item["path"], pointer


def _segments(path: PurePath, key: str) -> Segments:
    items = sorted(objects.listed(path, f"{key}{SEGMENTS}"), key=lambda item: item["path"])
    newest = items[-1]["path"].rpartition(".")[0] if items else ""
    current = [item for item in items if item["path"].rpartition(".")[0] == newest]
    outdated = [item["path"] for item in items if item["path"].rpartition(".")[0] != newest]
    return Segments([item["path"] for item in current], sum(item["size"] for item in current), outdated)


def _segment_key(key: str, tail: Tail) -> str:
    return f"{key}{SEGMENTS}/{tail.generation:06}.{tail.number:06}"


def _create_segment(path: PurePath, key: str, tail: Tail) -> Tail:
    """Create the first segment of this process after all others, of which a listing may not show the last.
    Returns it with its number."""
    while True:
        try:
            objects.create(path, _segment_key(key, tail), tail.data)
            return tail
        except FileExistsError:
            tail = tail._replace(number=tail.number + 1)


class _Lease(Lock):
    """An object that names its owner and that its owner replaces every RENEWAL_S seconds. An owner that has
    not replaced it for LEASE has lost it, and so has one whose process is known to have ended."""

    def __init__(self, path: PurePath):
        self._path, self._key = path, objects.key_of(path)
        self._token, self._text = uuid.uuid4().hex, ""
        self._version: Any = None
        self._renewed = time.monotonic()
        self._lost, self._ends = threading.Event(), threading.Event()
        self._mutex = threading.Lock()
        self._renewals: threading.Thread | None = None
        self._other: Any = None  # version of another process's lock, which is not free before:
        self._free_at = 0.0

    def try_take(self) -> bool:
        meta, content = self._read()
        if meta is not None and not self._is_free(meta, content):
            return False
        try:
            self._write("create" if meta is None else _version_of(meta))
        except OSError as e:
            if e.errno not in (errno.EEXIST, errno.ESTALE):
                raise
            # another process was faster, or the object was deleted meanwhile
            return self._read()[0] is None and self.try_take()
        self._finish_renames()
        self._renewals = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._renewals.start()
        return True

    def owner(self) -> str:
        return str(self._read()[1].get("text", ""))

    def write_owner(self, text: str) -> None:
        self._text = text
        self._replace()

    def is_lost(self) -> bool:
        if time.monotonic() - self._renewed > LEASE.total_seconds():  # suspended, or the store was away
            self._renew()
        return self._lost.is_set()

    def release(self) -> None:
        self._ends.set()
        if self._renewals is not None:
            self._renewals.join()
            with suppress(OSError), self._mutex:
                if not self._lost.is_set():
                    self._token = ""
                    self._write(self._version)

    def _read(self) -> tuple[Any, dict[str, Any]]:
        """Version and date of the object, and its content; None and {} if there is none."""
        try:
            meta, content = objects.request(self._path, self._get)
        except FileNotFoundError:
            return None, {}
        try:
            return meta, json.loads(content or b"{}")
        except ValueError:  # not a lock of titanlite's; its age counts
            return meta, {"token": "unknown"}

    def _get(self, client: Any) -> tuple[Any, bytes]:
        result = client.get(self._key)
        return result.meta, bytes(result.bytes())

    def _is_free(self, meta: Any, content: dict[str, Any]) -> bool:
        if not content.get("token"):
            return True
        if (here := _machine()) and content.get("machine") == here and _has_ended(content.get("pid")):
            return True
        if _version_of(meta) != self._other or time.monotonic() > self._free_at:
            left = LEASE - (objects.now(self._path) - meta["last_modified"])
            self._other, self._free_at = _version_of(meta), time.monotonic() + left.total_seconds()
        return time.monotonic() > self._free_at

    def _write(self, mode: Any) -> None:
        """Replace the object under a condition. After a lost answer, a repeated request finds the object that
        the first one has written."""
        content = {"token": self._token, "text": self._text, "machine": _machine(), "pid": os.getpid()}
        data = json.dumps(content).encode()
        try:
            result = objects.request(
                self._path, methodcaller("put", self._key, data, mode=mode, use_multipart=False)
            )
        except OSError as e:
            result, found = self._read() if e.errno in (errno.EEXIST, errno.ESTALE) else (None, {})
            if found != content:
                raise
        self._version, self._renewed = _version_of(result), time.monotonic()

    def _keep(self) -> None:
        """Replace the object from time to time."""
        while not self._ends.wait(RENEWAL_S) and not self._lost.is_set():
            with suppress(OSError):  # a store that does not answer now; the lease may outlast it
                self._renew()

    def _replace(self) -> None:
        """Replace the object, or create it again if it was deleted."""
        with self._mutex:
            try:
                self._write(self._version)
            except OSError as e:
                if e.errno not in (errno.ESTALE, errno.ENOENT) or self._read()[0] is not None:
                    raise
                self._write("create")

    def _renew(self) -> None:
        """Replace the object. If another process has taken the lock since, it is lost."""
        try:
            self._replace()
        except OSError as e:
            if e.errno not in (errno.ESTALE, errno.EEXIST):
                raise
            self._lost.set()

    def _finish_renames(self) -> None:
        """Delete each COMMIT whose folder a killed process has begun to rename."""
        pointers = dict(_pointers(self._path.parent))
        for pointer in pointers.values():
            before = f"{pointer['from']}/{COMMIT}"
            if pointer["from"] and pointers.get(before, {}).get("keys") == pointer["keys"]:
                objects.delete(self._path, before)


def _version_of(meta: Any) -> dict[str, str]:
    """The condition that an object is still the one that `meta` describes."""
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def _machine() -> str:
    """Tells where the id of a process has a meaning: since this start of this kernel, in this container. Two
    machines may have one name. "": unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _has_ended(pid: Any) -> bool:
    """Whether a process of this machine has ended."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (TypeError, ValueError, OSError):
        return False
    return False
