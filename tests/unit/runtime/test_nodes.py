"""The rendezvous of several nodes, all in this process. Torch looks at the state once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
)

from tests.support.ports import free_port
from titanlite.runtime import nodes as nodes_module
from titanlite.runtime.nodes import END_S, NODES, LeftRun, Nodes
from titanlite.runtime.signals import Stopped
from titanlite.runtime.slow_node import SlowNode
from titanlite.torch_compat import is_spare, leave_rendezvous, rendezvous_state

pytestmark = pytest.mark.full
SLOW = SlowNode(rank=1, own_s=2.0, median_s=1.0, num_slower=0)


class Cluster:
    """Nodes and their next rendezvous, in threads."""

    def __init__(self, pool: ThreadPoolExecutor, numbers: Sequence[int], count: int, **environment: Any):
        self._pool, endpoint = pool, f"localhost:{free_port()}"
        soon = {"keep_alive_interval": 1, "keep_alive_max_attempt": 8, "last_call_timeout": 4}

        def node(is_first: bool) -> Nodes:
            parameters = RendezvousParameters(
                NODES, endpoint, "run", min(numbers), max(numbers), is_host=is_first, **soon
            )
            made = Nodes(parameters)
            made.numbers, made.is_first, made.excludes_slow = numbers, is_first, True
            return made

        self.nodes = [node(number == 0) for number in range(count)]

    def meet(self, *nodes: Nodes) -> list[Future[RendezvousInfo]]:
        return [self._pool.submit(node.next_rendezvous) for node in nodes or self.nodes]

    def end(self, node: Nodes) -> Future[bool]:
        return self._pool.submit(node.shutdown)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as prepare_to_launch() does
    with ThreadPoolExecutor(8) as pool:
        made: list[Cluster] = []

        def cluster(numbers: Sequence[int], count: int) -> Cluster:
            made.append(Cluster(pool, numbers, count))
            return made[-1]

        yield cluster
        for one in made:
            for node in reversed(one.nodes):
                node._is_out = False
                node.shutdown()


def places(meeting: Sequence[Future[RendezvousInfo]], timeout_s: float = 60) -> list[tuple[int, int]]:
    """Rank and number of nodes of each node, in ascending order."""
    infos = [future.result(timeout_s) for future in meeting]
    return sorted((info.rank, info.world_size) for info in infos)


def test_a_slow_node_leaves_once_the_others_have_met(
    cluster: Callable[..., Cluster], capfd: pytest.CaptureFixture
) -> None:
    nodes = cluster([2, 3], 3)
    first, slow, other = nodes.nodes
    assert places(nodes.meet()) == [(0, 3), (1, 3), (2, 3)]
    slow.slow = SLOW
    rest = nodes.meet(first, other)
    (leaving,) = nodes.meet(slow)
    with pytest.raises(
        LeftRun, match=r"^rank 1 of this node is slow: .* 2.000 s, .* 1.000 s; the node leaves"
    ):
        leaving.result(60)
    assert places(rest) == [(0, 2), (1, 2)]
    slow.shutdown()
    assert not first.is_closed()


def test_a_slow_node_stays_if_another_one_is_lost(
    cluster: Callable[..., Cluster], capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first the lost node seems to be there."""
    monkeypatch.setattr(nodes_module, "TOO_FEW_S", 2.0)
    three = cluster([2, 3], 3)
    first, slow, lost = three.nodes
    assert places(three.meet()) == [(0, 3), (1, 3), (2, 3)]
    lost._c10d._stop_heartbeats()
    slow.slow = SLOW
    assert places(three.meet(first, slow)) == [(0, 2), (1, 2)]
    assert "; the node stays in the run: too few other nodes have come\n" in capfd.readouterr().err


def test_a_slow_node_whose_rank_fails_lets_the_others_begin_again(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster([2, 3], 3)
    first, slow, other = nodes.nodes
    assert places(nodes.meet()) == [(0, 3), (1, 3), (2, 3)]
    slow.slow = SLOW
    (leaving,) = nodes.meet(slow)
    wait_until(first.num_nodes_waiting)
    wait_until(other.num_nodes_waiting)
    rest = nodes.meet(first, other)
    with pytest.raises(LeftRun):
        leaving.result(60)
    assert places(rest) == [(0, 2), (1, 2)]
    wait_until(lambda: not first.num_nodes_waiting())


@pytest.mark.parametrize(
    ("number", "slow", "reason"),
    [
        (0, SLOW, "stays in the run: the other nodes meet at it"),
        (1, SLOW._replace(num_slower=1), "stays in the run: too few nodes would be left"),
    ],
)
def test_a_slow_node_that_stays_at_once(
    cluster: Callable[..., Cluster], capfd: pytest.CaptureFixture, number: int, slow: SlowNode, reason: str
) -> None:
    nodes = cluster([2, 3], 3)
    places(nodes.meet())
    nodes.nodes[number].slow = slow
    for _ in range(2):
        assert places(nodes.meet()) == [(0, 3), (1, 3), (2, 3)]
    assert capfd.readouterr().err.count(reason) == 1


# ---- nodes that wait


def wait_until(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_node_waits_until_one_that_trains_is_lost(
    cluster: Callable[..., Cluster], capfd: pytest.CaptureFixture
) -> None:
    nodes = cluster([1, 2, 4], 3)
    first, lost, _ = nodes.nodes
    *training, later = nodes.meet()
    assert places(training) == [(0, 2), (1, 2)]
    assert not later.done()
    lost._c10d._stop_heartbeats()
    assert places([*nodes.meet(first), later]) == [(0, 2), (1, 2)]
    joined = "3 nodes have joined, of which 2 train, because the job trains on 1, 2, 4 nodes only"
    said = capfd.readouterr().err
    assert f"titanlite: {joined}; the others wait until the nodes change\n" in said
    assert f"titanlite: this node waits: {joined}; it takes part when the nodes change\n" in said


def test_a_node_that_waits_goes_with_the_others(cluster: Callable[..., Cluster]) -> None:
    """They begin again, because a rank has failed or a fourth node joins."""
    nodes = cluster([2, 4], 4)
    first, second, _, fourth = nodes.nodes
    *training, later = nodes.meet(*nodes.nodes[:3])
    assert places(training) == [(0, 2), (1, 2)]
    again = nodes.meet(first, second)
    assert places(again) == [(0, 2), (1, 2)]
    assert not later.done()
    (joining,) = nodes.meet(fourth)
    wait_until(first.num_nodes_waiting)
    assert places([*nodes.meet(first, second), later, joining]) == [(n, 4) for n in range(4)]


def test_the_end_of_the_run_and_nodes_that_wait(cluster: Callable[..., Cluster]) -> None:
    """The first node, whose store they look at, ends after them: one that waits because the job cannot train
    on three nodes, and one that is spare."""
    nodes = cluster([1, 2], 4)
    for node in nodes.nodes:
        node._c10d._settings = replace(node._c10d._settings, max_nodes=3)
        node._c10d._op_executor._settings = node._c10d._settings
    first, second, *others = nodes.nodes
    *training, waiting = nodes.meet(*nodes.nodes[:3])
    assert places(training) == [(0, 2), (1, 2)]
    (spare,) = nodes.meet(others[1])
    wait_until(lambda: is_spare(others[1]._c10d))
    second.shutdown()
    began = time.monotonic()
    ending = nodes.end(first)
    for future, node in ((waiting, others[0]), (spare, others[1])):
        with pytest.raises(RendezvousGracefulExitError):
            future.result(10)
        assert not ending.done()
        assert nodes.end(node).result(10)
    assert ending.result(5)
    assert time.monotonic() - began < END_S


def test_a_node_that_joins_and_is_stopped_does_not_end_the_run(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster([2, 3], 3)
    first, second, joining = nodes.nodes
    assert places(nodes.meet(first, second)) == [(0, 2), (1, 2)]
    leave_rendezvous(joining._c10d, announce=True)  # as next_rendezvous() does until the others begin again
    wait_until(first.num_nodes_waiting)
    joining.shutdown()
    wait_until(lambda: not first.num_nodes_waiting())
    assert not first.is_closed()


def test_a_node_that_waits_and_is_stopped_does_not_end_the_run(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster([1, 2, 4], 3)
    first, _, waiting = nodes.nodes
    *training, later = nodes.meet()
    assert places(training) == [(0, 2), (1, 2)]
    stopped = patch.object(nodes_module, "rendezvous_state", side_effect=Stopped("by a signal"))
    with stopped, pytest.raises(Stopped):
        later.result(10)
    waiting.shutdown()
    wait_until(lambda: len(rendezvous_state(first._c10d).participants) == 2)
    assert not first.is_closed()
