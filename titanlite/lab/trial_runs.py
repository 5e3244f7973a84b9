"""The runs of a search or a ladder: started, stopped, and recorded once they have ended.

Each run is an ordinary run in its own folder, started as `titanlite launch` with one or more GPUs to
itself. The record, such as search.json, lets the same command continue after any stop."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.run_identity import differences
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.files import make_folder, write_atomically
from titanlite.job import Job
from titanlite.log import tell
from titanlite.report.page import report
from titanlite.report.recorded_run import read_run
from titanlite.report.timeline import duration
from titanlite.runtime.environment import environment_of_run, visible_gpus
from titanlite.runtime.signals import Stopped, StopRequests, stop_requests
from titanlite.storage import local_path, parse_path

LOSS = "eval/loss"
DIVERGED = 4  # exit code of a run
LOOK_S = 0.2  # seconds between two looks at the processes
STATUS_S = 60.0  # seconds between two lines on runs under way
SAVE_S = 600.0  # seconds that stopped runs have to save, before they are killed


class RunFailed(RuntimeError):
    """A run crashed or was refused."""

    exit_code = 1


class TrialRun(NamedTuple):
    """A run to train. `name`: its folder, below the folder of all runs. `arguments`: its TOML file and
    overrides, which set that folder. `label`: its settings, for the log."""

    name: str
    arguments: list[str]
    label: str


class Running(NamedTuple):
    """A run under way. `slot`: the ids of its GPUs; empty on a CPU. `started`: time.monotonic()."""

    process: subprocess.Popen[bytes]
    slot: str
    started: float


def beside_run(job: Job, ending: str) -> Path:
    """The path of a file or folder of `tune` beside the run folder. Raises ConfigError for a run folder in a
    bucket."""
    return local_path(parse_path(f"{job.job.dump_folder}{ending}"), "titanlite tune (see --output)")


@dataclass(frozen=True)
class TrialRecord:
    """The runs that have ended, in the file KIND.json of the folder. `kind`: what the runs are together, such
    as "search". `asked`: what a command must have in common with the one that it continues; JSON values.
    `results`: loss and seconds, by the name of the run; the loss is None if the run diverged."""

    kind: str
    folder: Path
    asked: dict[str, Any]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.kind}.json"

    def read(self) -> None:
        """Take over the results of an interrupted command that asked for the same. Raises ConfigError."""
        if not self.path.exists():
            return
        recorded = json.loads(self.path.read_text(encoding="utf-8"))
        results = recorded.pop("results")
        if changed := [key for key, _, _ in differences(recorded, self.asked)]:
            raise ConfigError(
                f"{self.folder} holds another {self.kind}, with another {', '.join(changed)}; name another "
                "folder with --output"
            )
        self.results.update(results)

    def write(self) -> None:
        make_folder(self.folder)
        write_atomically(self.path, json.dumps(self.asked | {"results": self.results}, indent=1) + "\n")

    def write_report(self, names: Sequence[str]) -> Path:
        """Write a report on some of the runs. Returns its path."""
        page, folders = self.folder / "report.html", [self.folder / name for name in names]
        write_atomically(page, report([read_run(folder, folder.name) for folder in folders]))
        return page

    def loss(self, name: str) -> float:
        """The loss of a run that has ended; infinite if it diverged."""
        loss = self.results[name]["loss"]
        return math.inf if loss is None else float(loss)


def keys_of(job: Job) -> dict[str, Any]:
    """All keys of a job but its run folder, as JSON values."""
    tree = json.loads(json.dumps(toml.as_tree(job), default=str))
    del tree["job"]["dump_folder"]
    return dict(tree)


def groups_of_gpus(size: int) -> list[str]:
    """The ids of the GPUs that each run under way has to itself; one empty text on a CPU. Raises ConfigError
    if there are fewer than `size` GPUs."""
    ids = visible_gpus(torch.cuda.device_count())
    if ids and size > len(ids):
        raise ConfigError(f"command line, --gpus-per-trial: {size}, but there are {len(ids)} GPUs")
    return [",".join(ids[i : i + size]) for i in range(0, len(ids) - size + 1, size)] or [""]


def start_run(arguments: Sequence[str], num_gpus: int, slot: str, log: Path) -> subprocess.Popen[bytes]:
    """Start `titanlite launch` with the GPUs of a slot, one rank per GPU. Its output is added to `log`.
    `arguments`: a TOML file and overrides. Call this from the main thread: on Linux, the run gets SIGTERM
    when the calling thread ends, also if this process is killed."""
    command = [sys.executable, "-m", "titanlite.cli", "launch", f"--nproc-per-node={num_gpus}", *arguments]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment_of_run(slot))


@contextmanager
def stoppable() -> Iterator[StopRequests]:
    """Note signals in the body, which starts runs and looks at `stop` of the requests while they train."""
    with stop_requests() as requests:
        requests.begin(stop_file=None)
        yield requests


def end_runs(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """End runs, and wait for them: SIGTERM, which lets them save, and SIGKILL for those that have not ended
    after `seconds`. The launcher's ranks end with it."""
    for process in processes:
        process.send_signal(signal.SIGTERM)  # nothing for a process that has ended
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            tell(f"process {process.pid} has not ended {seconds:.0f} s after SIGTERM: killed")
            process.kill()
            process.wait()


def last_line(log: Path) -> str:
    """`: ` and the last line of a run's log that is not blank, for messages; nothing if there is none."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].removeprefix('titanlite: ')}" if lines else ""


class Trainer:
    """Trains runs of `num_gpus` processes each, as many at a time as there are groups of GPUs; on a CPU one.
    `requests`: of stoppable()."""

    def __init__(self, record: TrialRecord, num_gpus: int, requests: Any):
        self._record, self._num_gpus, self._requests = record, num_gpus, requests
        self._free = groups_of_gpus(num_gpus)
        self._running = dict[str, Running]()
        self._told_at = time.monotonic()

    def train(self, runs: Sequence[TrialRun], prefix: str = "") -> None:
        """Train the runs that have no result yet. `prefix`: begins the log's line on each. Raises Stopped and
        RunFailed."""
        record, failed = self._record, list[str]()
        waiting = [run for run in runs if run.name not in record.results]
        total = len(waiting)
        try:
            while waiting or self._running:
                while waiting and self._free and not self._requests.stop:
                    self._start(waiting.pop(0), f"{prefix}run {total - len(waiting)} of {total}")
                failed += [text for text in map(self._ended, list(self._running)) if text]
                if self._requests.stop:
                    break
                if time.monotonic() - self._told_at >= STATUS_S:
                    self._tell_status()
                time.sleep(LOOK_S)
        finally:  # after an error, too, no run is left without its parent
            self._stop()
        if self._requests.stop:
            raise Stopped(f"stopped; the same command continues the {record.kind} in {record.folder}")
        if failed:
            raise RunFailed(f"{'; '.join(failed)}; the same command trains what is left")

    def _start(self, run: TrialRun, number: str) -> None:
        slot = self._free.pop(0)
        log = self._record.folder / f"{run.name}.log"
        make_folder(log.parent)
        self._record.write()
        process = start_run(run.arguments, self._num_gpus, slot, log)
        self._running[run.name] = Running(process, slot, time.monotonic())
        tell(f"{number}: {run.label}; log: {log}")

    def _ended(self, name: str) -> str | None:
        """TrialRecord the result of a run that has ended. Returns what was wrong with it."""
        code = self._running[name].process.poll()
        if code is None:
            return None
        running, folder = self._running.pop(name), self._record.folder / name
        self._free.append(running.slot)
        if code == Stopped.exit_code and self._requests.stop:
            return None
        if code not in (0, DIVERGED):
            return f"{name} ended with exit code {code}, see {folder}.log"
        seconds = time.monotonic() - running.started
        loss = read_run(folder, name).last(LOSS) if code == 0 else None
        self._record.results[name] = {"loss": loss, "seconds": round(seconds, 1)}
        self._record.write()
        tell(f"{name}: {'diverged' if loss is None else f'{loss:.4f}'} after {duration(seconds)}")
        return None

    def _tell_status(self) -> None:
        self._told_at = time.monotonic()
        for name in self._running:
            with suppress(ConfigError):  # there are no metrics yet
                record = read_run(self._record.folder / name, name).records[-1]
                tell(f"{name}: step {record['step']}, loss {record.get('train/loss', math.nan):.4f}")

    def _stop(self) -> None:
        """Stop the runs under way, which save, and record those that had come to their end."""
        end_runs([running.process for running in self._running.values()], SAVE_S)
        for name in list(self._running):
            self._ended(name)
