"""The probe for open ports sees what it has to see: a control for the tests that find none."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from tests.support.ports import is_loopback, listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(
    ("family", "address", "loopback"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "0.0.0.0", False),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::", False),
    ],
)
def test_a_listening_socket_is_seen(family: int, address: str, loopback: bool) -> None:
    with socket.socket(family) as s:
        try:
            s.bind((address, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        assert not listening([os.getpid()]) & {f"{address}:{s.getsockname()[1]}"}
        s.listen()
        assert f"{address}:{s.getsockname()[1]}" in listening([os.getpid()])
        assert is_loopback(f"{address}:1") == loopback
