"""TCP ports: free ones, and those on which processes listen, from /proc."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def listening(pids: Iterable[int]) -> set[str]:
    """`address:port` of every socket on which one of the processes listens now."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # it is closed
                    link = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if link.startswith("socket:["):
                        inodes.add(link[len("socket:[") : -1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                addresses.add(_readable(fields[1]))
    return addresses


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to the address."""
    host = ipaddress.ip_address(address.rpartition(":")[0])
    return (getattr(host, "ipv4_mapped", None) or host).is_loopback


def _readable(text: str) -> str:
    """An address in the kernel's form, words in the machine's byte order and hexadecimal, as text. For x86
    and ARM."""
    host, _, port = text.partition(":")
    words = bytes.fromhex(host)
    swapped = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return f"{ipaddress.ip_address(swapped)}:{int(port, 16)}"
