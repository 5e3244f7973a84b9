"""multinode.slurm on a real Slurm, whose daemons run on this machine. The job trains on two of three nodes.

tests/test_slurm.py has the script's decisions with stand-ins, where Slurm is not installed. On Debian,
`apt-get install slurmctld slurmd slurm-client munge` installs what these tests need; they start and end the
daemons themselves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.jobs import make_job, write_toml
from tests.support.launcher import ON_THIS_PYTHON, path_with
from tests.support.runs import assert_same
from tests.support.slurm import NUM_NODES, PROGRAMS, Cluster, cluster, wait

missing = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(missing), reason=f"Slurm is not installed: no {', '.join(missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as root"),
]
STEPS, INTERVAL = 100, 10
NO_SAVES = f"--checkpoint.interval={10 * STEPS}"  # but for those that a signal asks for, and the last
PLUGIN = """
import os, time
from dataclasses import dataclass
from titanlite.optim.adamw import AdamW

@dataclass(frozen=True, kw_only=True)
class Walking(AdamW, name="walking"):
    "AdamW whose steps take STEP_S seconds longer until Slurm has requeued the job."

    def build(self, model, mesh):
        optimizer = super().build(model, mesh)
        seconds = 0 if "SLURM_RESTART_COUNT" in os.environ else float(os.environ.get("STEP_S", 0))
        optimizer.register_step_pre_hook(lambda *args: time.sleep(seconds))
        return optimizer
"""


class Run:
    """The tiny job, submitted to two nodes."""

    def __init__(self, slurm: Cluster, folder: Path, corpus: Path):
        self.slurm, self.folder, self.corpus, self.number = slurm, folder, corpus, ""
        (folder / "walking.py").write_text(PLUGIN)
        self.job = make_job(folder, corpus, world_size=2)

    def submit(self, *arguments: str, options: tuple[str, ...] = (), step_s: float = 0.3) -> Run:
        """Submit multinode.slurm with these arguments of `titanlite train` and options of sbatch."""
        toml = str(write_toml(self.folder, self.corpus))
        words = [
            "sbatch", "--parsable", "--nodes=2", "--cpus-per-task=1", "--gpus-per-task=0",
            f"--output={self.folder / 'log'}", *options, "multinode.slurm", toml,
            f"--job.dump_folder={self.job.folder}", f"--data.cache_dir={self.job.data.cache_dir}",
            '--job.imports=["walking"]', "--optimizer.name=walking", f"--training.steps={STEPS}",
            f"--lr_scheduler.total_steps={STEPS}", *arguments,
        ]  # fmt: skip
        own = {"NGPU": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path_with(self.folder)}
        self.number = self.slurm.command(*words, STEP_S=str(step_s), **own, **ON_THIS_PYTHON).strip()
        return self

    @property
    def log(self) -> str:
        """What all starts of the job have printed."""
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    @property
    def events(self) -> list[tuple[str, int]]:
        """The run's events and their steps."""
        lines = (self.job.folder / "events.jsonl").read_text().splitlines()
        return [(event["event"], event["step"]) for event in map(json.loads, lines)]

    def state(self) -> dict[str, str]:
        """What Slurm says of the job."""
        return self.slurm.job(self.number)

    def reaches(self, step: int) -> None:
        """Wait until this many steps are logged."""
        path = self.job.folder / "metrics.jsonl"
        self.until(lambda: path.exists() and path.read_text().count("\n") >= step)

    def ends(self) -> dict[str, str]:
        """Wait until the job has ended for good. Returns what Slurm says of it."""
        self.until(lambda: self.state()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"))
        return self.state()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds."""
        wait(condition, lambda: f"{self.log}\n{self.state()}\n{self.slurm.logs()}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def run(slurm: Cluster, tmp_path: Path, corpus: Path) -> Run:
    return Run(slurm, tmp_path, corpus)


@pytest.fixture(scope="module")
def undisturbed(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """A run of one start, which takes all its steps on two nodes."""
    run = Run(slurm, tmp_path_factory.mktemp("undisturbed"), corpus).submit(NO_SAVES, step_s=0)
    state = run.ends()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "0"), run.log
    assert (state["NumNodes"], "2 x x86_64: dp_shard 2" in run.log) == ("2", True)
    assert [kind for kind, _ in run.events] == ["started", "saved", "ended"]
    return run


def assert_continued(run: Run, undisturbed: Run) -> int:
    """The job was requeued once, has resumed from a step in the middle, and ended as if nothing had happened.
    Returns that step."""
    state = run.ends()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), run.log
    (step,) = (step for kind, step in run.events if kind == "resumed")
    assert 0 < step < STEPS
    assert_same(run.job, undisturbed.job)
    return step


def took_steps_twice(run: Run) -> bool:
    """Whether steps after the last checkpoint were lost, and repeated."""
    return (run.job.folder / "metrics.superseded.jsonl").exists()


@pytest.mark.parametrize("requeue", ["scancel --signal=USR1", "scontrol requeue"])
def test_a_signal_and_a_requeue_save(run: Run, slurm: Cluster, undisturbed: Run, requeue: str) -> None:
    """After `scontrol requeue`, Slurm sends SIGTERM, and SIGKILL after KillWait."""
    run.submit(NO_SAVES).reaches(3)
    slurm.command(*requeue.split(), run.number)
    step = assert_continued(run, undisturbed)
    assert ("saved", step) in run.events
    assert not took_steps_twice(run)
    assert run.log.count("stopped and saved; requeueing") == (requeue != "scontrol requeue")


def test_the_time_limit_saves_and_requeues(run: Run, slurm: Cluster, undisturbed: Run) -> None:
    """Slurm looks at the limits twice a minute, and signals 30 to 60 s before the end of the two minutes."""
    run.submit(NO_SAVES, options=("--time=2", "--signal=USR1@30"), step_s=1)
    step = assert_continued(run, undisturbed)
    assert ("saved", step) in run.events
    assert not took_steps_twice(run)
    assert run.log.count("titanlite: SIGUSR1: finishing this step and saving") == 1


@pytest.mark.parametrize(("partition", "requeued_by_script"), [("low", True), ("ungraceful", False)])
def test_a_preempted_job_saves_and_continues(
    run: Run, slurm: Cluster, undisturbed: Run, partition: str, requeued_by_script: bool
) -> None:
    """Without a GraceTime, Slurm sends SIGKILL KillWait after SIGTERM, and requeues the job itself."""
    run.submit(NO_SAVES, options=(f"--partition={partition}",)).reaches(3)
    words = ("--parsable", "--partition=high", "--nodes=3", "--output=/dev/null", "--wrap=sleep 1")
    other = slurm.command("sbatch", *words).strip()
    run.until(lambda: slurm.job(other)["JobState"] == "COMPLETED")
    assert run.state()["JobState"] == "PENDING"
    step = assert_continued(run, undisturbed)
    assert ("saved", step) in run.events
    assert not took_steps_twice(run)
    assert ("stopped and saved; requeueing" in run.log) == requeued_by_script


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_replaced(run: Run, slurm: Cluster, undisturbed: Run, lost: int) -> None:
    """The job goes on from its last checkpoint on the nodes that are left. The first node has the script and
    the launcher that all others meet."""
    run.submit(f"--checkpoint.interval={INTERVAL}").reaches(INTERVAL + 3)
    run.until(lambda: ("saved", INTERVAL) in run.events)
    node = slurm.hosts(run.state()["NodeList"])[lost]
    slurm.lose_node(node)
    step = assert_continued(run, undisturbed)
    assert step % INTERVAL == 0
    assert took_steps_twice(run)
    assert node not in slurm.hosts(run.state()["NodeList"])
    slurm.start_node(node)
    run.until(lambda: slurm.states() == ["idle"] * NUM_NODES)


def test_an_error_ends_the_job(run: Run) -> None:
    state = run.submit("--training.steps=-1").ends()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0"), run.log


def test_scancel_saves_and_ends_the_job(run: Run, slurm: Cluster) -> None:
    run.submit(NO_SAVES).reaches(3)
    slurm.command("scancel", run.number)
    state = run.ends()
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), run.log
    assert [kind for kind, _ in run.events] == ["started", "saved", "ended"]
