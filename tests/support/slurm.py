"""A Slurm cluster of this machine: munged, slurmctld, and a slurmd for each of three nodes. They are
children of the test's process, with files, ports and a key of their own.

The names of the nodes are addresses of the loopback interface, so that nodes reach each other by name, as on
a cluster. All nodes are this machine: a lost node loses its slurmd and its processes, but no files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path
from typing import Any

from tests.support.buckets import free_ports
from tests.support.jobs import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
NUM_NODES = 3
NUM_JOBS = 12
# cred_expire: a requeued job waits so many seconds, 120 by default. JobRequeue=0: only jobs that ask for it
# are requeued. FirstJobId: multinode.slurm computes a port from it.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
JobRequeue=0
FirstJobId={job}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=127.0.0.[1-{nodes}] NodeAddr=127.0.0.[1-{nodes}] NodeHostname={host} Port={first}-{last} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=ungraceful Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL PriorityTier=2
"""


class Cluster:
    """The daemons and commands of a cluster with files in `folder`. Commands run in the repository's root."""

    def __init__(self, folder: Path):
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen] = {}
        port = free_ports(NUM_NODES + 1 + NUM_JOBS)
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0], folder=folder, user=getuser(), nodes=NUM_NODES,
            port=port, first=port + 1, last=port + NUM_NODES, job=port + NUM_NODES + 1 - 20_000,
        )  # fmt: skip
        self.conf.write_text(text)

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        key, state = self.folder / "munge.key", self.folder / "state"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        state.mkdir()
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        # --force: other users can reach the socket's folder only if they may enter pytest's folder.
        self._run("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        wait(lambda: (self.folder / "munge.socket").exists(), self.logs)
        self._run("slurmctld", "-D")
        for number in range(NUM_NODES):
            self.start_node(f"127.0.0.{number + 1}")
        wait(lambda: self.states() == ["idle"] * NUM_NODES, self.logs)

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._run("slurmd", "-D", "-N", node, name=node)

    def lose_node(self, node: str) -> None:
        """Kill all processes of a node, then tell slurmctld that the node is down, which it would find out by
        itself after SlurmdTimeout, 300 s by default."""
        daemon = self._daemons.pop(node)
        kill([daemon.pid, *self._processes(node)])
        daemon.wait()
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def command(self, *words: str, **environment: str) -> str:
        """What a command of Slurm prints. Raises AssertionError if it fails."""
        env = os.environ | {"SLURM_CONF": str(self.conf)} | environment
        done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + self.logs()
        return done.stdout

    def states(self) -> list[str]:
        """The state of each node."""
        words = ("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T")
        with suppress(AssertionError):  # slurmctld does not answer yet
            return self.command(*words).split()
        return []

    def job(self, number: str) -> dict[str, str]:
        """Fields of a job, such as JobState, Restarts, ExitCode and NodeList."""
        text = self.command("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def hosts(self, nodes: str) -> list[str]:
        """The nodes of a list in Slurm's form, such as 127.0.0.[1-2]."""
        return self.command("scontrol", "show", "hostnames", nodes).split()

    def logs(self) -> str:
        """The last lines of each daemon's log."""
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """End all jobs and daemons."""
        with suppress(AssertionError):  # slurmctld does not answer
            for number in self.command("squeue", "--noheader", "--format=%A").split():
                self.command("scancel", number)
            wait(lambda: not self.command("squeue", "--noheader"), self.logs, 60)
        for name, daemon in reversed(self._daemons.items()):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(30)
            kill([daemon.pid, *self._processes(name)])
            daemon.wait()

    def _run(self, program: str, *options: str, name: str = "") -> None:
        path = shutil.which(program)
        assert path is not None
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        with (self.folder / f"{name or program}.out").open("w") as out:
            self._daemons[name or program] = subprocess.Popen(
                [path, *options], env=environment, stdout=out, stderr=out
            )

    def _processes(self, node: str) -> list[int]:
        """The slurmstepds on a node, which are no children of slurmd, then the processes of jobs below them.
        A slurmstepd that outlived these would tell slurmctld that the job has failed."""
        marks = {f"SLURM_CONF={self.conf}".encode(), f"SLURMD_NODENAME={node}".encode()}
        tasks = {pid for pid in _all_processes() if marks <= set(_read(pid, "environ").split(b"\0"))}
        stats = [_read(pid, "stat").rpartition(b")")[2].split() for pid in tasks]
        parents = {int(fields[1]) for fields in stats if fields}
        return [*(pid for pid in parents if _read(pid, "cmdline").startswith(b"slurmstepd")), *tasks]


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _read(pid: int, name: str) -> bytes:
    """A file of /proc/PID; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait(condition: Callable[[], Any], report: Callable[[], str], timeout_s: float = 120) -> None:
    """Wait until the condition holds. Raises AssertionError with the report."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, report()
        time.sleep(0.1)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A running cluster, which ends with the body."""
    slurm = Cluster(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()
