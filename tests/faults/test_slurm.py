"""multinode.slurm on a real Slurm: slurmctld and three slurmds of this machine, on two of which a job trains, on
the CPU.

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
from tests.support.runs import assert_same, state_of
from tests.support.slurm import GRACE_TIME_S, PROGRAMS, Cluster, cluster, wait

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
        words = [
            "sbatch", "--parsable", "--nodes=2", "--cpus-per-task=1", "--gpus-per-task=0",
            f"--output={self.folder / 'log'}", *options, "multinode.slurm", str(write_toml(self.folder, self.corpus)),
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
    assert (state["NumNodes"], "dp_shard 2" in run.log) == ("2", True)
    assert [kind for kind, _ in run.events] == ["started", "saved", "ended"]
    return run


def assert_continued(run: Run, undisturbed: Run, restarts: str = "1") -> int:
    """The job was requeued, has resumed from a step in the middle, and ended as if nothing had happened. Returns
    that step."""
    state = run.ends()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", restarts), (
        run.log
    )
    (step,) = (step for kind, step in run.events if kind == "resumed")
    assert 0 < step < STEPS
    assert_same(run.job, undisturbed.job)
    return step


def stopped_and_saved(run: Run, step: int) -> bool:
    """Whether the first start has saved this step because of a signal, and no step was taken twice."""
    kinds = [kind for kind, at in run.events if at == step]
    return kinds[:1] == ["saved"] and not (run.job.folder / "metrics.superseded.jsonl").exists()


def test_a_signal_saves_and_requeues(run: Run, slurm: Cluster, undisturbed: Run) -> None:
    run.submit(NO_SAVES).reaches(3)
    slurm.command("scancel", "--signal=USR1", run.number)
    assert stopped_and_saved(run, assert_continued(run, undisturbed)), run.log
    assert run.log.count("stopped and saved; requeueing") == 1


def test_the_time_limit_saves_and_requeues(run: Run, undisturbed: Run) -> None:
    """Slurm checks limits twice a minute: it signals 15 to 45 s before the end of the only minute."""
    run.submit(NO_SAVES, options=("--time=1", "--signal=USR1@15"), step_s=1)
    assert stopped_and_saved(run, assert_continued(run, undisturbed)), run.log


def test_a_preempted_job_saves_in_its_grace_time_and_continues(
    run: Run, slurm: Cluster, undisturbed: Run
) -> None:
    run.submit(NO_SAVES).reaches(3)
    other = slurm.command("sbatch", "--parsable", "--partition=high", "--nodes=3", "--wrap=sleep 1").strip()
    run.until(lambda: slurm.job(other)["JobState"] == "COMPLETED")
    assert run.state()["JobState"] == "PENDING"
    assert stopped_and_saved(run, assert_continued(run, undisturbed)), run.log


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_replaced(run: Run, slurm: Cluster, undisturbed: Run, lost: int) -> None:
    """The job goes on from its last checkpoint on the nodes that are left. The first node has the script and the
    launcher that all others meet."""
    run.submit(f"--checkpoint.interval={INTERVAL}").reaches(INTERVAL + 3)
    node = f"127.0.0.{lost + 1}"
    slurm.lose_node(node)
    step = assert_continued(run, undisturbed)
    assert step % INTERVAL == 0
    assert not stopped_and_saved(run, step)
    assert run.state()["NodeList"] == "127.0.0.[2-3]" if lost == 0 else "127.0.0.[1,3]"
    slurm.start_node(node)
    run.until(lambda: slurm.states() == ["idle"] * 3)


def test_an_error_ends_the_job(run: Run) -> None:
    state = run.submit("--training.steps=-1").ends()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0"), run.log


def test_scancel_ends_the_job_after_a_save(run: Run, slurm: Cluster) -> None:
    run.submit(NO_SAVES).reaches(3)
    slurm.command("scancel", run.number)
    state = run.ends()
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), run.log
    assert [kind for kind, _ in run.events] == ["started", "saved", "ended"]
