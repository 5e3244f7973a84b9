"""Rendezvous: the launchers of all nodes find each other.

A single node opens no port. Several nodes meet at the address of the first node through torch's c10d
rendezvous, and log what they wait for."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # not the built-in one before Python 3.11
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from titanlite.config.component import ConfigError
from titanlite.log import tell

BACKEND = "titanlite"
DEFAULT_PORT = 29400  # as torchrun
SAY_AFTER_S = 5.0  # seconds of waiting after which it is logged, and logged again when it changes
JOIN_TIMEOUT_S = 600  # seconds that nodes wait for each other, as torchrun


class NotReached(RuntimeError):
    """This node could not join the run."""

    exit_code = 1


class NotNeeded(NotReached):
    """The run continued without this node, and has ended."""

    exit_code = 0


class OneNode(RendezvousHandler):
    """The rendezvous of a single node, which waits for nobody and opens no port. Its store is in the
    launcher's memory; the ranks have a store of their own."""

    use_agent_store = False

    def __init__(self, run_id: str):
        self._run_id = run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """The rendezvous of this node alone."""
        store = dist.HashStore()  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def get_backend(self) -> str:
        """The name under which the rendezvous is registered."""
        return BACKEND

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


class SeveralNodes(DynamicRendezvousHandler):
    """torch's rendezvous of several nodes, which logs what it waits for."""

    _endpoint = ""

    @classmethod
    def at(cls, endpoint: str, handler: DynamicRendezvousHandler) -> SeveralNodes:
        """Turn torch's handler, which meets at `endpoint`, into this class."""
        handler.__class__ = cls
        assert isinstance(handler, cls)
        handler._endpoint = endpoint
        return handler

    def get_backend(self) -> str:
        """The name under which the rendezvous is registered."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes. Raises NotReached if they do not come."""
        wanted, most = self.settings.min_nodes, self.settings.max_nodes
        more = f"; up to {most} may join within {self.settings.timeout.last_call.total_seconds():.0f} s"

        def waiting() -> str:  # torch does not publish the number of nodes: it is read from the private state
            joined = len(self._state_holder.state.participants)
            text = f"waiting for nodes at {self._endpoint}: {joined} of {wanted} have joined"
            return text + more if wanted <= joined < most else text

        with logged_when_long(waiting):
            try:
                return super().next_rendezvous()
            except RendezvousTimeoutError as error:
                waited = f"{self.settings.timeout.join.total_seconds():.0f} s"
                text = f"gave up after {waited}: not all of {wanted} nodes have joined at {self._endpoint}"
                raise NotReached(text) from error
            except RendezvousClosedError as error:
                text = f"the run at {self._endpoint} has ended; start all launchers again for another"
                raise NotReached(text) from error
            except RendezvousGracefulExitError as error:
                text = (
                    f"the run at {self._endpoint} has ended without this node; see the logs of the "
                    "other nodes"
                )
                raise NotNeeded(text) from error


def register(node_rank: int) -> None:
    """Make `--rdzv-backend=titanlite` known to torchrun."""
    rendezvous_handler_registry.register(BACKEND, partial(create, node_rank))


def create(node_rank: int, parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous for `parameters`, called by torchrun. Raises ConfigError for an endpoint that cannot be
    used, NotReached if the first node does not answer."""
    if parameters.max_nodes == 1:
        return OneNode(parameters.run_id)
    endpoint, timeout_s = parameters.endpoint, _timeout_s(parameters)
    text = f"waiting for the first node's launcher at {endpoint}"
    with logged_when_long(lambda: text):
        host, port = _read_endpoint(endpoint)
        if node_rank == 0:
            check_port(host, port)
        else:
            missing = f"no launcher answers at {host}:{port}; is the first node's launcher running?"
            wait_for(host, port, timeout_s, missing)
        # In a thread: neither a signal nor a timeout ends torch's wait if another program listens at the
        # port.
        made: Future[tuple[Any, Any]] = Future()
        Thread(
            target=lambda: _fulfil(made, partial(create_backend, parameters)), name=BACKEND, daemon=True
        ).start()
        try:
            backend, store = made.result(timeout_s)
        except FutureTimeout:
            raise NotReached(
                f"the program that listens at {endpoint} is not the first node's launcher; choose another "
                "port"
            ) from None
    return SeveralNodes.at(endpoint, create_handler(store, backend, parameters))


def _timeout_s(parameters: RendezvousParameters) -> int:
    return parameters.get_as_int("join_timeout") or JOIN_TIMEOUT_S


def _fulfil(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _read_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `endpoint`. Raises ConfigError if it has none, or the host is unknown."""
    try:
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"RDZV_ENDPOINT={endpoint}: {error}; expected host:port of the first node"
        ) from error
    return host, port


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
    """Wait until a program listens at the port. torch's own wait prints pages and reacts to no signal. Raises
    NotReached with the text `missing`."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > until:
                raise NotReached(f"{missing} ({error})") from error
            time.sleep(0.2)
        else:
            return


@contextmanager
def logged_when_long(text: Callable[[], str], after_s: float | None = None) -> Iterator[None]:
    """Print `text()` if the body takes longer than `after_s`, and again when it changes."""
    interval, done = SAY_AFTER_S if after_s is None else after_s, Event()

    def say() -> None:
        last = ""
        while not done.wait(interval):
            now = text()
            if now != last:
                tell(now)
            last = now

    thread = Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
