"""Processes that wait to become ranks: they run with the environment of their rank, say nothing before, and
none is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from titanlite import cli
from titanlite.runtime import waiting_ranks
from titanlite.runtime.environment import LAUNCHER_PID
from titanlite.runtime.waiting_ranks import SAVE, STOP, WaitingRanks, rank_command

ROOT = Path(__file__).resolve().parents[3]
# The layout is checked when the job is loaded, which is after the wait.
WORDS = ["train", "debug", "--parallelism.tensor_parallel_degree=3"]
COMPLAINT = (
    "command line, --parallelism.tensor_parallel_degree: {} no multiple of tensor_parallel_degree 3; start 3 "
    "processes, or a multiple of 3: NGPU=3 ./run_train.sh"
)
ALONE = COMPLAINT.format("1 rank is")


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the launcher. The threads that tests have are hidden: its copies do not need them."""
    monkeypatch.setenv(LAUNCHER_PID, str(os.getpid()))
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_a_process_runs_as_the_rank_that_it_gets(capfd: pytest.CaptureFixture) -> None:
    with WaitingRanks(WORDS, 2, cli.main) as ranks:
        first, second = (waiting.process for waiting in ranks._waiting)
        place = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
        environment = os.environ | place | {"LONG": "x" * 100_000, "OTHER": "\udcff"}
        assert ranks.begin(rank_command(WORDS), environment) is first
        assert first.wait(60) == 2
        complaint = COMPLAINT.format("2 ranks are")
        assert capfd.readouterr().err == f"titanlite: local rank 1: {complaint}\n"
        assert second.poll() is None, "it waits"
    assert second.returncode == -signal.SIGKILL
    assert capfd.readouterr().err == ""
    assert ranks.begin(rank_command(WORDS), os.environ) is None, "no process is left"


def test_variables_of_before_are_gone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "seven")
    with WaitingRanks(WORDS, 1, cli.main) as ranks:
        monkeypatch.delenv("WORLD_SIZE")
        process = ranks.begin(rank_command(WORDS), os.environ)
        assert process is not None
        assert process.wait(60) == 2
    assert capfd.readouterr().err == f"titanlite: {ALONE}\n"


def test_a_process_with_threads_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    with WaitingRanks(WORDS, 1, cli.main) as ranks:
        assert ranks._waiting
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with WaitingRanks(WORDS, 1, cli.main) as ranks:
        assert ranks.begin(rank_command(WORDS), os.environ) is None


@pytest.mark.parametrize("lost", [False, True])
def test_a_copy_that_has_lost_cuda_starts_anew(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, lost: bool
) -> None:
    monkeypatch.setattr(waiting_ranks, "is_copy_without_cuda", lambda: lost)
    monkeypatch.setattr(os, "execv", lambda path, words: print(path, *words, file=sys.stderr, flush=True))
    with WaitingRanks(WORDS, 1, cli.main) as ranks:
        process = ranks.begin(rank_command(WORDS), os.environ)
        assert process is not None
        assert process.wait(60) == 2
    command = " ".join([sys.executable, *rank_command(WORDS)])
    assert capfd.readouterr().err == (f"{command}\n" if lost else "") + f"titanlite: {ALONE}\n"


def test_another_command_ends_them() -> None:
    with WaitingRanks(WORDS, 1, cli.main) as ranks:
        process = ranks._waiting[0].process
        assert ranks.begin(rank_command([*WORDS, "--job.name=x"]), os.environ) is None
        assert process.returncode == -signal.SIGKILL


def test_a_process_that_has_ended_before_its_rank_begins() -> None:
    with WaitingRanks(WORDS, 1, cli.main) as ranks:
        waiting = ranks._waiting[0].process
        waiting.kill()
        waiting.wait()
        assert ranks.begin(rank_command(WORDS), os.environ) is waiting, "the agent reports how it ended"


def test_a_process_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started, mask = WaitingRanks._start, [], signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def start_one(self: WaitingRanks) -> waiting_ranks._Waiting:
        if started:
            raise OSError("no more processes")
        started.append(start(self))
        return started[0]

    monkeypatch.setattr(WaitingRanks, "_start", start_one)
    with pytest.raises(OSError, match="no more"), WaitingRanks(WORDS, 2, cli.main):
        pass
    assert started[0].process.returncode == -signal.SIGKILL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_a_rank_has_its_own_session_and_no_signal_before_it_has_handlers() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with WaitingRanks(WORDS, 1, cli.main) as ranks:
        pid = ranks._waiting[0].process.pid
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        until = time.monotonic() + 60
        while os.getsid(pid) != pid:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert signals_in(pid, "SigBlk") >= {*STOP, *SAVE}


def signals_in(pid: int, mask: str) -> set[int]:
    """The signals in a mask of a process: those it blocks, `SigBlk`, or those it handles, `SigCgt`."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {number for number in signal.valid_signals() if int(status[mask], 16) >> (number - 1) & 1}


LAUNCHER = """
import sys, time
from titanlite.runtime.environment import prepare_to_launch
from titanlite.runtime.waiting_ranks import WaitingRanks
prepare_to_launch(2)
with WaitingRanks(sys.argv[1:], 2, None) as ranks:
    print(*[waiting.process.pid for waiting in ranks._waiting], flush=True)
    time.sleep(600)
"""


def test_they_end_with_the_launcher() -> None:
    command = [sys.executable, "-c", LAUNCHER, *WORDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        time.sleep(0.5)  # until the kernel knows that they end with it
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


LAUNCHER_OF_COPIES = """
import os, random, signal
import numpy, torch
from titanlite.runtime.environment import prepare_to_launch
from titanlite.runtime.signals import stop_requests
from titanlite.runtime.waiting_ranks import WaitingRanks, rank_command
def main():
    print(*[int(signal.getsignal(n) is signal.SIG_DFL) for n in (15, 1, 10, 12)])
    print(random.random(), numpy.random.random(), torch.rand(()).item())
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
with stop_requests():
    prepare_to_launch(2)
    random.random(), numpy.random.random(), torch.rand(())
    print("launcher")  # is in the buffer when the copies are made
    with WaitingRanks([], 2, main) as ranks:
        processes = [ranks.begin(rank_command([]), os.environ) for _ in range(2)]
        print(*[process.wait(60) for process in processes])
"""


def test_what_a_rank_does_not_have_of_the_launcher() -> None:
    """Signal handlers: a signal ends a rank after its training. Random states. The buffer of its output; and
    the lines of a rank that is killed are there. The output is a pipe."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", LAUNCHER_OF_COPIES]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 6, lines
    assert (lines[0], lines[-1]) == ("launcher", "-9 -9")
    assert lines.count("1 1 1 1") == 2, lines
    numbers = " ".join(line for line in lines if "." in line).split()
    assert len(numbers) == len(set(numbers)) == 6


@pytest.mark.full
def test_importing_the_compiler_changes_no_variable() -> None:
    """torch sets the folder of its cache, which would then count as the user's choice."""
    code = "import os\nfrom titanlite.runtime.environment import importing_for_copies\n"
    code += "from titanlite.torch_compat import import_compiler\nbefore = dict(os.environ)\n"
    code += "with importing_for_copies():\n    import_compiler(with_inductor=True)\n"
    code += "    assert os.environ != before\n"
    code += "assert os.environ == before, set(os.environ.items()) ^ set(before.items())"
    env = {name: value for name, value in os.environ.items() if "INDUCTOR" not in name}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)


def launch(folder: Path, ranks: int, environment: Mapping[str, str], send: int | None = None) -> tuple:
    """Exit code and standard error of the launcher, and the processes of its run that are left. `send`: a
    signal that it gets while it imports."""
    words = [f"--nproc-per-node={ranks}", "debug", f"--job.dump_folder={folder}", "--training.steps=2"]
    command = [sys.executable, "-m", "titanlite.cli", "launch", *words, "--lr_scheduler.warmup_steps=0"]
    where = {"cwd": ROOT, "env": os.environ | environment}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **where) as launcher:
        if send is not None:
            until = time.monotonic() + 60
            while send not in signals_in(launcher.pid, "SigCgt"):
                assert time.monotonic() < until, "the launcher does not handle the signal"
                time.sleep(0.1)
            launcher.send_signal(send)
        error = launcher.communicate()[1]
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    left = [command for command in commands if os.fsencode(folder) in command]
    return launcher.returncode, error, left


@pytest.mark.full
def test_an_error_of_an_import_is_told_once(tmp_path: Path) -> None:
    hook = "import sys\nclass Broken:\n    def find_spec(self, name, *args):\n"
    hook += "        if name == 'titanlite.job':\n            raise ImportError('broken on purpose')\n"
    (tmp_path / "sitecustomize.py").write_text(f"{hook}sys.meta_path.insert(0, Broken())\n")
    code, error, left = launch(tmp_path / "run", 2, {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert code == 1
    assert error.count("ImportError: broken") == 1 == error.count("Traceback")
    assert not left


def test_a_signal_while_the_launcher_imports(tmp_path: Path) -> None:
    code, error, left = launch(tmp_path / "run", 2, {}, signal.SIGTERM)
    assert (code, error) == (75, "titanlite: stopped by SIGTERM before the first step; nothing is lost\n")
    assert not left


@pytest.mark.full
def test_words_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a $$ ${local_rank} $x"  # torchrun replaces such words
    code, error, _ = launch(folder, 2, {})
    assert code == 0, error
    assert (folder / "job.toml").exists()


@pytest.mark.full
def test_one_process_in_a_container_that_torchrun_has_started(tmp_path: Path) -> None:
    under = {"TORCHELASTIC_RUN_ID": "outer", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    code, error, _ = launch(tmp_path / "run", 1, under)
    assert code == 0, error
