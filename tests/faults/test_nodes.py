"""Runs on several nodes, of which some wait, take the place of others, or leave because they are slow. The
weights equal those of a run on the same number of ranks that was never interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.jobs import make_job
from tests.support.launcher import SOON, Node
from tests.support.ports import free_port
from tests.support.runs import assert_same, train_on_rank
from titanlite.job import Job

pytestmark = [pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
STEPS = 12
LENGTH = (f"--training.steps={STEPS}", f"--lr_scheduler.total_steps={STEPS}")
JOB = (*LENGTH, "--training.local_batch_size=2")  # 8 sequences per step, on 1, 2 or 4 ranks
ENDED = "has ended without this node; see the logs of the other nodes\n"


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., Node]]:
    """`start(number, **environment)`: a node of one rank, which is closed at the end."""
    nodes: list[Node] = []
    common = {"RDZV_ENDPOINT": f"localhost:{free_port()}", "MAX_RESTARTS": "3", "STEP_S": "0.2"}

    def one(number: int, **environment: str) -> Node:
        conf = f"{SOON},last_call_timeout=10,is_host={number == 0}"
        own = {"NODE_RANK": str(number), "PET_RDZV_CONF": conf}
        nodes.append(Node(tmp_path, corpus, JOB, common | own | environment))
        return nodes[-1]

    yield one
    for node in nodes:
        node.close()


def uninterrupted(folder: Path, corpus: Path, num_ranks: int) -> Job:
    """The run without a launcher."""
    ranks.run(num_ranks, train_on_rank, folder, corpus, list(JOB), "whole", num_ranks)
    return make_job(folder, corpus, *JOB, world_size=num_ranks, name="whole")


def logs(nodes: list[Node]) -> str:
    return "\n----\n".join(node.log for node in nodes)


# ---- nodes that wait

WAITS = "titanlite: this node waits: "


def three_nodes(start: Any, gate: Path, nnodes: str) -> tuple[list[Node], Node, Node]:
    """Three nodes, of which two train, and stop at the sixth step until the file `gate` is there; the node
    that waits; and the node that trains besides the first. The batch does not divide over three nodes."""
    environment = {"NNODES": nnodes, "KILL": "1 0 6", "HOW": "go on", "AFTER": str(gate)}
    nodes = [start(0, **environment)]
    nodes[0].until(lambda: "waiting for" in nodes[0].log)  # its name is the first in torch's order
    nodes += [start(number, **environment) for number in (1, 2)]
    nodes[0].until(lambda: nodes[0].step >= 5 and WAITS in logs(nodes))
    (waiting,) = [node for node in nodes if WAITS in node.log]
    (other,) = [node for node in nodes[1:] if node is not waiting]
    return nodes, waiting, other


@pytest.mark.parametrize("nnodes", ["2:4", "2:3"])
def test_a_node_that_waits_takes_the_place_of_a_lost_one(
    start: Any, tmp_path: Path, corpus: Path, nnodes: str
) -> None:
    """With 2:4, torch's rendezvous has three nodes; with 2:3, it has two and a spare one."""
    nodes, waiting, lost = three_nodes(start, tmp_path / "gate", nnodes)
    assert not waiting.ranks()
    assert " nodes only: 8 sequences are not a multiple of local_batch_size 2 x 3 ranks " in nodes[0].log
    assert ("3 nodes have joined, of which 2 train, " in waiting.log) == (nnodes == "2:4")
    lost.close()
    (tmp_path / "gate").touch()
    assert [nodes[0].end(), waiting.end()] == [0, 0], logs(nodes)
    assert ENDED not in logs(nodes)
    assert_same(nodes[0].job, uninterrupted(tmp_path, corpus, 2))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_node_that_waits_ends_with_the_run_or_is_stopped_alone(
    start: Any, tmp_path: Path, corpus: Path, stopped: bool
) -> None:
    nodes, waiting, other = three_nodes(start, tmp_path / "gate", "2:4")
    if stopped:
        waiting.launcher.terminate()
        assert waiting.end() == 75, waiting.log
    (tmp_path / "gate").touch()
    assert [nodes[0].end(), other.end()] == [0, 0], logs(nodes)
    assert waiting.end() == (75 if stopped else 0), waiting.log
    assert (ENDED in waiting.log) != stopped
    assert_same(nodes[0].job, uninterrupted(tmp_path, corpus, 2))


# ---- slow nodes

SLOW = "is slow: without waiting for other ranks, its steps take "
SPARE = "titanlite: this node waits: enough nodes train; it takes part when one is lost\n"


def with_a_slow_node(start: Any, folder: Path, spare: bool, option: str) -> list[Node]:
    """Two nodes and perhaps a spare one. The second is slow; once it was named, and the spare node waits, the
    rank of the first is killed."""
    environment, gate = {"NNODES": "2", "EXCLUDE_SLOW": option}, folder / "gate"
    nodes = [start(0, **environment, KILL="0 0 6", AFTER=str(gate)), start(1, **environment, STEP_S="1.2")]
    nodes[0].until(lambda: SLOW in nodes[0].log + nodes[1].log)
    if spare:
        nodes.append(start(2, **environment))
        nodes[2].until(lambda: SPARE in nodes[2].log)
    gate.touch()
    return nodes


def test_a_slow_node_leaves_and_a_spare_one_takes_its_place(start: Any, tmp_path: Path, corpus: Path) -> None:
    first, slow, spare = nodes = with_a_slow_node(start, tmp_path, spare=True, option="1")
    assert slow.end() == 0, logs(nodes)
    assert "; the node leaves the run, and the other nodes go on\n" in slow.log, logs(nodes)
    assert first.launcher.poll() is None
    assert [first.end(), spare.end()] == [0, 0], logs(nodes)
    assert ENDED not in logs(nodes)
    assert_same(first.job, uninterrupted(tmp_path, corpus, 2))


@pytest.mark.parametrize(("spare", "option"), [(True, "0"), (False, "1")])
def test_a_slow_node_stays_without_the_option_or_a_spare_node(
    start: Any, tmp_path: Path, corpus: Path, spare: bool, option: str
) -> None:
    nodes = with_a_slow_node(start, tmp_path, spare, option)
    assert [node.end() for node in nodes] == [0] * len(nodes), logs(nodes)
    assert "leaves the run" not in logs(nodes)
    assert ("; the node stays in the run: too few nodes would be left\n" in nodes[1].log) == (option == "1")
    # torch takes the first nodes that come to a restart, so that any of them may be the spare one.
    assert logs(nodes).count(ENDED) == spare, logs(nodes)
    assert_same(nodes[0].job, uninterrupted(tmp_path, corpus, 2))
