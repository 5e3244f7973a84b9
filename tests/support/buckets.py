"""Buckets on a server of this machine: moto's S3, in this process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

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
