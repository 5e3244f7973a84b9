"""run_train.sh as a user starts it, on one node or several, with its log, its checkpoints and its leftover
processes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.jobs import ROOT, make_job, write_toml
from tests.support.ports import listening
from titanlite.checkpoint.commit import list_committed

ON_THIS_PYTHON = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
SOON = "keep_alive_interval=1,keep_alive_max_attempt=10"  # a node is dead after 10 s; torchrun says 15
PLUGIN = """
import glob, os, signal, sys, time
from dataclasses import dataclass
from titanlite.checkpoint import commit
from titanlite.optim.adamw import AdamW

def seconds(name):
    time.sleep(float(os.environ.get(name, 0)))

me = "0 0"  # a run of one process without a launcher
if "RANK" in os.environ:  # not in the launcher, which reads the job, too
    me = os.environ["RANK"] + " " + os.environ["TORCHELASTIC_RESTART_COUNT"]
    with open("STARTS", "a") as f:
        f.write(me + "\\n")
    seconds("IMPORT_S")
elif "SPAWN" in os.environ:
    from titanlite.runtime.fork_server import ForkServer

    ForkServer.fork = lambda *args: None

END = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "os._exit(0)": lambda: os._exit(0),
    "sys.exit(0)": lambda: sys.exit(0),
    "go on": lambda: None,
}

@dataclass(frozen=True, kw_only=True)
class Walking(AdamW, name="walking"):
    "AdamW that takes its time. KILL: the rank, the restart and the step at which the process ends; HOW: how;"
    "AFTER: the pattern of a file that is there first."

    def build(self, model, mesh):
        optimizer, steps = super().build(model, mesh), []
        def before(*args):
            seconds("STEP_S")
            steps.append(0)
            if os.environ.get("KILL") == f"{me} {len(steps)}":
                while "AFTER" in os.environ and not glob.glob(os.environ["AFTER"]):
                    time.sleep(0.01)
                END[os.environ.get("HOW", "SIGKILL")]()
        optimizer.register_step_pre_hook(before)
        return optimizer

def slowly(*args, original=commit.commit):
    seconds("COMMIT_S")
    return original(*args)

commit.commit = slowly
"""


class Launcher:
    """./run_train.sh with its log and its processes, all of which have a mark in their environment."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path):
        """`log`: a new file."""
        self._log, self._mark = log, f"MARK={log}\0".encode()
        self.memory = Path(environment["TITANLITE_SHM"])
        """The shared memory of this node, which outlives it."""
        with open(log, "w") as file:
            self.launcher = subprocess.Popen(
                [str(ROOT / "run_train.sh"), *arguments],
                cwd=ROOT, env=os.environ | ON_THIS_PYTHON | environment | {"MARK": str(log)},
                stdout=file, stderr=file,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def copied(self) -> list[int]:
        """The steps of the complete copies in the memory of this node."""
        return sorted(int(path.name[5:]) for path in self.memory.glob("titanlite-*/step-*"))

    def ranks(self) -> list[int]:
        """Ranks and their loader workers that are alive."""
        return self._running("titanlite.cli", "train")

    def ranks_alone(self) -> list[int]:
        """Ranks that are alive: the launcher is their parent."""
        return [pid for pid in self.ranks() if parent_of(pid) == self.launcher.pid]

    def fork_server(self) -> int:
        """The process from which the launcher forks ranks."""
        (pid,) = self._running("titanlite.tools.fork_server")
        return pid

    def _running(self, *words: str) -> list[int]:
        """The processes of `python -m WORDS...`, as ps shows them."""
        command = "\0".join(("", "-m", *words, "")).encode()

        def runs(pid: int) -> bool:
            with suppress(OSError):
                return command in Path(f"/proc/{pid}/cmdline").read_bytes()
            return False

        return [pid for pid in self.processes() if runs(pid)]

    def processes(self) -> list[int]:
        """Launcher, fork server, ranks and loader workers that are alive."""

        def ours(pid: str) -> bool:
            try:
                return self._mark in Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie
            except OSError:
                return False

        return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and ours(pid)]

    def until(self, condition: Callable[[], Any], timeout_s: float = 300) -> None:
        """Wait until the condition holds."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.log
            time.sleep(0.05)

    def close(self) -> None:
        """End all processes that are left."""
        while pids := self.processes():  # one that is about to die may have forked another
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.launcher.wait()


class Node(Launcher):
    """A launcher of a tiny job."""

    count = itertools.count()

    def __init__(self, folder: Path, corpus: Path, arguments: tuple[str, ...], environment: dict[str, str]):
        self.folder, self.job = folder, make_job(folder, corpus, *arguments, world_size=2)
        (folder / "walking.py").write_text(PLUGIN.replace("STARTS", str(folder / "starts")))
        self.listened: set[str] = set()
        self.scratch = folder / "tmp"
        self.scratch.mkdir(exist_ok=True)
        memory = folder / f"memory-{environment.get('NODE_RANK', 0)}"
        memory.mkdir(exist_ok=True)
        words = [
            str(write_toml(folder, corpus)),
            f"--job.dump_folder={self.job.folder}",
            f"--data.cache_dir={self.job.data.cache_dir}",
            '--job.imports=["walking"]',
            "--optimizer.name=walking",
            *arguments,
        ]
        own = {"TMPDIR": str(self.scratch), "PYTHONPATH": path_with(folder), "TITANLITE_SHM": str(memory)}
        super().__init__(words, own | environment, folder / f"log-{next(Node.count)}")

    @property
    def starts(self) -> list[str]:
        """Rank and restart of each process that has read the job."""
        path = self.folder / "starts"
        return sorted(path.read_text().splitlines()) if path.exists() else []

    @property
    def step(self) -> int:
        """The last logged step; every step is logged."""
        path = self.job.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    @property
    def saved(self) -> list[int]:
        """The saved steps."""
        return [step for step, _ in list_committed(self.job.folder / "checkpoint")]

    def end(self, timeout_s: float = 300) -> int:
        """Wait for the end, and collect the ports that are open meanwhile. Returns the exit code."""

        def ended() -> bool:
            self.listened |= listening(self.processes())
            return self.launcher.poll() is not None

        self.until(ended, timeout_s)
        return self.launcher.returncode


def launch(*arguments: str, timeout_s: int = 400, **environment: str) -> subprocess.CompletedProcess:
    """Run run_train.sh to its end, in the repository's root and with the tests' interpreter."""
    return subprocess.run(
        [str(ROOT / "run_train.sh"), *arguments],
        cwd=ROOT,
        env=os.environ | ON_THIS_PYTHON | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def path_with(folder: Path) -> str:
    """A PYTHONPATH that includes `folder`."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if the process has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
