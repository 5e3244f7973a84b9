"""How launchers find each other: what is said while they wait, and what ends the wait."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousHandlerRegistry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from titanlite.config.component import ConfigError
from titanlite.runtime import rendezvous
from titanlite.runtime.rendezvous import NotNeeded, NotReached, OneNode, SeveralNodes


@pytest.fixture(autouse=True)
def said_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SAY_AFTER_S", 0.1)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A program that takes connections and does not answer."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s


@pytest.fixture
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def parameters(endpoint: str, **config: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, "test", 2, 2, **config)


def node(path: Path, **config: Any) -> SeveralNodes:
    """One of two nodes that meet in a file."""
    values = parameters(str(path), store_type="file", **config)
    backend, store = create_backend(values)
    return SeveralNodes.at("first:29500", create_handler(store, backend, values))


def test_a_node_says_how_many_have_come_until_all_have(tmp_path: Path, capfd: Any) -> None:
    met: list[Any] = []
    nodes = [node(tmp_path / "store"), node(tmp_path / "store")]
    threads = [threading.Thread(target=lambda n=n: met.append(n.next_rendezvous().world_size)) for n in nodes]
    said = ""
    threads[0].start()
    until = time.monotonic() + 120
    while "1 of 2" not in said:
        assert time.monotonic() < until
        time.sleep(0.02)
        said += capfd.readouterr().err
    threads[1].start()
    for thread in threads:
        thread.join()
    assert met == [2, 2]
    assert "titanlite: waiting for nodes at first:29500: 1 of 2 have joined\n" in said
    for n in nodes:
        n.shutdown()


@pytest.mark.full
def test_enough_nodes_say_how_long_they_wait_for_more(tmp_path: Path, capfd: Any) -> None:
    values = RendezvousParameters("c10d", str(tmp_path / "store"), "test", 1, 2, store_type="file")
    values.config["last_call_timeout"] = 1
    backend, store = create_backend(values)
    first = SeveralNodes.at("first:29500", create_handler(store, backend, values))
    assert first.next_rendezvous().world_size == 1
    first.shutdown()
    text = "waiting for nodes at first:29500: 1 of 1 have joined; up to 2 may join within 1 s"
    assert capfd.readouterr().err.endswith(f"titanlite: {text}\n")


@pytest.mark.full
def test_the_wait_for_nodes_ends(tmp_path: Path) -> None:
    with pytest.raises(
        NotReached, match=r"^gave up after 1 s: not all of 2 nodes have joined at first:29500$"
    ):
        node(tmp_path / "store", join_timeout=1).next_rendezvous()


@pytest.mark.full
def test_a_node_that_comes_when_the_run_is_over(tmp_path: Path) -> None:
    node(tmp_path / "store").set_closed()
    with pytest.raises(NotReached, match=r"^the run at first:29500 has ended; ") as error:
        node(tmp_path / "store").next_rendezvous()
    assert error.value.exit_code == 1


def test_a_spare_node_that_a_run_did_not_need_is_no_failure(tmp_path: Path) -> None:
    nodes = [node(tmp_path / "store") for _ in range(3)]
    threads = [threading.Thread(target=n.next_rendezvous) for n in nodes[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = nodes[2]._state_holder
    spare: list[Exception] = []

    def wait() -> None:
        try:
            nodes[2].next_rendezvous()
        except Exception as error:
            spare.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until = time.monotonic() + 120
    while not state.state.redundancy_list:
        assert time.monotonic() < until
        time.sleep(0.02)
    nodes[0].shutdown()
    thread.join()
    assert [str(error) for error in spare] == [
        "the run at first:29500 has ended without this node; see the logs of the other nodes"
    ]
    assert (type(spare[0]), spare[0].exit_code) == (NotNeeded, 0)
    for n in nodes[1:]:
        n.shutdown()


def test_a_first_node_that_is_not_there(capfd: Any) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # and does not listen: no other program takes the port
        port = s.getsockname()[1]
        with pytest.raises(NotReached, match=f"^no launcher answers at 127.0.0.1:{port}; .*refused"):
            rendezvous.create(1, parameters(f"127.0.0.1:{port}", join_timeout=1))
    assert capfd.readouterr().err == f"titanlite: waiting for the first node's launcher at 127.0.0.1:{port}\n"


def test_another_program_at_the_first_nodes_port(listener: socket.socket, capfd: Any) -> None:
    endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(NotReached, match=r"is not the first node's launcher; choose another port$"):
        rendezvous.create(1, parameters(endpoint, join_timeout=1, read_timeout=1))
    listener.close()
    for thread in threading.enumerate():  # torch's own wait prints pages when it ends
        if thread.name == rendezvous.BACKEND:
            thread.join()
    assert f"waiting for the first node's launcher at {endpoint}\n" in capfd.readouterr().err


def test_the_first_node_whose_port_is_taken_says_so_at_once(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: this node cannot open port {port}: "):
        rendezvous.create(0, parameters(f"127.0.0.1:{port}"))


def test_the_first_node_opens_the_port_and_the_second_finds_it(free_port: int) -> None:
    """As torchrun asks for them."""
    met: list[int] = []
    made = []
    for number in range(2):
        registry = RendezvousHandlerRegistry()
        registry.register("titanlite", partial(rendezvous.create, number))
        host = {"is_host": number == 0}
        values = RendezvousParameters("titanlite", f"127.0.0.1:{free_port}", "test", 2, 2, **host)
        made.append(registry.create_handler(values))
    threads = [threading.Thread(target=lambda n=n: met.append(n.next_rendezvous().rank)) for n in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(met) == [0, 1]
    for handler in made:
        handler.shutdown()


def test_the_port_of_another_machine_is_not_this_ones_to_open(listener: socket.socket) -> None:
    rendezvous.check_port("192.0.2.1", listener.getsockname()[1])  # of no machine: reserved for documentation


@pytest.mark.parametrize("endpoint", ["host.invalid:1234", "host:port", "127.0.0.1:99999"])
def test_an_endpoint_that_cannot_be_used(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"^RDZV_ENDPOINT={re.escape(endpoint)}: .*; expected host:port of"):
        rendezvous.create(1, parameters(endpoint))


def test_one_node_waits_for_nobody_and_opens_no_port() -> None:
    handler = rendezvous.create(0, RendezvousParameters("titanlite", "localhost:0", "id", 1, 1))
    assert isinstance(handler, OneNode)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size, type(info.store).__name__) == (0, 1, "HashStore")
    assert (handler.get_run_id(), handler.use_agent_store, handler.num_nodes_waiting()) == ("id", False, 0)
