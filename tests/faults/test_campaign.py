"""Faults at random times in a run of two nodes: it recovers from each, and ends with the weights of a run
that was not disturbed, bit by bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.fault_campaign import (
    SEVERAL_NODES,
    Nodes,
    consequences,
    digests,
    plan_faults,
    train_with_faults,
)
from tests.support.jobs import make_job
from tests.support.launcher import Node
from tests.support.ports import free_port
from titanlite.train import train

pytestmark = [pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="needs shared memory")]
STEPS, COPY_INTERVAL, SECONDS, SEED = 100, 10, 36, 19
KEYS = (
    f"--training.steps={STEPS}", "--lr_scheduler.total_steps=200", "--training.same_bits_on_any_ranks",
    "--checkpoint.interval=60", f"--checkpoint.memory_interval={COPY_INTERVAL}",
)  # fmt: skip
# AdamW that adds the least possible amount to one weight before one step.
PERTURBED = """
import os
from dataclasses import dataclass
import torch
from titanlite.optim.adamw import AdamW

@dataclass(frozen=True, kw_only=True)
class Perturbed(AdamW, name="perturbed"):
    def build(self, model, mesh):
        optimizer, steps = super().build(model, mesh), []
        def before(*args):
            steps.append(0)
            if len(steps) == int(os.environ["PERTURBED_STEP"]):
                weight = next(p for p in model.parameters()).data
                weight = getattr(weight, "_local_tensor", weight)
                weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(torch.inf))
        optimizer.register_step_pre_hook(before)
        return optimizer
"""


def uninterrupted(folder: Path, corpus: Path, name: str, *keys: str) -> dict[str, str]:
    """The digests of the run on one rank, which is as quick as it can be."""
    job = make_job(folder, corpus, *KEYS, "--checkpoint.memory_interval=0", *keys, name=name)
    assert train(job) == 0
    return digests(job.folder, STEPS)


def test_faults_at_random(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    planned = plan_faults(SEED, SECONDS, 7, SEVERAL_NODES, num_nodes=2, num_ranks=1)
    assert {fault.kind for fault in planned} == set(SEVERAL_NODES)

    def start(number: int) -> Node:
        conf = f"keep_alive_interval=1,keep_alive_max_attempt=5,is_host={str(number == 0).lower()}"
        own = {"NODE_RANK": str(number), "PET_RDZV_CONF": conf}
        common = {
            "NNODES": "2",
            "RDZV_ENDPOINT": f"localhost:{port}",
            "MAX_RESTARTS": "100",
            "STEP_S": "0.25",
        }
        return Node(tmp_path, corpus, KEYS, common | own)

    folder = make_job(tmp_path, corpus, *KEYS).folder
    nodes = Nodes(start, 2, folder, STEPS, frozen_s=7)
    happened = train_with_faults(nodes, planned)
    result = consequences(folder, happened, SECONDS)
    print(json.dumps(result), nodes.restarts, nodes.most_steps_of_a_copy)

    assert len(happened) == len(planned)
    assert result["starts"] > 1
    steps_of_a_copy = nodes.most_steps_of_a_copy
    for fault in result["faults"]:
        assert fault["seconds"] is not None, f"not recovered from {fault}"
        assert fault["resumed"] >= fault["copied"], f"a complete copy is lost: {fault}"
        # The next copy begins `COPY_INTERVAL` steps after the one before, and counts when it is complete.
        # That of the copy in flight is not known: it is taken to be at most twice that of the longest, and
        # the machine may be busy for five seconds.
        assert fault["repeated"] <= COPY_INTERVAL + 2 * (steps_of_a_copy + 1) + 5 / 0.25, fault
    assert result["goodput"] == pytest.approx(result["goodput_of_report"], abs=0.08)

    whole = uninterrupted(tmp_path, corpus, "whole")
    assert digests(folder, STEPS) == whole
    # Control: one weight that differs by the least possible amount for one step is noticed.
    (tmp_path / "perturbed.py").write_text(PERTURBED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PERTURBED_STEP", str(STEPS // 2))
    perturbed = ('--job.imports=["perturbed"]', "--optimizer.name=perturbed")
    other = uninterrupted(tmp_path, corpus, "other", *perturbed)
    assert all(other[name] != whole[name] for name in ("weights", "state"))
