"""The launcher as a command, and the messages with which it ends when nodes do not meet."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils import macros

from titanlite.runtime import launcher, rendezvous

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_while_the_launcher_imports() -> None:
    command = [sys.executable, "-m", "titanlite.cli", "launch", "--nproc-per-node=2", "debug"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        until = time.monotonic() + 60
        while signal.SIGTERM not in handled_by(process.pid):
            assert time.monotonic() < until, "the launcher does not handle the signal"
            time.sleep(0.05)
        process.terminate()
        error = process.communicate()[1]
    assert process.returncode == 75
    assert error == "titanlite: stopped by SIGTERM before the first step; nothing is lost\n"


def handled_by(pid: int) -> set[int]:
    """The signals for which a process has handlers."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {number for number in signal.valid_signals() if int(status["SigCgt"], 16) >> (number - 1) & 1}


def options(num_nodes: int) -> argparse.Namespace:
    return argparse.Namespace(
        nproc_per_node=1, nnodes=str(num_nodes), max_nodes=num_nodes, max_restarts=0, node_rank=0, grace=None,
        rdzv_endpoint="first:29500" if num_nodes > 1 else "", rdzv_id="", node_numbers=[num_nodes],
        exclude_slow=False,
    )  # fmt: skip


def test_words_reach_the_ranks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "a $$ ${local_rank} $x"]  # torchrun replaces variables
    given: list[argparse.Namespace] = []
    monkeypatch.setattr(torchrun, "run", given.append)
    assert launcher.start_ranks(options(1), words) == 0
    (arguments,) = given
    command = [arguments.training_script, *arguments.training_script_args]
    assert macros.substitute(command, "0") == [sys.executable, "-u", "-m", "titanlite.cli", *words]
    assert (arguments.rdzv_backend, len(arguments.rdzv_id)) == ("titanlite", 16)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RendezvousTimeoutError, 1, "gave up: not all of 2 nodes have joined at first:29500"),
        (RendezvousClosedError, 1, "the run at first:29500 has ended; start all launchers again for another"),
        (
            RendezvousGracefulExitError,
            0,
            "the run at first:29500 has ended without this node; see the logs of the other nodes",
        ),
        (
            RendezvousConnectionError,
            1,
            "cannot connect to first:29500: is the program that listens there the first node's launcher?",
        ),
    ],
)
def test_nodes_that_do_not_meet(
    error: type[Exception],
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    def run(arguments: argparse.Namespace) -> None:
        assert arguments.rdzv_backend == "titanlite-nodes"
        raise error

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(rendezvous, "reach_first_node", lambda *words: None)
    assert launcher.start_ranks(options(2), ["train", "debug"]) == code
    waiting = "waiting for 2 nodes at first:29500"
    assert capfd.readouterr().err == f"titanlite: {waiting}\ntitanlite: {text}\n"
