"""Faults at random times in a run on GPUs, of two nodes if there are two GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.fault_campaign import (
    ONE_NODE,
    SEVERAL_NODES,
    Nodes,
    consequences,
    digests,
    plan_faults,
    train_with_faults,
)
from tests.support.launcher import Node
from tests.support.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(sys.platform != "linux", reason="needs shared memory")]
STEPS, COPY_INTERVAL, SECONDS = 120, 10, 60
KEYS = (
    f"--training.steps={STEPS}", "--lr_scheduler.total_steps=200", "--training.same_bits_on_any_ranks",
    "--checkpoint.interval=100", f"--checkpoint.memory_interval={COPY_INTERVAL}",
)  # fmt: skip


def test_faults_at_random(tmp_path: Path, corpus: Path) -> None:
    num_nodes = min(torch.cuda.device_count(), 2)
    kinds, port = SEVERAL_NODES if num_nodes > 1 else ONE_NODE, free_port()
    planned = plan_faults(25, SECONDS, 12, kinds, num_nodes, num_ranks=1)
    assert {fault.kind for fault in planned} == set(kinds)

    def start(number: int) -> Node:
        environment = {"MAX_RESTARTS": "100", "STEP_S": "0.3", "CUDA_VISIBLE_DEVICES": str(number)}
        if num_nodes > 1:
            conf = f"keep_alive_interval=1,keep_alive_max_attempt=5,is_host={str(number == 0).lower()}"
            environment |= {"NNODES": "2", "NODE_RANK": str(number), "PET_RDZV_CONF": conf}
            environment["RDZV_ENDPOINT"] = f"localhost:{port}"
        return Node(tmp_path, corpus, KEYS, environment)

    nodes = Nodes(start, num_nodes, tmp_path / "run", STEPS, frozen_s=7)
    happened = train_with_faults(nodes, planned)
    result = consequences(tmp_path / "run", happened, SECONDS)
    assert len(happened) == len(planned)
    for fault in result["faults"]:
        assert fault["seconds"] is not None, f"not recovered from {fault}"
        assert fault["resumed"] >= fault["copied"], f"a complete copy is lost: {fault}"

    (tmp_path / "undisturbed").mkdir()
    whole = Node(tmp_path / "undisturbed", corpus, KEYS, {"MAX_RESTARTS": "1", "CUDA_VISIBLE_DEVICES": "0"})
    try:
        assert whole.end() == 0, whole.log
    finally:
        whole.close()
    assert digests(tmp_path / "run", STEPS) == digests(whole.job.folder, STEPS)
