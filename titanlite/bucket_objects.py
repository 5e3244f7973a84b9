"""Objects in a bucket: requests to the store by obstore (extra `cloud`), whose errors are raised as OSErrors
that name the path.

A client of obstore hangs in a process that was forked after its parent used one. So only ranks, commands and
their spawned processes use a bucket, and a client is refused in a forked child of a process that has one.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from operator import methodcaller
from pathlib import PurePath
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from titanlite.config.component import ConfigError
from titanlite.log import tell

T = TypeVar("T")
SMALL_BYTES = 8 << 20  # files up to here are created by one request
PART_BYTES, PARTS = 16 << 20, 4  # of an upload in parts: so many of this size are in host memory per file
READ_BYTES = 8 << 20  # of a request for a range of a file that is read from one end to the other
# Where obstore asks for credentials of the machine's role.
ROLE = r"/latest/(api/token|meta-data/)|/computeMetadata/|/metadata/identity/"
CODES = {  # of messages; the kind of an error misleads, as of 403 for a full bucket and of refused lists
    r"QuotaExceeded|InsufficientStorage|status code: 507": errno.ENOSPC,
    rf"<Code>(ExpiredToken|InvalidToken|TokenRefreshRequired)<|status code: 40[13]|{ROLE}": errno.EACCES,
    r"NoSuchBucket|ContainerNotFound|specified bucket does not exist": errno.ENOTDIR,  # no missing file
}
REMEDIES = {
    errno.EACCES: "; check the credentials and the address of the store in the environment",
    errno.ENOTDIR: "; make the bucket, or correct its name",
}
CLIENT_OPTIONS = {"allow_http": True}
SAY_AFTER_S, SAY_AGAIN_S = 5.0, 60.0  # seconds of waiting after which it is told, and told again
PATIENCE_S = 20.0  # seconds for which training waits for a request that writes records
RETRIES = {"max_retries": 8, "retry_timeout": timedelta(seconds=120)}  # with exponential back-off and jitter

clients: dict[tuple[str, str], Any] = {}  # by scheme and bucket
opened_in: list[int] = []  # the process that has opened them
is_impatient: list[bool] = []  # not empty in the body of `impatient`
told_at: list[float] = []  # the time at which a wait was told last
checked: set[tuple[str, str]] = set()  # schemes and buckets that heed conditions


def load_obstore() -> Any:
    """The package obstore. Raises ConfigError if it is not installed."""
    try:
        import obstore
    except ImportError:
        raise ConfigError("a bucket needs obstore: pip install 'titanlite[cloud]'") from None
    return obstore


def client_of(path: PurePath) -> Any:
    """obstore's client of the bucket of a path."""
    scheme, bucket = path.storage.name, path.parts[0]  # type: ignore[attr-defined]
    if opened_in and opened_in[0] != os.getpid():
        raise RuntimeError(
            f"{path} is used in a process that was forked after its parent had used a bucket, where obstore "
            "hangs: start the process by spawn or forkserver"
        )
    if (scheme, bucket) not in clients:
        load_obstore()
        from obstore.store import AzureStore, GCSStore, S3Store

        kinds: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        config = {"checksum_algorithm": "SHA256"} if scheme == "s3" else {}
        opened_in[:] = [os.getpid()]
        with errors(path):
            clients[scheme, bucket] = kinds[scheme](
                bucket, config=config, client_options=CLIENT_OPTIONS, retry_config=RETRIES
            )
    return clients[scheme, bucket]


def key_of(path: PurePath) -> str:
    """The key of a path as it is written, without its bucket."""
    return "/".join(path.parts[1:])


def listed(path: PurePath, prefix: str) -> list[dict[str, Any]]:
    """Key, size and date of the objects below a prefix, in the bucket of `path`."""
    return request(path, lambda client: [item for chunk in client.list(prefix) for item in chunk])


def head(path: PurePath, key: str) -> int | None:
    """The bytes of an object; None if there is none."""
    try:
        return int(request(path, lambda client: client.head(key)["size"]))
    except FileNotFoundError:
        return None


def get(path: PurePath, key: str) -> bytes:
    return request(path, lambda client: bytes(client.get(key).bytes()))


def put(path: PurePath, key: str, data: bytes) -> None:
    request(path, lambda client: client.put(key, data, use_multipart=False))


def create(path: PurePath, key: str, data: bytes) -> None:
    """Create an object. Raises FileExistsError if there is another. After a lost answer, a repeated request
    finds the object that the first one has created."""
    try:
        request(path, lambda client: client.put(key, data, mode="create", use_multipart=False))
    except FileExistsError:
        if get(path, key) != data:
            raise


def delete(path: PurePath, *keys: str) -> None:
    """Delete objects of the bucket of `path`. A missing one is an error of Azure and Google, not of S3."""
    try:
        request(path, methodcaller("delete", list(keys)))
    except FileNotFoundError:
        for key in keys if len(keys) > 1 else ():
            delete(path, key)


def now(path: PurePath) -> datetime:
    """The time by the store's clock: the date of the empty object .clock beside `path`, which is replaced. It
    is not deleted, because another process may be about to read its date; it goes with its folder only."""
    key = f"{key_of(path.parent)}/.clock"
    while True:
        put(path, key, b"")
        with suppress(FileNotFoundError):  # another process has deleted the folder meanwhile
            date: datetime = request(path, lambda client: client.head(key)["last_modified"])
            return date


def check_conditions(path: PurePath) -> None:
    """Raises OSError for a store that ignores conditions: two runs could commit one step there."""
    key = f"{key_of(path.parent)}/.condition-{uuid.uuid4().hex[:8]}"
    put(path, key, b"1")
    try:
        request(path, lambda client: client.put(key, b"2", mode="create", use_multipart=False))
    except FileExistsError:
        return
    finally:
        delete(path, key)
    raise OSError(
        errno.ENOTSUP, "this store ignores conditional writes (If-None-Match), which titanlite needs"
    )


def missing(path: PurePath) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "there is no such object", str(path))


def request(path: PurePath, act: Callable[[Any], T]) -> T:
    """The result of `act` for the client of the bucket of `path`. On the main thread, signals are handled
    while it waits, which obstore does not do, and a wait of more than SAY_AFTER_S is told."""
    if threading.current_thread() is not threading.main_thread():
        return _request(path, act)
    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            answers.put((_request(path, act), None))
        except BaseException as e:  # raised again on the main thread
            answers.put((None, e))

    threading.Thread(target=work, name="request", daemon=True).start()
    try:
        result, error = _answer(answers, path)
    except Empty:
        raise OSError(errno.EREMOTEIO, f"no answer for {PATIENCE_S:.0f} s", str(path)) from None
    if error is not None:
        raise error
    return cast(T, result)


def _answer(answers: SimpleQueue[Any], path: PurePath) -> Any:
    """The next answer. Raises Empty if there is none in PATIENCE_S in the body of `impatient`."""
    with suppress(Empty):
        return answers.get(timeout=SAY_AFTER_S)
    if not told_at or time.monotonic() - told_at[0] > SAY_AGAIN_S:
        tell(f"{path}: no answer of the store for {SAY_AFTER_S:.0f} s; waiting for it")
        told_at[:] = [time.monotonic()]
    return answers.get(timeout=PATIENCE_S - SAY_AFTER_S if is_impatient else None)


@contextmanager
def impatient() -> Iterator[None]:
    """In the body, the main thread waits for a request at most PATIENCE_S. The request itself is repeated for
    up to two minutes more (RETRIES) and may still change the store in that time."""
    is_impatient.append(True)
    try:
        yield
    finally:
        is_impatient.pop()


def _request(path: PurePath, act: Callable[[Any], T]) -> T:
    """The result of `act`. obstore itself repeats requests, but not one whose answer ends in its middle."""
    for pause_s in (0.1, 0.4, 1.6, 6.4, None):
        try:
            with errors(path):
                return act(client_of(path))
        except OSError as e:
            if pause_s is None or e.errno != errno.EREMOTEIO or "body error" not in str(e):
                raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def errors(path: PurePath) -> Iterator[None]:
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
        remedy = REMEDIES.get(number, "")
        raise OSError(number, _reason(str(e)) + remedy, str(path)) from None
    except BaseException as e:  # a panic of Rust is no Exception
        if type(e).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"{path}: obstore stopped ({e}); an address of a store, such as AWS_ENDPOINT_URL, has to begin "
            "with http:// or https://"
        ) from None


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


class Ranges(io.RawIOBase):
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
        at = 0
        for data in self._ranges(min(self._at + len(buffer), self._size)):
            buffer[at : at + len(data)] = data  # not joined first: a block is in memory twice, not four times
            at += len(data)
        return at

    def readall(self) -> bytes:
        return b"".join(self._ranges(self._size))

    def _ranges(self, end: int) -> list[Any]:
        """The bytes from here to `end`, by parallel requests."""
        starts = range(self._at, end, READ_BYTES)
        if not starts:
            return []
        ends = [min(start + READ_BYTES, end) for start in starts]
        options = {"starts": list(starts), "ends": ends, "coalesce": 0}
        ranges = request(self._path, lambda client: client.get_ranges(self._key, **options))
        size = sum(map(len, ranges))
        if size != end - self._at:
            raise OSError(errno.EREMOTEIO, f"{size} of {end - self._at} bytes came back", str(self._path))
        self._at = end
        return list(ranges)


class NewObject:
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
            with errors(self._path):
                self._writer.write(bytes(data))  # obstore sends it later, and the caller may reuse its memory
        return len(data)

    def _begin_parts(self) -> None:
        if head(self._path, self._key) is not None:
            raise FileExistsError(errno.EEXIST, "the object exists", str(self._path))
        with errors(self._path):
            self._writer = load_obstore().open_writer(
                client_of(self._path), self._key, buffer_size=PART_BYTES, max_concurrency=PARTS
            )
            self._writer.write(self._data.getvalue())
        self._data = io.BytesIO()

    def flush(self) -> None:
        """Nothing to do: `close` returns when the store has everything."""

    def close(self) -> None:
        if self._writer is None:
            create(self._path, self._key, self._data.getvalue())
            return
        try:
            with errors(self._path):
                self._writer.close()
        except FileNotFoundError:  # as after a lost answer: the repeated request finds no upload in progress
            if head(self._path, self._key) != self._size:
                raise

    def abort(self) -> None:
        self._writer = None
