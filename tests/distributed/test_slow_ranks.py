"""A rank that is slow is named in the log with its host, and again when it has recovered; ranks that are
equally fast are not. The times of a step on several layouts."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.support.jobs import make_job, metrics_of
from tests.support.runs import UNTIED, train_on_rank
from tests.support.tiers import full
from titanlite.data.loader import SequenceLoader
from titanlite.job import Job
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.train import train

SLOW_S = 0.15
PLACES = {"data": (SequenceLoader, "__next__"), "host": (ShardedModel, "model_inputs")}


def job_of(folder: Path, corpus: Path, size: int, steps: int, log_freq: int) -> Job:
    length = [f"--training.steps={steps}", f"--lr_scheduler.total_steps={steps}"]
    quiet = ["--validation.enable=false", "--generation.freq=0", "--checkpoint.enable=false"]
    layout = ["--training.local_batch_size=2", f"--metrics.log_freq={log_freq}"]
    return make_job(folder, corpus, *length, *quiet, *layout, world_size=size)


def train_slowly(job: Job, place: str, slow_steps: range, slow_ranks: range) -> list[str]:
    """Train, with ranks that sleep in a method in some of their steps. Returns this rank's warnings."""
    owner, name = PLACES[place]
    original, micro_batches = getattr(owner, name), 0

    def slowly(self: Any, *args: Any) -> Any:
        nonlocal micro_batches
        micro_batches += 1
        step = 1 + (micro_batches - 1) * dist.get_world_size() * job.training.local_batch_size // 8
        if dist.get_rank() in slow_ranks and step in slow_steps:
            time.sleep(SLOW_S)
        return original(self, *args)

    with patch.object(owner, name, slowly), patch("titanlite.metrics.slow_ranks.logger") as logger:
        train(job)
    return [call.args[0] for call in logger.warning.call_args_list]


SENTENCES = {
    "data": "most of the difference is its wait for data",
    "host": "its host issues the work more slowly",
}


@pytest.mark.parametrize(
    ("size", "place", "log_freq"),
    [full(2, "data", 2), full(2, "data", 10), full(2, "host", 10), full(4, "data", 10), full(4, "host", 10)],
)
def test_a_slow_rank_is_named(
    run_on: Any, tmp_path: Path, corpus: Path, size: int, place: str, log_freq: int
) -> None:
    """It is slow in the steps of two reports. The second one names it; two later it has recovered, or a few
    more on a busy machine."""
    job = job_of(tmp_path, corpus, size, steps=8 * log_freq, log_freq=log_freq)
    by_rank = run_on(size, train_slowly, job, place, range(log_freq + 1, 3 * log_freq + 1), range(1, 2))
    slow, recovered = by_rank[0]
    assert slow.startswith(f"rank 1 on {socket.gethostname()} is slow: "), slow
    assert slow.endswith(SENTENCES[place])
    assert recovered == f"rank 1 on {socket.gethostname()} is as fast as the other ranks again"
    assert by_rank[1:] == [[]] * (size - 1)  # rank 0 speaks for all
    rows = {row["step"]: row for row in metrics_of(job)}
    for step in (2 * log_freq, 3 * log_freq):
        assert rows[step]["time/slowest_rank"] == 1
        assert rows[step]["time/slowest_rank_pct"] > 20


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_equally_fast_are_not_named(
    run_on: Any, tmp_path: Path, corpus: Path, size: int
) -> None:
    """All ranks sleep in each step, so that what a busy machine adds to one rank's steps is small compared
    with the sleep. So this does not show that short steps on a busy machine raise no false alarm."""
    job = job_of(tmp_path, corpus, size, steps=30, log_freq=3)
    assert run_on(size, train_slowly, job, "data", range(1, 31), range(size)) == [[]] * size
    assert len(metrics_of(job)) == 11


@pytest.mark.full
@pytest.mark.parametrize(
    ("axis", "phases"),
    [
        ("pipeline", {"forward_backward"}),
        ("tensor", {"forward", "backward"}),
        (None, {"forward", "backward"}),
    ],
)
def test_the_times_of_a_step(
    run_on: Any, tmp_path: Path, corpus: Path, axis: str | None, phases: set[str]
) -> None:
    """Waits lie within the phases, and the phases within the step."""
    layout = [f"--parallelism.{axis}_parallel_degree=2"] if axis else []
    run_on(2, train_on_rank, tmp_path, corpus, [UNTIED, *layout, "--metrics.detail_freq=4"], "run", 2)
    rows = [row for row in metrics_of(make_job(tmp_path, corpus, world_size=2)) if "time/optimizer_s" in row]
    assert [row["step"] for row in rows] == [1, 4, 8]
    for row in rows:
        parts = [row[f"time/{phase}_s"] for phase in (*phases, "data", "optimizer")]
        assert min(parts) > 0
        assert 0 < sum(parts) <= row["time/step_s"]
        assert 0 < row["time/communication_wait_s"] < row["time/step_s"]
        assert not {"time/forward_s", "time/forward_backward_s"} <= row.keys()
