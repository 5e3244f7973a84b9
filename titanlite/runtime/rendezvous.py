"""Rendezvous: the launchers of all nodes find each other.

A single node opens no port. Several nodes meet at the address of the first node through torch's c10d
rendezvous. Before they do, this module checks the address, because torch's own wait for a node that does not
answer prints pages and reacts to no signal."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from titanlite.config.component import ConfigError
from titanlite.log import tell

ONE_NODE = "titanlite"  # torchrun's name for the rendezvous of a single node
DEFAULT_PORT = 29400  # as torchrun
SAY_AFTER_S = 5.0  # seconds of waiting after which it is logged
JOIN_TIMEOUT_S = 600  # seconds that nodes wait for each other, as torchrun


class NotReached(RuntimeError):
    """This node could not join the run."""

    exit_code = 1


class OneNode(RendezvousHandler):
    """The rendezvous of a single node, which waits for nobody and opens no port. Its store is in the
    launcher's memory; the ranks meet over another store."""

    use_agent_store = False

    def __init__(self, parameters: RendezvousParameters):
        self._run_id = parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """The rendezvous of this node alone."""
        store = dist.HashStore()  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def get_backend(self) -> str:
        """The name under which the rendezvous is registered."""
        return ONE_NODE

    def get_run_id(self) -> str:
        """The id of the run that torchrun was given."""
        return self._run_id

    def is_closed(self) -> bool:
        """A single node never closes its rendezvous."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """No other node exists."""
        return 0

    def shutdown(self) -> bool:
        """Nothing to close."""
        return True


def register_one_node() -> None:
    """Make `--rdzv-backend=titanlite` known to torchrun."""
    rendezvous_handler_registry.register(ONE_NODE, OneNode)


def reach_first_node(endpoint: str, node_rank: int, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """On the first node, check that its port is free; on the others, wait until the first node listens, whose
    name may not resolve before it has started. Raises ConfigError for an endpoint that cannot be used,
    NotReached if the first node does not answer."""
    try:
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        host.encode("idna")  # as socket does, which would raise the same error
        if node_rank == 0:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        text = f"RDZV_ENDPOINT={endpoint}: {error}; expected host:port of the first node"
        raise ConfigError(text) from error
    if node_rank == 0:
        check_port(host, port)
        return
    with told_when_long(f"waiting for the first node's launcher at {endpoint}"):
        missing = f"no launcher answers at {host}:{port}; is the first node's launcher running?"
        wait_for(host, port, timeout_s, missing)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if `host` is this machine and the port is in use."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:  # other error numbers: the address is another machine's
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise ConfigError(
                        f"RDZV_ENDPOINT={host}:{port}: this node cannot open port {port}: {error.strerror}; "
                        "choose another port on all nodes; on other nodes than the first, set NODE_RANK"
                    ) from error


def wait_for(host: str, port: int, timeout_s: float, missing: str) -> None:
    """Wait until `host` resolves, and a program listens at the port. Raises NotReached, with the text
    `missing` if the host resolves."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > until:
                if isinstance(error, socket.gaierror):
                    missing = f"{host}, the host of {host}:{port}, does not resolve to an address"
                raise NotReached(f"{missing} ({error})") from error
            time.sleep(0.2)
        else:
            return


@contextmanager
def told_when_long(text: str) -> Iterator[None]:
    """Print `text` if the body takes longer than SAY_AFTER_S."""
    timer = Timer(SAY_AFTER_S, tell, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
