"""The launcher as a command, and the messages with which it ends when nodes do not meet."""

from __future__ import annotations

import argparse
import os
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

from titanlite.runtime import launcher, rendezvous

ROOT = Path(__file__).resolve().parents[3]


def start(folder: Path, num_ranks: int) -> subprocess.Popen:
    words = [f"--nproc-per-node={num_ranks}", "debug", f"--job.dump_folder={folder}", "--training.steps=2"]
    command = [sys.executable, "-m", "titanlite.cli", "launch", *words, "--lr_scheduler.warmup_steps=0"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_while_the_launcher_imports(tmp_path: Path) -> None:
    with start(tmp_path / "run", 2) as process:
        until = time.monotonic() + 60
        while signal.SIGTERM not in handled_by(process.pid):
            assert time.monotonic() < until, "the launcher does not handle the signal"
            time.sleep(0.05)
        process.terminate()
        error = process.communicate()[1]
    assert (process.returncode, error) == (
        75,
        "titanlite: stopped by SIGTERM before the first step; nothing is lost\n",
    )


def handled_by(pid: int) -> set[int]:
    """The signals for which a process has handlers."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {number for number in signal.valid_signals() if int(status["SigCgt"], 16) >> (number - 1) & 1}


def test_words_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a $$ ${local_rank} $x"  # torchrun replaces such words
    with start(folder, 2) as process:
        error = process.communicate()[1]
    assert process.returncode == 0, error
    assert (folder / "job.toml").exists()


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
        assert arguments.rdzv_backend == "c10d"
        raise error

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(rendezvous, "reach_first_node", lambda *words: None)
    options = argparse.Namespace(
        nproc_per_node=1, nnodes="2", max_nodes=2, max_restarts=0, node_rank=0, rdzv_id="",
        rdzv_endpoint="first:29500",
    )  # fmt: skip
    assert launcher.start_ranks(options, ["train", "debug"]) == code
    waiting = "waiting for 2 nodes at first:29500"
    assert capfd.readouterr().err == f"titanlite: {waiting}\ntitanlite: {text}\n"
    assert os.environ.get("TORCHELASTIC_RUN_ID") is None
