"""Launchers, ranks and nodes that are told to stop or die, through ./run_train.sh and torchrun's agents:
which processes are restarted, which files are left behind, and that a restarted run equals an uninterrupted
one.

A run takes a dozen seconds, most of them for imports: of the launcher, and of each rank that starts anew.
torchrun's timeouts are shortened by PET_RDZV_CONF, from which it reads its options."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.jobs import make_job, metrics_of
from tests.support.launcher import SOON, Node
from tests.support.ports import free_port, is_loopback
from tests.support.runs import assert_same, train_on_rank
from tests.support.tiers import full
from titanlite.job import Job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STEPS = 8


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., Node]]:
    """`start(*arguments, folder=..., **environment)`: a Node that is closed at the end of the test."""
    nodes: list[Node] = []

    def one(*arguments: str, folder: Path = tmp_path, **environment: str) -> Node:
        nodes.append(Node(folder, corpus, arguments, environment))
        return nodes[-1]

    yield one
    for node in nodes:
        node.close()


def uninterrupted(folder: Path, corpus: Path, num_ranks: int) -> Job:
    """The run without a launcher."""
    ranks.run(num_ranks, train_on_rank, folder, corpus, [], "whole", num_ranks)
    return make_job(folder, corpus, world_size=num_ranks, name="whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    return uninterrupted(tmp_path_factory.mktemp("whole"), corpus, 2)


# ---- a launcher that is told to stop


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_launcher_that_is_told_to_stop_waits_for_the_save_and_restarts_nothing(
    start: Any, number: int
) -> None:
    """The commit takes three seconds; torchrun would kill the ranks after one (PET_SHUTDOWN_TIMEOUT)."""
    node = start(NGPU="2", MAX_RESTARTS="2", STEP_S="0.3", COMMIT_S="3", PET_SHUTDOWN_TIMEOUT="1")
    node.until(lambda: node.step >= 1)
    began = time.monotonic()
    node.launcher.send_signal(number)
    assert node.end() == 75, node.log
    assert not node.processes()
    assert time.monotonic() - began > 3
    assert node.saved == [node.step]
    assert node.step < STEPS
    assert node.starts == ["0 0", "1 0"]
    assert node.log.count("stopped after step") == 1
    assert "Traceback" not in node.log


@pytest.mark.full
def test_sigterm_while_the_ranks_are_starting_is_75_and_nothing_is_restarted(start: Any) -> None:
    node = start(MAX_RESTARTS="1", IMPORT_S="1")
    node.until(lambda: node.starts)
    node.launcher.terminate()
    assert node.end() == 75, node.log
    assert node.starts == ["0 0"]
    assert node.step == 0


@pytest.mark.full
def test_sigterm_while_waiting_for_the_other_nodes_is_75(start: Any) -> None:
    port = free_port()
    node = start(NNODES="2", RDZV_ENDPOINT=f"localhost:{port}")
    waiting = f"titanlite: waiting for 2 nodes at localhost:{port}\n"
    node.until(lambda: waiting in node.log or node.launcher.poll() is not None)
    assert waiting in node.log
    node.launcher.terminate()
    assert node.end(timeout_s=300) == 75, node.log


@pytest.mark.full
def test_sigterm_while_waiting_for_nodes_after_a_crash_is_75(start: Any) -> None:
    node = start(
        NNODES="1:2", RDZV_ENDPOINT=f"localhost:{free_port()}", MAX_RESTARTS="1", KILL="0 0 2",
        PET_RDZV_CONF=f"{SOON},last_call_timeout=2",
    )  # fmt: skip
    node.until(lambda: node.starts)
    node.until(lambda: not node.ranks())
    time.sleep(0.5)  # most likely it waits; if it does not yet, it must not start the ranks
    node.launcher.terminate()
    assert node.end() == 75, node.log
    assert node.starts == ["0 0"]


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_notice_saves_and_is_75(start: Any, tmp_path: Path, num_ranks: int) -> None:
    notice = tmp_path / "notice"
    node = start(NGPU=str(num_ranks), NOTICE=str(notice), STEP_S="2")
    node.until(lambda: node.step >= 1)
    notice.touch()
    assert node.end() == 75, node.log
    assert f"titanlite: --notice={notice}: this node will be taken away" in node.log
    assert node.saved[-1] == node.step
    assert node.step < STEPS


@pytest.mark.full
def test_ranks_that_do_not_save_within_the_grace_period_are_ended(start: Any) -> None:
    """The commit takes a minute; the launcher still returns 75, so that the scheduler runs the job again."""
    node = start(GRACE="6", STEP_S="0.3", COMMIT_S="60")
    node.until(lambda: node.step >= 1)
    began = time.monotonic()
    node.launcher.terminate()
    assert node.end() == 75, node.log
    assert 3 < time.monotonic() - began < 6 + 4, "before the node is killed, and not much earlier"
    assert "the grace period of 6 s ends, and the ranks have not saved" in node.log
    assert not node.processes()
    assert node.saved == []


# ---- kill -9


@pytest.mark.parametrize("num_ranks", [full(1), full(2)])
def test_a_killed_rank_is_restarted_and_the_run_equals_one_that_was_not(
    start: Any, tmp_path: Path, corpus: Path, num_ranks: int
) -> None:
    """No port is open to the network at any time, and only one rank reports."""
    sync = "--checkpoint.async_mode=disabled"  # else it depends on the disk whether step 4 is there by step 7
    last = num_ranks - 1
    node = start("--data.num_workers=1", sync, NGPU=str(num_ranks), MAX_RESTARTS="1", KILL=f"{last} 0 7")
    assert node.end() == 0, node.log
    assert node.starts == ["0 0", "0 1", "1 0", "1 1"][: 2 * num_ranks]
    assert f"resumed from {node.job.folder}/checkpoint/step-4\n" in node.log
    assert node.listened or num_ranks == 1, "the ranks meet somewhere"
    assert all(map(is_loopback, node.listened)), f"open to the network: {node.listened}"
    assert f"titanlite: rank {last} was ended by SIGKILL" in node.log
    assert "starting all ranks again (1 of 1)\n" in node.log
    assert not list(node.scratch.glob("titanlite-*")), "the launcher's folder is left"
    assert not list(node.scratch.glob("torchelastic*"))
    assert node.log.count("step 8/8") == 1
    assert [event["step"] for event in recoveries(node.job)] == [5]
    assert_same(node.job, uninterrupted(tmp_path, corpus, num_ranks))


@pytest.mark.full
def test_ranks_do_not_need_the_process_that_has_forked_them(start: Any) -> None:
    node = start(MAX_RESTARTS="1", KILL="0 0 5", STEP_S="0.3")
    node.until(lambda: node.step >= 1)
    os.kill(before := node.fork_server(), signal.SIGKILL)
    node.until(lambda: recoveries(node.job))
    assert "titanlite: the process that forks ranks was ended by SIGKILL; starting another" in node.log
    assert node.fork_server() != before
    assert node.end() == 0, node.log
    assert node.starts == ["0 0", "0 1"]
    assert not node.processes()


@pytest.mark.full
def test_a_restart_with_forked_ranks_takes_less_than_half_the_time_of_one_with_new_programs(
    start: Any, tmp_path: Path
) -> None:
    """Of the rest, the ranks' group, the data and the checkpoint take most."""

    def restart_s(name: str, **environment: str) -> float:
        (folder := tmp_path / name).mkdir()
        node = start("--checkpoint.interval=1", folder=folder, NGPU="2", MAX_RESTARTS="1", KILL="1 0 5",
                     STEP_S="0.2", **environment)  # fmt: skip
        assert node.end() == 0, node.log
        assert not node.processes()
        (event,) = recoveries(node.job)
        return event["seconds"]

    forked, new = restart_s("forked"), restart_s("new", SPAWN="1")
    print(
        f"from the failure to the next step: {forked:.1f} s with forked ranks, {new:.1f} s with new programs"
    )
    assert forked < new / 2


def recoveries(job: Job) -> list[dict[str, Any]]:
    """The events that tell how long restarts took."""
    events = map(json.loads, (job.folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "recovered"]


LAST_LINES = {
    "os._exit(0)": "rank 1 left with exit code 0 before training was done",
    "sys.exit(0)": "rank 1 ended with exit code 1: SystemExit: 0; its message is above",
    "SIGSTOP": "rank 1 did not end when told to; rank 0 ended with exit code 1: RuntimeError: ",
}


@pytest.mark.full
@pytest.mark.parametrize("how", LAST_LINES)
def test_the_rank_that_fails_or_leaves_first_is_blamed(start: Any, how: str) -> None:
    node = start("--comm.train_timeout_seconds=10", NGPU="2", KILL="1 0 3", HOW=how)
    assert node.end() == 1, node.log
    # The launcher does not wait for the other ranks, which may still print that they have got SIGTERM.
    lines = [line for line in node.log.splitlines() if not line.startswith("titanlite: SIGTERM: finishing")]
    assert lines[-1].startswith(f"titanlite: {LAST_LINES[how]}"), node.log


@pytest.mark.full
def test_a_killed_launcher_leaves_nothing_behind(start: Any) -> None:
    node = start("--data.num_workers=1", MAX_RESTARTS="1", STEP_S="1")
    node.until(lambda: node.step >= 1)
    assert len(node.ranks()) == 2, "a rank and its worker"
    assert len(node.processes()) == 4, "these, the launcher and its fork server"
    node.launcher.kill()
    node.until(lambda: not node.processes(), timeout_s=300)
    assert node.step < STEPS


@pytest.mark.full
def test_a_launcher_killed_while_the_ranks_are_starting_leaves_nothing_behind(start: Any) -> None:
    node = start(MAX_RESTARTS="1", IMPORT_S="1")
    node.until(lambda: node.starts)
    node.launcher.kill()
    node.until(lambda: not node.processes(), timeout_s=300)
    assert node.step == 0, "the rank trained on without its launcher"


# ---- nodes


def two_nodes(
    start: Any, nnodes: str, before: Callable[[Node], None] = lambda first: None
) -> tuple[Node, Callable[[], Node]]:
    """The first node, whose agent has the store, after the second node was killed behind a commit; and a
    function that starts the second node again. Nodes that come within 20 s of each other begin together.
    `before`: is called with the first node before the second one is killed."""
    common = {
        "NNODES": nnodes, "RDZV_ENDPOINT": f"localhost:{free_port()}", "MAX_RESTARTS": "3", "STEP_S": "0.4",
    }  # fmt: skip

    def node(number: int) -> Node:
        conf = f"{SOON},last_call_timeout=20,is_host={number == 0}"
        return start(NODE_RANK=str(number), PET_RDZV_CONF=conf, **common)

    first, second = node(0), node(1)
    first.until(lambda: first.saved)
    before(first)
    second.launcher.kill()
    first.until(lambda: not second.processes())
    assert worlds(first) == [2]
    assert first.launcher.poll() is None
    return first, lambda: node(1)


def worlds(node: Node) -> list[int]:
    """The number of ranks of each start."""
    return [int(size) for size in re.findall(r" (\d+) x [^:\n]+: ", node.log)]


@pytest.mark.full
def test_a_node_that_comes_back_is_waited_for(start: Any, whole: Job) -> None:
    first, again = two_nodes(start, "2")
    first.until(lambda: not first.ranks())
    second = again()
    assert first.end() == 0, first.log + second.log
    assert second.end() == 0, second.log
    assert worlds(first) == [2, 2]
    assert "resumed from" in first.log
    assert_same(first.job, whole)


@pytest.mark.full
def test_a_rank_that_cannot_end_holds_up_no_restart_after_a_lost_node(start: Any, whole: Job) -> None:
    """As one that waits in a kernel of NCCL for a rank of the lost node. torchrun gives it 30 s to end."""

    def stop_rank(first: Node) -> None:
        (rank,) = first.ranks_alone()
        os.kill(rank, signal.SIGSTOP)

    first, again = two_nodes(start, "2", stop_rank)
    second = again()
    assert first.end() == 0, first.log + second.log
    assert second.end() == 0, second.log
    (event,) = recoveries(first.job)
    assert event["seconds"] < 30
    assert_same(first.job, whole)


@pytest.mark.full
def test_the_other_node_goes_on_alone(start: Any, whole: Job) -> None:
    first, _ = two_nodes(start, "1:2")
    assert first.end() == 0, first.log
    assert worlds(first) == [2, 1]
    assert "resumed from" in first.log
    ours, theirs = metrics_of(first.job), metrics_of(whole)
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    assert [row["data/batch_sha"] for row in ours] == [row["data/batch_sha"] for row in theirs]
    for a, b in zip(ours, theirs):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("stopped", [0, 1])
def test_sigterm_to_one_node_saves_and_ends_all_with_75(start: Any, stopped: int) -> None:
    """As when Kubernetes evicts one of several pods: each of them must be started again."""
    common = {
        "NNODES": "2",
        "RDZV_ENDPOINT": f"localhost:{free_port()}",
        "MAX_RESTARTS": "3",
        "STEP_S": "0.4",
    }
    nodes = [
        start(NODE_RANK=str(number), PET_RDZV_CONF=f"is_host={number == 0}", **common) for number in (0, 1)
    ]
    nodes[0].until(lambda: nodes[0].step >= 1)
    nodes[stopped].launcher.terminate()
    assert [node.end() for node in nodes] == [75, 75], [node.log for node in nodes]
    assert nodes[0].saved == [nodes[0].step]
    assert nodes[0].step < STEPS
    assert nodes[0].starts == ["0 0", "1 0"]
