"""The launcher's fork server: ranks that it forks are like ranks that are started as programs, except that
they have imported everything. A module that the job imports says what a rank is like."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tests.support.jobs import write_toml
from tests.support.launcher import path_with
from tests.support.ranks import Ranks
from tests.support.tiers import full
from titanlite.runtime import fork_server
from titanlite.runtime.agent import Agent, RanksFailed
from titanlite.runtime.environment import LAUNCHER_PID, NOTES
from titanlite.runtime.fork_server import ForkedRank, ForkServer
from titanlite.runtime.forked_ranks import RANK, forked_by
from titanlite.runtime.rendezvous import OneNode
from titanlite.runtime.signals import SAVE, STOP
from titanlite.tools.fork_server import run_rank, serve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
ROOT = Path(__file__).resolve().parents[3]
IMPORTED = """
import json, os, random, sys, time
import numpy

print(json.dumps({
    "version": VERSION,
    "word": os.environ["WORD"],
    "parent": os.getppid(),
    "is_leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "argv": sys.argv,
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "is_warm": "torch._inductor.compile_fx" in sys.modules,
    "threads": len(os.listdir("/proc/self/task")),
    "files": len(os.listdir("/proc/self/fd")),
    "random": [random.random(), numpy.random.random()],
}), flush=True)
print("an error", file=sys.stderr, flush=True)
while os.environ["WORD"] == "wait":
    time.sleep(0.01)
os._exit(int(os.environ.get("CODE", 0)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a job, in the environment of a launcher of one rank."""
    folder = tmp_path_factory.mktemp("fork-server")
    write_module(folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv(LAUNCHER_PID, str(os.getpid()))
        patch.setenv("PYTHONPATH", path_with(folder))
        patch.delenv("OMP_NUM_THREADS")
        yield folder


def write_module(folder: Path, version: int) -> None:
    (folder / "imported_by_a_rank.py").write_text(IMPORTED.replace("VERSION", str(version)))


def words_of(folder: Path) -> list[str]:
    return ["train", str(write_toml(folder, folder)), '--job.imports=["imported_by_a_rank"]']


@pytest.fixture(scope="module")
def program(folder: Path) -> Iterator[ForkServer]:
    with fork_server.fork_server(words_of(folder)) as server:
        assert server is not None
        yield server


class Preloaded(ForkServer):
    """A server that is forked from the tests' own server, which has imported everything."""

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._ranks = Ranks(1, serve_and_run, theirs, self._words)
        (process,) = self._ranks.processes
        self._process: Any = SimpleNamespace(
            pid=process.pid, poll=lambda: process.exitcode, kill=process.kill, wait=process.join
        )


def serve_and_run(launcher: socket.socket, words: list[str]) -> None:
    """The program, without its start and its imports."""
    sys.path.insert(0, str(Path(words[1]).parent))
    with launcher:
        connection = serve(launcher)
    if connection is not None:
        run_rank(connection, words)


@pytest.fixture(scope="module", params=["preloaded", full("program")])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    if request.param == "program":
        yield request.getfixturevalue("program")
        return
    server = Preloaded(words_of(folder))
    yield server
    server.close()


def fork(server: ForkServer, folder: Path, **environment: str) -> tuple[ForkedRank, Path]:
    """A rank, and the file that gets its output."""
    output = folder / f"output-{time.monotonic_ns()}"
    rank = server.fork(os.environ | {"WORD": "a word"} | environment, str(output), str(output) + "-errors")
    assert rank is not None
    return rank, output


def facts(output: Path) -> dict[str, Any]:
    """What a rank has said of itself, once it has."""
    until = time.monotonic() + 60
    while not output.exists() or not output.read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.01)
    return json.loads(output.read_text())


def pid_of(server: ForkServer) -> int:
    assert server._process is not None
    return server._process.pid


def test_a_forked_rank_is_as_one_that_was_started(server: ForkServer, folder: Path) -> None:
    rank, output = fork(server, folder, CODE="7", WORD="ä \udc80")
    assert rank.wait(60) == rank.poll() == 7
    rank_facts, words = facts(output), words_of(folder)
    assert rank_facts["word"] == "ä \udc80"
    assert rank_facts["parent"] == os.getpid(), "the launcher gets its exit code"
    assert rank_facts["is_leader"], "a Ctrl-C would reach it beside the launcher's signal"
    assert rank_facts["command"] == [*RANK, *words], "ps shows a rank"
    assert rank_facts["argv"][1:] == words
    assert rank_facts["argv"][0].endswith("titanlite/cli.py")
    assert rank_facts["is_warm"]
    assert rank_facts["threads"] == 1
    assert rank_facts["files"] <= 4 + len(os.listdir("/proc/self/fd")), "standard files, and the list's"
    assert Path(f"{output}-errors").read_text() == "an error\n"


@pytest.mark.full
def test_the_server_runs_no_thread_and_ps_shows_what_it_is(program: ForkServer, folder: Path) -> None:
    """numpy's OpenBLAS has threads after its import, which it ends at the first fork, also the server's."""
    fork(program, folder)[0].wait(60)
    assert len(os.listdir(f"/proc/{pid_of(program)}/task")) == 1
    command = Path(f"/proc/{pid_of(program)}/cmdline").read_text().split("\0")
    assert command[3] == "titanlite.tools.fork_server"
    assert os.getsid(pid_of(program)) == pid_of(program), "a Ctrl-C would reach it"


def test_modules_of_the_job_are_imported_after_the_fork(server: ForkServer, folder: Path) -> None:
    first, second = (facts(fork(server, folder)[1]) for _ in range(2))
    assert first["version"] == second["version"] == 1
    assert not set(first["random"]) & set(second["random"]), "ranks draw the same numbers"
    write_module(folder, 22)  # its size differs: its time may not
    try:
        assert facts(fork(server, folder)[1])["version"] == 22
    finally:
        write_module(folder, 1)


def test_a_signal_that_ends_a_rank(server: ForkServer, folder: Path) -> None:
    rank, output = fork(server, folder, WORD="wait")
    facts(output)
    assert rank.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.02)
    os.killpg(rank.pid, signal.SIGKILL)
    assert rank.wait() == -signal.SIGKILL


@pytest.mark.full
def test_signals_to_stop_and_save_do_not_end_the_server(program: ForkServer, folder: Path) -> None:
    """A scheduler may send them to all processes of a job. Ranks do not inherit what waits in the server."""
    for number in (*STOP, *SAVE):
        os.kill(pid_of(program), number)
    assert fork(program, folder)[0].wait(60) == 0


def test_another_server_replaces_one_that_has_died(
    server: ForkServer, folder: Path, capfd: pytest.CaptureFixture
) -> None:
    """Its ranks live on."""
    rank, output = fork(server, folder, WORD="wait")
    facts(output)
    assert server._process is not None
    os.kill(before := pid_of(server), signal.SIGKILL)
    server._process.wait()
    assert rank.poll() is None
    assert fork(server, folder, CODE="3")[0].wait(60) == 3
    assert pid_of(server) != before
    assert capfd.readouterr().err == (
        "titanlite: the process that forks ranks has ended with exit code -9; starting another\n"
    )
    assert rank.poll() is None
    os.kill(rank.pid, signal.SIGTERM)
    assert rank.wait(60) == 75


def test_a_server_that_cannot_start_is_not_asked_again(
    folder: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server.sys, "executable", "false")
    with fork_server.fork_server([]) as server:
        assert server is not None
        server.wait_until_ready()
        assert [server.fork({}, "", "") for _ in range(2)] == [None, None]
    assert capfd.readouterr().err.count("starting ranks as new programs, which takes longer\n") == 1


# ---- with torchrun's agent


@pytest.fixture
def agent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Agent, list[dict[str, Any]]]]:
    """An agent of one rank whose output goes to a file, and the agent's function that reads the output."""
    monkeypatch.setenv(NOTES, "")
    monkeypatch.setenv("WORD", "a word")
    monkeypatch.setenv("CODE", "5")
    before = {number: signal.getsignal(number) for number in (*STOP, *SAVE, signal.SIGQUIT)}
    spec = WorkerSpec(
        role="default", local_world_size=1, entrypoint=RANK[0], args=(*RANK[1:], *words_of(folder)),
        rdzv_handler=OneNode(RendezvousParameters("titanlite", "localhost:0", "test", 1, 1)),
        max_restarts=0, monitor_interval=0.02,
    )  # fmt: skip
    yield Agent(spec, DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL))
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("is_forked", [True, full(False)])
def test_torchruns_agent_takes_forked_ranks(
    agent: Agent, server: ForkServer, tmp_path: Path, is_forked: bool
) -> None:
    with forked_by(server if is_forked else None), pytest.raises(RanksFailed) as failed:
        agent.run()
    assert failed.value.exit_code == 5
    (output,) = tmp_path.rglob("stdout.log")
    rank_facts = facts(output)
    assert rank_facts["is_warm"] == is_forked
    assert rank_facts["parent"] == os.getpid()
    assert (output.parent / "stderr.log").read_text().startswith("an error\n")
