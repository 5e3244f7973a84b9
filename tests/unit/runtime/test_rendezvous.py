"""How launchers find each other: what is said while they wait, and what ends the wait."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from titanlite.config.component import ConfigError
from titanlite.runtime import rendezvous
from titanlite.runtime.rendezvous import ONE_NODE, NotReached, OneNode, reach_first_node


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A port at which a program listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield f"127.0.0.1:{s.getsockname()[1]}"


def test_a_first_node_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "SAY_AFTER_S", 0.1)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # and does not listen: no other program takes the port
        port = s.getsockname()[1]
        with pytest.raises(NotReached, match=f"^no launcher answers at 127.0.0.1:{port}; .*refused") as error:
            reach_first_node(f"127.0.0.1:{port}", 1, timeout_s=1)
    assert error.value.exit_code == 1
    assert capfd.readouterr().err == f"titanlite: waiting for the first node's launcher at 127.0.0.1:{port}\n"


def test_the_first_node_opens_the_port_and_the_others_find_it(endpoint: str) -> None:
    reach_first_node(endpoint, 1)
    port = endpoint.partition(":")[2]
    with pytest.raises(ConfigError, match=f"{endpoint}: this node cannot open port {port}: "):
        reach_first_node(endpoint, 0)
    reach_first_node(f"192.0.2.1:{port}", 0)  # of no machine: reserved for documentation


@pytest.mark.parametrize(
    ("endpoint", "node_rank"),
    [
        ("host:port", 1),
        ("127.0.0.1:99999", 1),
        ("node..example:1234", 1),
        ("host.invalid:1234", 0),  # the first node's own name
    ],
)
def test_an_endpoint_that_cannot_be_used(endpoint: str, node_rank: int) -> None:
    with pytest.raises(ConfigError, match=f"^RDZV_ENDPOINT={re.escape(endpoint)}: .*; expected host:port of"):
        reach_first_node(endpoint, node_rank)


def test_a_name_that_does_not_resolve() -> None:
    text = r"^host.invalid, the host of host.invalid:1234, does not resolve to an address \(.+\)$"
    with pytest.raises(NotReached, match=text):
        reach_first_node("host.invalid:1234", 1, timeout_s=0.3)


def test_a_name_that_resolves_later(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the name of a pod of Kubernetes does some seconds after the pod has started."""
    asked, resolve = [], socket.getaddrinfo

    def later(host: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    reach_first_node(f"node0.invalid:{endpoint.partition(':')[2]}", 1)
    assert asked == ["node0.invalid"] * 3


def test_one_node_waits_for_nobody_and_opens_no_port() -> None:
    rendezvous.register_one_node()
    parameters = RendezvousParameters(ONE_NODE, "localhost:0", "id", 1, 1)
    handler = rendezvous_handler_registry.create_handler(parameters)
    assert isinstance(handler, OneNode)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size, type(info.store).__name__) == (0, 1, "HashStore")
    assert (handler.get_run_id(), handler.use_agent_store, handler.num_nodes_waiting()) == ("id", False, 0)
