"""Processes that wait to become ranks: they run with the environment of their rank, and none is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titanlite.runtime import waiting_ranks
from titanlite.runtime.waiting_ranks import WaitingRanks

# The layout is checked when the job is loaded, which is after the wait.
WORDS = ["train", "debug", "--parallelism.tensor_parallel_degree=3"]
COMPLAINT = "command line, --parallelism: 1 ranks are no multiple of tensor_parallel_degree 3"
COMMAND = [sys.executable, "-u", "-m", "titanlite.cli", *WORDS]


def test_a_process_runs_as_the_rank_that_it_gets(capfd: pytest.CaptureFixture) -> None:
    with WaitingRanks(WORDS, 2) as ranks:
        (first, _), (second, _) = ranks._waiting
        assert ranks.begin([*COMMAND, "--seed=1"], os.environ) is None, "another command"
        assert ranks.begin(COMMAND, os.environ | {"LOCAL_RANK": "1", "HOME": "/\udcff"}) is first
        assert capfd.readouterr().err == "", "nothing is checked before"
        assert first.wait(60) == 2
        assert f"titanlite: local rank 1: {COMPLAINT}" in capfd.readouterr().err
        assert second.poll() is None, "it waits"
    assert second.returncode == -signal.SIGKILL
    assert capfd.readouterr().err == ""
    assert ranks.begin(COMMAND, os.environ) is None, "no process is left"


def test_the_environment_before_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    with WaitingRanks(WORDS, 1) as ranks:
        monkeypatch.delenv("LOCAL_RANK")
        process = ranks.begin(COMMAND, os.environ)
        assert process is not None
        assert process.wait(60) == 2
    assert f"titanlite: {COMPLAINT}" in capfd.readouterr().err


def test_a_process_that_has_ended_before_its_rank_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with WaitingRanks(WORDS, 1) as ranks:
        waiting, _ = ranks._waiting[0]
        waiting.kill()
        waiting.wait()
        assert ranks.begin(COMMAND, os.environ) is waiting, "the agent reports how it ended"


LAUNCHER = """
import sys, time
from titanlite.runtime.waiting_ranks import WaitingRanks
with WaitingRanks(sys.argv[1:], 2) as ranks:
    print(*[process.pid for process, _ in ranks._waiting], flush=True)
    time.sleep(600)
"""


def test_they_end_with_the_launcher() -> None:
    command = [sys.executable, "-c", LAUNCHER, *WORDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert all(is_running(pid) for pid in pids)
        launcher.kill()
    until = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < until, "a process waits for a launcher that was killed"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_rank_gets_its_own_session_and_no_signal_before_it_has_handlers() -> None:
    with WaitingRanks(WORDS, 1) as ranks:
        process, _ = ranks._waiting[0]
        assert os.getsid(process.pid) == process.pid
        blocked = next(
            int(line.split()[1], 16)
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if line.startswith("SigBlk")
        )
    assert all(blocked >> (number - 1) & 1 for number in (*waiting_ranks.STOP, *waiting_ranks.SAVE))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*waiting_ranks.STOP, *waiting_ranks.SAVE}
