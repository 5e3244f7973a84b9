"""The rendezvous of several nodes, all in this process. Torch looks at the state once a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
)

from tests.support.ports import free_port
from titanlite.runtime import nodes
from titanlite.runtime.nodes import NODES, LeftRun, Nodes
from titanlite.runtime.slow_node import SlowNode

pytestmark = pytest.mark.full
SLOW = SlowNode(rank=1, own_s=2.0, median_s=1.0, num_slower=0)


class Cluster:
    """Nodes and their next rendezvous, in threads."""

    def __init__(self, pool: ThreadPoolExecutor, numbers: Sequence[int], count: int, **environment: Any):
        self._pool, endpoint = pool, f"localhost:{free_port()}"
        soon = {"keep_alive_interval": 1, "keep_alive_max_attempt": 4, "last_call_timeout": 2}

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


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
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
    monkeypatch.setattr(nodes, "TOO_FEW_S", 2.0)
    three = cluster([2, 3], 3)
    first, slow, lost = three.nodes
    assert places(three.meet()) == [(0, 3), (1, 3), (2, 3)]
    lost._c10d._stop_heartbeats()
    slow.slow = SLOW
    assert places(three.meet(first, slow)) == [(0, 2), (1, 2)]
    assert "; the node stays in the run: too few other nodes have come\n" in capfd.readouterr().err


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
