"""A run that is killed several times: the goodput of `titanlite report` is that of the test's own clock, and
`titanlite plan --mtbf` predicts it from the times of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, metrics_in
from titanlite import cli
from titanlite.checkpoint.commit import list_committed
from titanlite.report.recorded_run import read_run
from titanlite.report.timeline import timeline

INTERVAL, STEPS = 20, 150
KILLS = (45, 90, 135)  # 5, 10 and 15 steps after a save: half an interval, on average
WORDS = [
    "--training.global_batch_size=8", f"--training.steps={STEPS}", f"--checkpoint.interval={INTERVAL}",
    "--metrics.log_freq=1", "--metrics.detail_freq=0", "--metrics.sinks=[]", "--no-validation.enable",
    "--generation.prompts=[]",
]  # fmt: skip


@dataclass
class Process:
    """A process of the run, watched from outside. `set_up`: when it wrote the first line of its log, after
    its imports. `seen`: when the test saw each of its steps in metrics.jsonl."""

    resumed: int
    set_up: float
    seen: dict[int, float]
    ended: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, without the first."""
        first, last = min(self.seen), max(self.seen)
        return (self.seen[last] - self.seen[first]) / (last - first)


def train(folder: Path, cache: Path, kill_at: int | None) -> Process:
    """Train in a process, and kill it as soon as it has logged a step."""
    resumed = max((step for step, _ in list_committed(folder / "checkpoint")), default=0)
    log, num_starts = folder.parent / "log", count_starts(folder)
    command = [sys.executable, "-m", "titanlite.cli", "train", "debug", f"--job.dump_folder={folder}"]
    with open(log, "w") as file:
        child = subprocess.Popen(
            [*command, f"--data.cache_dir={cache}", *WORDS], cwd=ROOT, stdout=file, stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    set_up, seen = 0.0, dict[int, float]()
    try:
        while child.poll() is None:
            time.sleep(0.01)
            set_up = set_up or ("[rank0]" in log.read_text()) * time.time()
            # Until it has started, the file has records of steps that are trained again.
            if count_starts(folder) > num_starts and (folder / "metrics.jsonl").exists():
                for record in metrics_in(folder)[-1:]:
                    seen.setdefault(record["step"], time.time())
            if kill_at in seen:
                child.send_signal(signal.SIGKILL)
                child.wait()
    finally:
        child.kill()
    assert child.wait() == (0 if kill_at is None else -signal.SIGKILL), log.read_text()
    return Process(resumed, set_up, {step: at for step, at in seen.items() if step > resumed}, time.time())


def count_starts(folder: Path) -> int:
    """How many processes have begun to train in a run folder."""
    path = folder / "events.jsonl"
    events = path.read_text() if path.exists() else ""
    return events.count('"resumed"') + events.count('"started"')


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.run(["plan", "debug", *WORDS, "--json", *words]) == 0
    return dict(json.loads(capsys.readouterr().out)["goodput"])


@pytest.mark.full
def test_the_goodput_of_a_killed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, cache = tmp_path / "run", tmp_path / "cache"
    train(tmp_path / "warm", cache, 1)  # tokenises
    processes = [train(folder, cache, kill_at) for kill_at in (*KILLS, None)]
    assert [process.resumed for process in processes] == [0, 40, 80, 120]
    ends = [40, 80, 120, STEPS]  # the last step of each process that counts
    training_s = sum((end - p.resumed) * p.step_s for p, end in zip(processes, ends))
    again_s = sum((max(p.seen) - end) * p.step_s for p, end in zip(processes, ends))
    restarts_s = [min(b.seen.values()) - b.step_s - a.ended for a, b in pairwise(processes)]
    wall_s = processes[-1].ended - processes[0].set_up

    spent = timeline(read_run(folder, "run"))
    assert spent.goodput is not None
    assert spent.total_s == pytest.approx(wall_s, abs=3)
    assert spent.goodput == pytest.approx(training_s / wall_s, abs=0.06)
    assert spent.seconds["steps trained again"] == pytest.approx(again_s, rel=0.3)
    assert [restart.seconds for restart in spent.restarts] == pytest.approx(restarts_s, abs=2.0)
    assert training_s / wall_s < 0.9  # control: what was lost is more than the tolerance

    words = [f"--mtbf={wall_s / len(KILLS) / 3600:.9f}", f"--measured-run={folder}"]
    plan = planned(capsys, *words)
    assert set(plan["sources"].values()) == {"measured in run"}
    assert plan["configured"]["goodput"] == pytest.approx(spent.goodput, abs=0.08)
    for cause in ("steps trained again", "restarts"):
        share = spent.seconds[cause] / spent.total_s
        assert plan["configured"]["shares"][cause] == pytest.approx(share, abs=0.05), cause
    other = planned(capsys, *words, "--restart=30")  # control: not the time that was measured
    assert other["configured"]["goodput"] < spent.goodput - 0.15
