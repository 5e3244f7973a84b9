"""How much time a run loses to faults that come at random, and whether its weights are still those of an
undisturbed run, bit by bit.

    python benchmarks/fault_campaign.py undisturbed debug --output FILE [--nodes 2] [--ranks 2]
        [--seconds 480] [--section.key=value ...]
    python benchmarks/fault_campaign.py faults FILE [--seed 1] [--mean 100] [--seconds 480]
        [--kinds rank,launcher,...]
    python benchmarks/fault_campaign.py draw FILE [--campaign 0] [--output assets/fault_campaign.svg]

`undisturbed` trains for --seconds, counted from the first step, is then told to stop, and records the last
step and the digests of the state; it also fills the caches of data and compiled code. `faults` trains the
same job to the same step, disturbed for --seconds (by default the same time, and at most until the last
step), and fails if the digests differ. Each call adds a campaign to FILE. `draw` makes the picture and
the table of one campaign from FILE alone.

Each node is a ./run_train.sh of this machine, with its own shared memory and, if there are several nodes, its
own GPUs. A launcher that ends before the run has ended is started again at once, as Slurm and Kubernetes do.
The times between faults are exponential with the mean --mean; each kind comes once before one comes again:

    rank      kill -9 of one rank
    ranks     kill -9 of all ranks of a node
    launcher  kill -9 of a launcher, with which its ranks end
    node      kill -9 of all processes of a node, whose copies in memory are lost (two or more nodes)
    frozen    SIGSTOP of all processes of a node, and kill -9 after --frozen seconds (two or more nodes)

A fault may come while the run recovers from the one before. Tokenizer and data are those of throughput.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment  # noqa: E402
from benchmarks.fault_picture import picture, table  # noqa: E402
from benchmarks.throughput import SHIPPED_DATA  # noqa: E402
from tests.support.launcher import Launcher  # noqa: E402
from tests.support.ports import free_port  # noqa: E402
from titanlite.checkpoint.commit import list_committed  # noqa: E402
from titanlite.checkpoint.state_digest import combine, digests_of_checkpoint  # noqa: E402
from titanlite.report.recorded_run import Record, RecordedRun, read_run  # noqa: E402
from titanlite.report.timeline import FIRST_STEP, Timeline, event_time, record_time, timeline  # noqa: E402

ONE_NODE = ["rank", "ranks", "launcher"]
SEVERAL_NODES = [*ONE_NODE, "node", "frozen"]
ENDLESS = 1_000_000  # steps
KEYS = [
    *SHIPPED_DATA, "--checkpoint.enable=true", "--checkpoint.memory_interval=10", "--metrics.log_freq=1",
    "--metrics.detail_freq=0", "--generation.prompts=[]", "--training.same_bits_on_any_ranks",
    f"--lr_scheduler.total_steps={ENDLESS}",
]  # fmt: skip
POLL_S = 0.05
STUCK_S = 300  # seconds without a new step after which the campaign gives up
IN_FLIGHT_S = 0.5  # seconds after a fault in which the ranks that are left may still log a step


class Fault(NamedTuple):
    """A planned fault. `at_s`: seconds after the first step. `rank`: of the node."""

    at_s: float
    kind: str
    node: int
    rank: int


def plan_faults(
    seed: int, seconds: float, mean_s: float, kinds: Sequence[str], num_nodes: int, num_ranks: int
) -> list[Fault]:
    """The faults of a campaign, in the order of their times."""
    rng, faults, at_s, kinds_left = random.Random(seed), list[Fault](), 0.0, list[str]()
    while (at_s := at_s + rng.expovariate(1 / mean_s)) < seconds:
        kinds_left = kinds_left or rng.sample(list(kinds), len(kinds))
        fault = Fault(round(at_s, 2), kinds_left.pop(), rng.randrange(num_nodes), rng.randrange(num_ranks))
        faults.append(fault)
    return faults


# ---- the nodes


@dataclass
class Nodes:
    """The nodes of a run. `start`: starts the launcher of a node. `last_step`: the run has ended when it is
    saved. `restarts`: the launchers that were started again: time, node, and exit code of the one before."""

    start: Callable[[int], Launcher]
    num_nodes: int
    folder: Path
    last_step: int = ENDLESS
    frozen_s: float = 20.0
    restarts: list[dict[str, Any]] = field(default_factory=list)
    most_steps_of_a_copy: int = 0
    """The most steps that were logged between a copy or a save and the moment when it was seen complete."""

    def __post_init__(self) -> None:
        self.nodes = [self.start(number) for number in range(self.num_nodes)]
        self._frozen = dict[int, float]()  # when each frozen node is killed
        self._seen = set[int]()  # steps of copies and saves
        self._progress = (0, time.monotonic())

    def look(self) -> bool:
        """Start launchers again that have ended. Returns whether the run has ended."""
        for number, until in list(self._frozen.items()):
            if time.monotonic() > until:
                del self._frozen[number]
                self.nodes[number].close()
        has_ended = self._is_saved(self.last_step)
        codes = [node.launcher.poll() for node in self.nodes]
        for number, code in enumerate(codes):
            if code is not None and not has_ended:
                self.nodes[number].close()
                self.restarts.append({"time": time.time(), "node": number, "exit_code": code})
                self.nodes[number] = self.start(number)
        self._note_copies()
        self._check_progress()
        return has_ended and all(code is not None for code in codes)

    def copied(self) -> int:
        """The newest copy in memory that is complete on all nodes; 0 if there is none."""
        of_nodes = [set(node.copied) for node in self.nodes]
        return max(set.intersection(*of_nodes), default=0)

    def step(self) -> int:
        """The last logged step."""
        with suppress(OSError, ValueError, IndexError), open(self.folder / "metrics.jsonl", "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 16_384, 0))
            return int(json.loads(file.read().splitlines()[-1])["step"])
        return 0

    def _is_saved(self, step: int) -> bool:
        return (self.folder / f"checkpoint/step-{step}").exists()

    def _note_copies(self) -> None:
        saved = [step for step, _ in list_committed(self.folder / "checkpoint")]
        steps = {*saved, *(step for node in self.nodes for step in node.copied)}
        if new := steps - self._seen:
            self.most_steps_of_a_copy = max(self.most_steps_of_a_copy, self.step() - max(new))
            self._seen |= new

    def _check_progress(self) -> None:
        step, now = self.step(), time.monotonic()
        if step != self._progress[0]:
            self._progress = (step, now)
        elif now - self._progress[1] > STUCK_S:
            logs = "\n".join(f"node {i}:\n{node.log[-3000:]}" for i, node in enumerate(self.nodes))
            raise RuntimeError(f"no step for {STUCK_S} s after step {step}\n{logs}")

    def inflict(self, fault: Fault) -> bool:
        """Let the fault happen. Returns whether it has: ranks that are to be killed may not have started."""
        node = self.nodes[fault.node]
        if fault.node in self._frozen:
            return False
        if fault.kind in ("rank", "ranks"):
            ranks = node.ranks_alone()
            if len(ranks) <= fault.rank:
                return False
            send(signal.SIGKILL, ranks if fault.kind == "ranks" else [ranks[fault.rank]])
        elif fault.kind == "launcher":
            send(signal.SIGKILL, [node.launcher.pid])
        elif fault.kind == "frozen":
            send(signal.SIGSTOP, node.processes())
            self._frozen[fault.node] = time.monotonic() + self.frozen_s
        else:
            node.close()
            for folder in node.memory.iterdir():
                shutil.rmtree(folder)
        return True

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def send(number: int, pids: Sequence[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def running(nodes: Nodes) -> Iterator[float]:
    """The nodes once the first step is logged, until the end of the body. Yields the time of that step."""
    try:
        while nodes.step() == 0:
            time.sleep(POLL_S)
            nodes.look()
        yield time.time()
    finally:
        nodes.close()


def train_undisturbed(nodes: Nodes, seconds: float) -> int:
    """Train until the nodes are told to stop, `seconds` after the first step. Returns the last step."""
    with running(nodes) as began:
        while time.time() < began + seconds:
            time.sleep(POLL_S)
            nodes.look()
        if nodes.restarts:
            raise RuntimeError(f"a launcher has ended: {nodes.restarts}")
        nodes.nodes[0].launcher.terminate()
        codes = [node.launcher.wait(STUCK_S) for node in nodes.nodes]
        if set(codes) != {75}:
            raise RuntimeError(f"the launchers ended with {codes} when told to stop:\n{nodes.nodes[0].log}")
    return nodes.step()


def train_with_faults(nodes: Nodes, planned: Sequence[Fault]) -> list[dict[str, Any]]:
    """Train to the end while faults happen. Returns the faults with their times."""
    happened, left = list[dict[str, Any]](), list(planned)
    with running(nodes) as began:
        while not nodes.look():
            time.sleep(POLL_S)
            due = left and time.time() > began + left[0].at_s
            copied, now = nodes.copied(), time.time()
            if due and nodes.step() < nodes.last_step and nodes.inflict(left[0]):
                about = {**left.pop(0)._asdict(), "time": now, "copied": copied}
                print(json.dumps(about), flush=True)
                happened.append(about)
    return happened


# ---- what the run has recorded


def digests(folder: Path, step: int) -> dict[str, str]:
    """Digests of the weights and of the state after `step`, which is saved, and of the loss and the sequences
    of each step."""
    records = [(r["step"], r["train/loss"], r["data/batch_sha"]) for r in read_run(folder, "run").records]
    history = hashlib.sha256(json.dumps(records).encode()).hexdigest()
    return {**combine(digests_of_checkpoint(folder / f"checkpoint/step-{step}")), "losses": history}


def by_process(run: RecordedRun) -> list[list[Record]]:
    """The records of each process of rank 0, in the order of their times."""
    processes = list[list[Record]]()
    for record in sorted([*run.records, *run.superseded], key=record_time):
        if FIRST_STEP in record or not processes:
            processes.append([])
        processes[-1].append(record)
    return processes


def counted_until(processes: Sequence[list[Record]]) -> list[float]:
    """The last step of each process that no later process has taken again."""
    limits, limit = list[float](), float("inf")
    for process in reversed(processes):
        limits.append(limit)
        limit = min(limit, process[0]["step"] - 1)
    return limits[::-1]


def consequences(folder: Path, faults: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What the faults have cost, by the times of the records and by the report. `seconds`: of the campaign,
    which lasts until the run has recovered from all faults."""
    run = read_run(folder, "run")
    processes = by_process(run)
    began, last = record_time(processes[0][0]), record_time(processes[-1][-1])
    ended = min(max(began + seconds, record_time(processes[-1][0])), last)
    counted_s = sum(
        max(min(record_time(b), ended) - record_time(a), 0.0)
        for process, limit in zip(processes, counted_until(processes))
        for a, b in pairwise(process)
        if b["step"] <= limit
    )
    within = replace(
        run,
        records=[record for record in run.records if record_time(record) <= ended],
        superseded=[record for record in run.superseded if record_time(record) <= ended],
        events=[event for event in run.events if event_time(event) <= ended],
    )
    spent = timeline(within)
    return {
        "seconds": round(ended - began, 2),
        "seconds_of_all_steps": round(last - began, 2),
        "goodput": counted_s / (ended - began),
        "goodput_of_report": goodput_since_first_step(spent),
        "report": spent.seconds,
        "notes_of_report": spent.notes,
        "faults": [recovery(fault, processes) for fault in faults],
        "repeated": sum(int(a[-1]["step"] - b[0]["step"]) + 1 for a, b in pairwise(processes)),
        "starts": len(processes),
        "curve": [thinned(process, began) for process in processes],
    }


def recovery(fault: dict[str, Any], processes: Sequence[list[Record]]) -> dict[str, Any]:
    """A fault with its time since the first step; `seconds` until the next logged step, None if there was
    none; the step from which the run has resumed, and how many steps it has repeated."""
    since_first_step = {**fault, "time": round(fault["time"] - record_time(processes[0][0]), 2)}
    for before, process in pairwise(processes):
        if record_time(process[0]) > fault["time"] + IN_FLIGHT_S:
            resumed = int(process[0]["step"]) - 1
            return {
                **since_first_step,
                "seconds": round(record_time(process[0]) - fault["time"], 2),
                "resumed": resumed,
                "repeated": int(before[-1]["step"]) - resumed,
            }
    return {**since_first_step, "seconds": None}


def goodput_since_first_step(spent: Timeline) -> float:
    """The goodput of a timeline without the start of the first process."""
    return spent.seconds["training"] / (spent.total_s - spent.seconds.get("start", 0.0))


def thinned(process: Sequence[Record], began: float, every_s: float = 2.0) -> list[float]:
    """Seconds since `began` and step, in turns, of the first record, the last one, and some in between."""
    points = list[float]()
    for record in process:
        at_s = round(record_time(record) - began, 1)
        if not points or at_s >= points[-2] + every_s or record is process[-1]:
            points += [at_s, int(record["step"])]
    return points


def step_seconds(run: RecordedRun) -> float:
    """The median time from one record to the next."""
    times = [record_time(record) for record in run.records]
    return statistics.median(b - a for a, b in pairwise(times))


# ---- the programs


def on_this_machine(about: dict[str, Any], folder: Path, port: int, keys: list[str], number: int) -> Launcher:
    """Start the launcher of a node. `about`: the job and the nodes, as in the result."""
    nodes, ranks = about["nodes"], about["ranks"]
    shared = Path(os.environ.get("TITANLITE_SHM", "/dev/shm"))
    memory = shared / f"fault-campaign-{os.getpid()}-{number}"
    memory.mkdir(exist_ok=True)
    env = {"NGPU": str(ranks), "MAX_RESTARTS": "1000", "TITANLITE_SHM": str(memory)}
    if nodes > 1:
        conf = f"is_host={str(number == 0).lower()}"
        if about["keep_alive_s"]:
            conf += f",keep_alive_interval=1,keep_alive_max_attempt={about['keep_alive_s']}"
        env |= {"NNODES": str(nodes), "NODE_RANK": str(number), "RDZV_ENDPOINT": f"localhost:{port}"}
        env |= {"PET_RDZV_CONF": conf, "PET_LOCAL_ADDR": "localhost"}
        if torch.cuda.is_available():
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(number * ranks + i) for i in range(ranks))
    words = [
        about["config"], *KEYS, f"--job.dump_folder={folder}", f"--data.cache_dir={folder.parent / 'data'}",
        f"--compile.cache_dir={folder.parent / 'compiled'}", *about["overrides"], *keys,
    ]  # fmt: skip
    number_of_log = len(list(folder.parent.glob(f"{folder.name}-node-{number}-*.log")))
    return Launcher(words, env, folder.parent / f"{folder.name}-node-{number}-{number_of_log}.log")


def nodes_of(about: dict[str, Any], folder: Path, last_step: int = ENDLESS) -> Nodes:
    """Start all nodes of a run in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for log in folder.parent.glob(f"{folder.name}-node-*.log"):
        log.unlink()
    steps = [f"--training.steps={last_step}"]
    start = partial(on_this_machine, about, folder, free_port(), steps)
    return Nodes(start, about["nodes"], folder, last_step, about["frozen_s"])


def forget_memory(nodes: Nodes) -> None:
    for node in nodes.nodes:
        shutil.rmtree(node.memory, ignore_errors=True)


def undisturbed(options: argparse.Namespace, overrides: list[str]) -> None:
    """Train without faults and write the result."""
    about: dict[str, Any] = {
        "config": options.config, "overrides": overrides, "nodes": options.nodes, "ranks": options.ranks,
        "seconds": options.seconds, "keep_alive_s": options.keep_alive, "frozen_s": options.frozen,
    }  # fmt: skip
    folder = options.folder / "undisturbed"
    nodes = nodes_of(about, folder)
    try:
        steps = train_undisturbed(nodes, options.seconds)
    finally:
        forget_memory(nodes)
    run, env = read_run(folder, "run"), json.loads((folder / "env.json").read_text())
    spent = timeline(run)
    for private in ("command", "platform"):
        env.pop(private, None)
    about["undisturbed"] = {
        "steps": steps,
        "step_s": step_seconds(run),
        **digests(folder, steps),
        "seconds_of_all_steps": round(record_time(run.records[-1]) - record_time(run.records[0]), 2),
        "goodput_of_report": goodput_since_first_step(spent),
        "report": spent.seconds,
        "env": env,
    }
    about["campaigns"] = []
    write(options.output, about | {"environment": environment("torch")})
    print(json.dumps(about["undisturbed"]))


def faults(options: argparse.Namespace) -> None:
    """Train the job of a result with faults, and add the campaign to it."""
    about = json.loads(options.file.read_text())
    whole = about["undisturbed"]
    kinds = options.kinds or (SEVERAL_NODES if about["nodes"] > 1 else ONE_NODE)
    seconds = options.seconds or about["seconds"]
    planned = plan_faults(options.seed, seconds, options.mean, kinds, about["nodes"], about["ranks"])
    print(f"seed {options.seed}: {len(planned)} faults, {options.mean:g} s apart on average", flush=True)
    folder = options.folder / f"faults-{options.seed}"
    nodes = nodes_of(about, folder, whole["steps"])
    try:
        happened = train_with_faults(nodes, planned)
    finally:
        forget_memory(nodes)
    own = digests(folder, whole["steps"])
    campaign = {
        "seed": options.seed,
        "mean_s": options.mean,
        "planned": len(planned),
        "equal": {name: own[name] == whole[name] for name in own},
        **consequences(folder, happened, seconds),
        "launcher_restarts": [(r["node"], r["exit_code"]) for r in nodes.restarts],
        "most_steps_of_a_copy": nodes.most_steps_of_a_copy,
        **own,
        "environment": environment("torch"),
    }
    about["campaigns"].append(campaign)
    write(options.file, about)
    shown = ("equal", "seconds", "goodput", "goodput_of_report", "report", "repeated", "starts")
    print(json.dumps({key: campaign[key] for key in shown}, indent=1))
    if not all(campaign["equal"].values()):
        sys.exit("the state differs from that of the undisturbed run")


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    programs = parser.add_subparsers(dest="program", required=True)
    first = programs.add_parser("undisturbed")
    first.add_argument("config")
    first.add_argument("--nodes", type=int, default=2)
    first.add_argument("--ranks", type=int, default=2, help="ranks of each node")
    first.add_argument("--seconds", type=float, default=480)
    first.add_argument("--frozen", type=float, default=20, help="seconds that a frozen node is stopped")
    first.add_argument("--keep-alive", type=int, help="seconds after which a node is dead; torchrun's: 15")
    first.add_argument("--output", type=Path, required=True)
    second = programs.add_parser("faults")
    second.add_argument("file", type=Path)
    second.add_argument("--seed", type=int, default=1)
    second.add_argument("--mean", type=float, default=100, help="mean seconds between faults")
    second.add_argument("--seconds", type=float, help="in which faults come; by default those of FILE")
    second.add_argument("--kinds", type=lambda text: text.split(","))
    for program in (first, second):
        program.add_argument("--folder", type=Path, default=ROOT / "outputs/fault_campaign")
    third = programs.add_parser("draw")
    third.add_argument("file", type=Path)
    third.add_argument("--campaign", type=int, default=0)
    third.add_argument("--output", type=Path, default=ROOT / "assets/fault_campaign.svg")
    options, overrides = parser.parse_known_args()
    if options.program == "undisturbed":
        undisturbed(options, overrides)
    elif overrides:
        parser.error(f"unknown arguments: {overrides}")
    elif options.program == "faults":
        faults(options)
    else:
        campaign = json.loads(options.file.read_text())["campaigns"][options.campaign]
        options.output.write_text(picture(campaign))
        print(table(campaign))


if __name__ == "__main__":
    main()
