"""Ranks, launchers and nodes that are lost between two saves, while the memory of the nodes holds copies of
the state: the run resumes from the newest copy that is left, and equals one that was never interrupted."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.checkpoints import flip_a_shard
from tests.support.jobs import make_job
from tests.support.launcher import SOON, Node
from tests.support.ports import free_port
from tests.support.runs import assert_same, train_on_rank
from titanlite.job import Job

pytestmark = [pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="needs shared memory")]
# Steps 1 to 8, of which 4 and 8 are saved and 2 and 6 are copied. A save ends before the next step.
COPIES = ("--checkpoint.memory_interval=2", "--checkpoint.async_mode=disabled", "--data.num_workers=0")
FOUR_RANKS = ("--training.local_batch_size=2",)


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., Node]]:
    """`start(*arguments, **environment)`: a Node with copies in memory, which is closed at the end."""
    nodes: list[Node] = []

    def one(*arguments: str, **environment: str) -> Node:
        nodes.append(Node(tmp_path, corpus, (*COPIES, *arguments), environment))
        return nodes[-1]

    yield one
    for node in nodes:
        node.close()


def uninterrupted(folder: Path, corpus: Path, num_ranks: int, *arguments: str) -> Job:
    """The run without a launcher and without copies."""
    ranks.run(num_ranks, train_on_rank, folder, corpus, list(arguments), "whole", num_ranks)
    return make_job(folder, corpus, *arguments, world_size=num_ranks, name="whole")


def after(step: int, folder: Path, node: int = 0) -> str:
    return str(folder / f"memory-{node}/titanlite-*/step-{step}")


def resumed(job: Job) -> list[int]:
    """The steps from which later starts of the run have resumed."""
    events = map(json.loads, (job.folder / "events.jsonl").read_text().splitlines())
    return [event["step"] for event in events if event["event"] == "resumed"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_rank(start: Any, tmp_path: Path, corpus: Path, num_ranks: int) -> None:
    last = num_ranks - 1
    node = start(NGPU=str(num_ranks), MAX_RESTARTS="1", KILL=f"{last} 0 8", AFTER=after(6, tmp_path))
    assert node.end() == 0, node.log
    copy = "resuming from the copy in memory of step 6; the newest checkpoint on disk is step 4\n"
    assert copy in node.log
    assert node.saved == [4, 8]
    assert resumed(node.job) == [6]
    assert not list(node.memory.iterdir()), "shared memory is left after the end"
    assert_same(node.job, uninterrupted(tmp_path, corpus, num_ranks))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_launcher(start: Any, tmp_path: Path, corpus: Path, damaged: bool) -> None:
    """The same command, started again on the node, resumes from the copy unless a byte of it has changed."""
    node = start(NGPU="2", MAX_RESTARTS="1", KILL="1 0 8", HOW="SIGSTOP", AFTER=after(6, tmp_path))
    node.until(lambda: 6 in node.copied and node.step == 7)  # the copy before may still be there
    node.close()
    if damaged:
        flip_a_shard(next(node.memory.glob("*/step-6")))
    node = start(NGPU="2", MAX_RESTARTS="1")
    assert node.end() == 0, node.log
    lost = "the copy in memory of step 6 is lost; the newest checkpoint on disk is step 4"
    assert (lost in node.log) == damaged
    assert f"the logged steps {5 if damaged else 7} to 7 are trained again" in node.log
    assert resumed(node.job) == [4 if damaged else 6]
    assert not list(node.memory.iterdir())
    assert_same(node.job, uninterrupted(tmp_path, corpus, 2))


def test_a_crash_without_restarts_leaves_the_copies_and_a_stop_does_not(start: Any, tmp_path: Path) -> None:
    steps = "--training.steps=12"
    node = start(steps, NGPU="2", KILL="1 0 8", AFTER=after(6, tmp_path))
    assert node.end() == 1, node.log
    assert 6 in node.copied
    node = start(steps, NGPU="2", STEP_S="2")
    node.until(lambda: resumed(node.job) and node.step > 6)
    node.launcher.send_signal(signal.SIGTERM)
    assert node.end() == 75, node.log
    assert resumed(node.job) == [6]
    assert 6 < node.saved[-1] < 12
    assert not list(node.memory.iterdir())


@pytest.mark.parametrize("lost", [[1], [0, 1]], ids=["one node", "all nodes"])
def test_lost_nodes(start: Any, tmp_path: Path, corpus: Path, lost: list[int]) -> None:
    """Two nodes of two ranks. The second is lost with its memory after a copy, or the memory of both is."""
    common = {"NNODES": "2", "RDZV_ENDPOINT": f"localhost:{free_port()}", "MAX_RESTARTS": "3", "NGPU": "2"}

    def node(number: int, **environment: str) -> Node:
        conf = f"{SOON},last_call_timeout=20,is_host={number == 0}"
        own = {"NODE_RANK": str(number), "PET_RDZV_CONF": conf}
        return start(*FOUR_RANKS, **common, **own, **environment)

    kill = {"KILL": "3 0 8", "HOW": "SIGSTOP", "AFTER": after(6, tmp_path, 1)}
    nodes = [node(0, **kill), node(1, **kill)]
    nodes[0].until(lambda: all(6 in n.copied for n in nodes) and nodes[0].step == 7)
    for number in [1] if lost == [1] else [0, 1]:
        nodes[number].close()
    for number in lost:
        shutil.rmtree(nodes[number].memory)
    for number in lost:
        nodes[number] = node(number)
    assert [n.end() for n in nodes] == [0, 0], nodes[0].log + nodes[1].log
    assert resumed(nodes[0].job) == [6 if lost == [1] else 4]
    assert not any(list(n.memory.iterdir()) for n in nodes)
    assert_same(nodes[0].job, uninterrupted(tmp_path, corpus, 4, *FOUR_RANKS))
