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

A client of obstore hangs in a process that was forked after its parent used one. So only ranks, commands
and their spawned processes use these storages, and a client is refused in a forked child of a process that
has one.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from operator import methodcaller
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, ClassVar, NamedTuple, TypeVar

from titanlite.config.component import ConfigError
from titanlite.config.paths import expand_home
from titanlite.storage import FileVersion, FolderId, Lock, NewFile, P, Storage, parse_path

T = TypeVar("T")
COMMIT, MANIFEST, SEGMENTS = "COMMIT", "manifest.json", ".segments"
PARTIAL = re.compile(r"\.partial-(.+)-([0-9a-f]{8})")
RENAMED = re.compile(r"(?:\.trash-|quarantined-)?step-\d+(?:-.*)?")  # names of folders with a COMMIT
SEGMENT_BYTES = 256 << 10
SMALL_BYTES = 8 << 20  # files up to here are created by one request
PART_BYTES, PARTS = 16 << 20, 4  # of an upload in parts: so many of this size are in host memory per file
READ_BYTES = 8 << 20  # of a request for a range of a file that is read from one end to the other
LEASE, RENEWAL_S = timedelta(seconds=60), 15.0
ABANDONED = timedelta(days=1)  # the age of a checkpoint that has a manifest, and that nobody commits any more
# Where obstore asks for credentials of the machine's role.
ROLE = r"/latest/(api/token|meta-data/)|/computeMetadata/|/metadata/identity/"
CODES = {  # of messages; the kind of an error misleads, as of 403 for a full bucket and of refused lists
    r"QuotaExceeded|InsufficientStorage|status code: 507": errno.ENOSPC,
    rf"<Code>(ExpiredToken|InvalidToken|TokenRefreshRequired)<|status code: 40[13]|{ROLE}": errno.EACCES,
    r"NoSuchBucket|ContainerNotFound|specified bucket does not exist": errno.ENOTDIR,  # no missing file
}
SILENCE_S = 300.0  # after a request of an append that was not answered
CLIENT_OPTIONS = {"allow_http": True}
RETRIES = {"max_retries": 8, "retry_timeout": timedelta(seconds=120)}  # with exponential back-off and jitter


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
        path = PATHS[self.name](text.removeprefix(f"{self.name}://"))
        if path.is_absolute() or len(path.parts) < 2 or ".." in path.parts:
            raise ConfigError(f"{text}: expected {self.name}://BUCKET/FOLDER")
        return path

    def check_writable(self, folder: PurePath, key: str) -> None:
        """Only checks that obstore is installed: more is not known before the first request."""
        _obstore()

    def exists(self, path: PurePath) -> bool:
        return self.is_folder(path) or self._size(path) is not None

    def is_folder(self, path: PurePath) -> bool:
        prefix = _resolved(path)
        if prefix is None or RENAMED.fullmatch(path.name):
            return prefix is not None
        return _request(path, lambda client: any(len(chunk) for chunk in client.list(prefix, chunk_size=1)))

    def size(self, path: PurePath) -> int:
        size = self._size(path)
        if size is None:
            raise _missing(path)
        return size

    def list(self, folder: P, pattern: str = "*") -> list[P]:
        prefix = _resolved(folder)
        if prefix is None:
            return []
        listed = _request(folder, lambda client: client.list_with_delimiter(prefix))
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
        prefix, found = _key(folder), dict[P, FileVersion]()
        for item in _listed(folder, prefix):
            name = item["path"].removeprefix(f"{prefix}/")
            found[folder / name] = FileVersion(item["size"], str(item["e_tag"] or ""))
        return found

    def open(self, path: PurePath) -> io.BufferedIOBase:
        key = _resolved(path)
        if key is None:
            raise _missing(path)
        if (size := _head(path, key)) is not None:
            return io.BufferedReader(_Ranges(path, key, size), READ_BYTES)
        if not (segments := _segments(path, key)).keys:
            raise _missing(path)
        return io.BytesIO(b"".join(_get(path, name) for name in segments.keys))

    def tag(self, path: PurePath) -> str:
        with _errors(path):
            return str(_client(path).head(_existing(path))["e_tag"] or "")

    def read_tagged(self, path: PurePath, tag: str, start: int, size: int) -> bytes:
        options = {"range": (start, start + size)} | ({"if_match": tag} if tag else {})
        with _errors(path):
            return bytes(_client(path).get(_existing(path), options=options).bytes())

    def create(self, path: PurePath) -> NewFile:
        key = _resolved(path)
        if key is None:
            raise _missing(path)
        return _NewObject(path, key)

    def put(self, path: PurePath, data: bytes) -> None:
        key = _existing(path)
        segments = _segments(path, key)
        if not segments.keys:
            _put(path, key, data)
            return
        tail = Tail(segments.generation + 1, 0, data)
        _put(path, _segment_key(key, tail), data)
        _delete(path, *segments.keys, *segments.outdated, key)
        _tails[str(path)] = tail

    def append(self, path: PurePath, data: bytes) -> None:
        # Training waits for its records, and would wait for minutes with each of them.
        if time.monotonic() < _silent_until.get(path.parts[0], 0.0):
            raise OSError(errno.EREMOTEIO, "the store did not answer a short time ago", str(path))
        try:
            self._append(path, data)
        except OSError as e:
            if e.errno == errno.EREMOTEIO:
                _silent_until[path.parts[0]] = time.monotonic() + SILENCE_S
            raise

    def _append(self, path: PurePath, data: bytes) -> None:
        key, tail = _existing(path), _tails.get(str(path))
        if tail is None:
            segments = _segments(path, key)
            if _head(path, key) is not None:  # a file that nothing was appended to before
                tail = Tail(segments.generation + 1, 0, _get(path, key))
            else:
                tail = Tail(max(segments.generation, 0), len(segments.keys), b"")
        elif len(tail.data) >= SEGMENT_BYTES:
            tail = Tail(tail.generation, tail.number + 1, b"")
        tail = tail._replace(data=tail.data + data)
        if str(path) in _tails:
            _put(path, _segment_key(key, tail), tail.data)
        else:
            tail = _create_segment(path, key, tail)
            _delete(path, key)
        _tails[str(path)] = tail

    def rename(self, path: PurePath, target: PurePath) -> None:
        if not RENAMED.fullmatch(target.name):
            self._rename_file(path, target)
            return
        keys = _resolved(path)
        if keys is None:
            raise _missing(path)
        is_partial = PARTIAL.fullmatch(path.name) is not None
        pointer = {"keys": keys, "from": None if is_partial else _key(path)}
        _create(target, f"{_key(target)}/{COMMIT}", json.dumps(pointer).encode())
        if not is_partial:
            _delete(path, f"{_key(path)}/{COMMIT}")

    def delete(self, path: PurePath) -> None:
        prefix = _resolved(path)
        if prefix is None or (PARTIAL.fullmatch(path.name) and self._may_be_written(path, prefix)):
            return
        below = [*_listed(path, prefix), *_listed(path, f"{prefix}{SEGMENTS}")]
        _delete(path, *([item["path"] for item in below] or [prefix]))
        if RENAMED.fullmatch(path.name):
            _delete(path, f"{_key(path)}/{COMMIT}")
        _tails.pop(str(path), None)

    def make_folder(self, path: PurePath) -> None:
        """Nothing to do: a folder is there with its first object."""

    def sync(self, path: PurePath) -> None:
        """Nothing to do: a request that was answered outlasts a power loss."""

    def free_bytes(self, folder: PurePath) -> int | None:
        return None

    def lock(self, path: PurePath) -> Lock:
        if path.parts[0] not in _checked:
            _check_conditions(path)
            _checked.add(path.parts[0])
        return _Lease(path)

    def folder_id(self, folder: PurePath) -> FolderId:
        return FolderId(str(folder), 0, 0)

    def _size(self, path: PurePath) -> int | None:
        """The bytes of a file; None if there is none."""
        key = _resolved(path)
        if key is None:
            return None
        if (size := _head(path, key)) is not None:
            return size
        segments = _segments(path, key)
        return segments.size if segments.keys else None

    def _rename_file(self, path: PurePath, target: PurePath) -> None:
        """Copy a small file, and delete the first."""
        key, new_key = _existing(path), _existing(target)
        _create(target, new_key, _get(path, key))
        _delete(path, key)

    def _unfinished(self, folder: PurePath, names: Sequence[str]) -> Sequence[str]:
        """The names of folders of checkpoints whose keys no COMMIT names. `names`: of folders of
        checkpoints."""
        committed = {pointer["keys"] for _, pointer in _pointers(folder)}
        found: Any = []
        for name in names:
            prefix = f"{_key(folder)}/{name}"
            below = _request(folder, methodcaller("list_with_delimiter", prefix))["common_prefixes"]
            parts = [PurePosixPath(prefix).name for prefix in below if prefix.rstrip("/") not in committed]
            found += [f".partial-{name}-{part}" for part in parts]
        return found

    def _may_be_written(self, path: PurePath, prefix: str) -> bool:
        """Whether an object of an unfinished checkpoint is so new that a process may still be writing to it,
        by the store's own dates. One with a manifest may be finished: a listing did not show its COMMIT, or a
        process that was suspended is about to create it."""
        items = _listed(path, prefix)
        age = ABANDONED if any(PurePosixPath(item["path"]).name == MANIFEST for item in items) else LEASE
        return bool(items) and _now(path) - max(item["last_modified"] for item in items) < age


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


class GoogleCloudPath(S3Path):
    storage = GoogleCloud()


class AzurePath(S3Path):
    storage = Azure()


PATHS: dict[str, type[PurePosixPath]] = {"s3": S3Path, "gs": GoogleCloudPath, "az": AzurePath}

_clients: dict[tuple[str, str], Any] = {}  # by scheme and bucket
_opened_in: list[int] = []  # the process that has opened them
_checked: set[str] = set()  # buckets that heed conditions
_tails: dict[str, Tail] = {}  # of the files that this process appends to
_silent_until: dict[str, float] = {}  # by bucket: the time until which nothing is appended


def _obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise ConfigError("a bucket needs obstore: pip install 'titanlite[cloud]'") from None
    return obstore


def _client(path: PurePath) -> Any:
    """obstore's client of the bucket of a path."""
    scheme, bucket = path.storage.name, path.parts[0]  # type: ignore[attr-defined]
    if _opened_in and _opened_in[0] != os.getpid():
        raise RuntimeError(
            f"{path} is used in a process that was forked after its parent had used a bucket, where obstore "
            "hangs: start the process by spawn or forkserver"
        )
    if (scheme, bucket) not in _clients:
        _obstore()
        from obstore.store import AzureStore, GCSStore, S3Store

        kinds: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        config = {"checksum_algorithm": "SHA256"} if scheme == "s3" else {}
        _opened_in[:] = [os.getpid()]
        with _errors(path):
            _clients[scheme, bucket] = kinds[scheme](
                bucket, config=config, client_options=CLIENT_OPTIONS, retry_config=RETRIES
            )
    return _clients[scheme, bucket]


def location(text: str) -> PurePath:
    """The path that a word of a command names: of the local disk, or a URL of a storage. Raises
    ConfigError."""
    return parse_path(expand_home(text))


def forget_clients() -> None:
    """Close all clients, so that the next one has the environment's credentials. For tests."""
    _clients.clear()
    _opened_in.clear()
    _checked.clear()
    _tails.clear()
    _silent_until.clear()


def _key(path: PurePath) -> str:
    """The key of a path as it is written, without its bucket."""
    return "/".join(path.parts[1:])


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
        raise _missing(path)
    return key


def _pointer(path: PurePath, key: str) -> dict[str, Any] | None:
    """The content of a COMMIT; None if there is none."""
    with suppress(FileNotFoundError):
        pointer: dict[str, Any] = json.loads(_get(path, key))
        return pointer
    return None


def _pointers(folder: PurePath) -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys and contents of all COMMITs in a folder and below."""
    for item in _listed(folder, _key(folder)):
        if item["path"].endswith(f"/{COMMIT}") and (pointer := _pointer(folder, item["path"])) is not None:
            yield item["path"], pointer


def _segments(path: PurePath, key: str) -> Segments:
    items = sorted(_listed(path, f"{key}{SEGMENTS}"), key=lambda item: item["path"])
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
            _create(path, _segment_key(key, tail), tail.data)
            return tail
        except FileExistsError:
            tail = tail._replace(number=tail.number + 1)


def _listed(path: PurePath, prefix: str) -> list[dict[str, Any]]:
    """Key, size and date of the objects below a prefix, in the bucket of `path`."""
    return _request(path, lambda client: [item for chunk in client.list(prefix) for item in chunk])


def _head(path: PurePath, key: str) -> int | None:
    """The bytes of an object; None if there is none."""
    try:
        return int(_request(path, lambda client: client.head(key)["size"]))
    except FileNotFoundError:
        return None


def _get(path: PurePath, key: str) -> bytes:
    return _request(path, lambda client: bytes(client.get(key).bytes()))


def _put(path: PurePath, key: str, data: bytes) -> None:
    _request(path, lambda client: client.put(key, data, use_multipart=False))


def _create(path: PurePath, key: str, data: bytes) -> None:
    """Create an object. Raises FileExistsError if there is another. After a lost answer, a repeated request
    finds the object that the first one has created."""
    try:
        _request(path, lambda client: client.put(key, data, mode="create", use_multipart=False))
    except FileExistsError:
        if _get(path, key) != data:
            raise


def _delete(path: PurePath, *keys: str) -> None:
    """Delete objects of the bucket of `path`. A missing one is an error of Azure and Google, not of S3."""
    try:
        _request(path, methodcaller("delete", list(keys)))
    except FileNotFoundError:
        for key in keys if len(keys) > 1 else ():
            _delete(path, key)


def _now(path: PurePath) -> datetime:
    """The time by the store's clock."""
    key = f"{path.parts[1]}/.clock-{uuid.uuid4().hex[:8]}"
    _put(path, key, b"")
    now: datetime = _request(path, lambda client: client.head(key)["last_modified"])
    _delete(path, key)
    return now


def _check_conditions(path: PurePath) -> None:
    """Raises OSError for a store that ignores conditions: two runs could commit one step there."""
    key = f"{_key(path.parent)}/.condition-{uuid.uuid4().hex[:8]}"
    _put(path, key, b"1")
    try:
        _request(path, lambda client: client.put(key, b"2", mode="create", use_multipart=False))
    except FileExistsError:
        return
    finally:
        _delete(path, key)
    raise OSError(
        errno.ENOTSUP, "this store ignores conditional writes (If-None-Match), which titanlite needs"
    )


def _missing(path: PurePath) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "there is no such object", str(path))


def _request(path: PurePath, act: Callable[[Any], T]) -> T:
    """The result of `act` for the client of the bucket of `path`. obstore itself repeats requests, but not
    one whose answer ends in its middle."""
    for pause_s in (0.1, 0.4, 1.6, 6.4, None):
        try:
            with _errors(path):
                return act(_client(path))
        except OSError as e:
            if pause_s is None or e.errno != errno.EREMOTEIO or "body error" not in str(e):
                raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _errors(path: PurePath) -> Iterator[None]:
    """Turns obstore's errors into OSErrors that name the path."""
    from obstore import exceptions

    kinds: list[tuple[type[Exception], int]] = [
        (exceptions.NotFoundError, errno.ENOENT),
        (FileNotFoundError, errno.ENOENT),  # which some versions raise instead
        (exceptions.AlreadyExistsError, errno.EEXIST),
        (exceptions.PreconditionError, errno.ESTALE),
        (exceptions.PermissionDeniedError, errno.EACCES),
        (exceptions.UnauthenticatedError, errno.EACCES),
        (Exception, errno.EREMOTEIO),
    ]
    try:
        yield
    except (exceptions.BaseError, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:  # ours, from a call inside
            raise
        number = next(number for kind, number in kinds if isinstance(e, kind))
        number = next((n for code, n in CODES.items() if re.search(code, str(e))), number)
        raise OSError(number, _reason(str(e)), str(path)) from None


def _reason(text: str) -> str:
    """The reason in the message of one of obstore's errors, which may also have a whole answer of the
    store. An answer may repeat the credentials, and a URL may hold some: neither is passed on."""
    status = re.search(r"status code: (\d+ [\w ]+)", text)
    code, message = (re.search(f"<{tag}>([^<\n]*)", text) for tag in ("Code", "Message"))
    if status:
        return ": ".join([status[1].strip(), *(match[1].strip() for match in (code, message) if match)])
    if re.search(ROLE, text):
        return "there are no credentials in the environment, and the machine has no role that gives some"
    text = re.sub(r"\?[^\s)]*", "", re.sub(r"//[^/\s]*@", "//", text))
    host, cause = re.search(r"//([^/\s]+)", text), re.search(r"HTTP error: (error sending[^\n]*)", text)
    if host and cause:
        message = re.search(r'message: "([^"]*)"', text)
        why = "no answer in time" if "kind: Timeout" in text else message[1] if message else cause[1]
        return f"{host[1]} does not answer: {why}"
    return " ".join(text.split("Debug source:")[0].split())[:300]


class _Ranges(io.RawIOBase):
    """An object that is read by requests for ranges."""

    def __init__(self, path: PurePath, key: str, size: int):
        self._path, self._key, self._size, self._at = path, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._range(min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._range(self._size)

    def _range(self, end: int) -> bytes:
        """The bytes from here to `end`, by parallel requests."""
        starts = range(self._at, end, READ_BYTES)
        if not starts:
            return b""
        ends = [min(start + READ_BYTES, end) for start in starts]
        options = {"starts": list(starts), "ends": ends, "coalesce": 0}
        ranges = _request(self._path, lambda client: client.get_ranges(self._key, **options))
        data = b"".join(map(bytes, ranges))
        if len(data) != end - self._at:
            problem = f"{len(data)} of {end - self._at} bytes came back"
            raise OSError(errno.EREMOTEIO, problem, str(self._path))
        self._at = end
        return data


class _NewObject:
    """An object that is written from one end to the other: by one request, or in parts."""

    def __init__(self, path: PurePath, key: str):
        self._path, self._key, self._data = path, key, io.BytesIO()
        self._writer: Any = None
        self._size = 0

    def write(self, data: bytes | memoryview, /) -> int:
        self._size += len(data)
        if self._writer is None:
            self._data.write(data)
            if self._data.tell() > SMALL_BYTES:
                self._begin_parts()
        else:
            with _errors(self._path):
                self._writer.write(bytes(data))  # obstore sends it later, and the caller may reuse its memory
        return len(data)

    def _begin_parts(self) -> None:
        if _head(self._path, self._key) is not None:
            raise FileExistsError(errno.EEXIST, "the object exists", str(self._path))
        with _errors(self._path):
            self._writer = _obstore().open_writer(
                _client(self._path), self._key, buffer_size=PART_BYTES, max_concurrency=PARTS
            )
            self._writer.write(self._data.getvalue())
        self._data = io.BytesIO()

    def flush(self) -> None:
        """Nothing to do: `close` returns when the store has everything."""

    def close(self) -> None:
        if self._writer is None:
            _create(self._path, self._key, self._data.getvalue())
            return
        try:
            with _errors(self._path):
                self._writer.close()
        except FileNotFoundError:  # as after a lost answer: the repeated request finds no upload in progress
            if _head(self._path, self._key) != self._size:
                raise

    def abort(self) -> None:
        self._writer = None


class _Lease(Lock):
    """An object that names its owner and that its owner replaces every RENEWAL_S seconds. An owner that has
    not replaced it for LEASE has lost it, and so has one whose process is known to have ended."""

    def __init__(self, path: PurePath):
        self._path, self._key = path, _key(path)
        self._token, self._text = uuid.uuid4().hex, ""
        self._version: Any = None
        self._renewed = time.monotonic()
        self._lost, self._ends = threading.Event(), threading.Event()
        self._mutex = threading.Lock()
        self._renewals: threading.Thread | None = None

    def try_take(self) -> bool:
        meta, content = self._read()
        if meta is not None and not self._is_free(meta, content):
            return False
        try:
            self._write("create" if meta is None else _version_of(meta))
        except OSError as e:
            if e.errno in (errno.EEXIST, errno.ESTALE):
                return False  # another process was faster
            raise
        self._finish_renames()
        self._renewals = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._renewals.start()
        return True

    def owner(self) -> str:
        return str(self._read()[1].get("text", ""))

    def write_owner(self, text: str) -> None:
        self._text = text
        with self._mutex:
            self._write(self._version)

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
            meta, content = _request(self._path, self._get)
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
        return bool(_now(self._path) - meta["last_modified"] > LEASE)

    def _write(self, mode: Any) -> None:
        """Replace the object under a condition. After a lost answer, a repeated request finds the object that
        the first one has written."""
        content = {"token": self._token, "text": self._text, "machine": _machine(), "pid": os.getpid()}
        data = json.dumps(content).encode()
        try:
            result = _request(
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

    def _renew(self) -> None:
        """Replace the object, or create it again if it was deleted. If another process has taken the lock
        since, it is lost."""
        try:
            with self._mutex:
                try:
                    self._write(self._version)
                except OSError as e:
                    if e.errno not in (errno.ESTALE, errno.ENOENT) or self._read()[0] is not None:
                        raise
                    self._write("create")
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
                _delete(self._path, before)


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
