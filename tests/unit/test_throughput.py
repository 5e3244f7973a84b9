"""benchmarks/throughput.py: torchtitan's log lines, its repetition after a failure, and which of its
configurations the ratios are to."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import throughput
from benchmarks.throughput import RESERVED, TPS

LOG = """torchtitan_peer: torch 2.11.0+cu130: set_timeout is _set_pg_timeout
[titan] 2026-11-27 10:00:00,000 - root - INFO - step:  1  loss: 12.01  grad_norm:  3.9  memory: 60.10GiB(43.0%)  tps: 987
[titan] 2026-11-27 10:00:01,000 - root - INFO - Recorded CUDA graph
[titan] 2026-11-27 10:00:09,000 - root - INFO - step: 15  loss: \x1b[32m11.90\x1b[0m  grad_norm:  1.2  memory: 66.93GiB(47.9%)  tps: 63,140  mfu: 52%
[titan] 2026-11-27 10:00:09,000 - root - INFO - step: 20  loss: 11.85  grad_norm:  1.1  memory: 66.93GiB(47.9%)  tps: 63,150  mfu: 52%
"""  # noqa: E501
OPTIONS = argparse.Namespace(ngpu=1, steps=20, skip=10, peer=None)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, str]]:
    """Exit codes and logs of the next runs of torchtitan. What is left over was not run."""
    left: list[tuple[int, str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        code, log = left.pop(0)
        if "--training.disable_cuda_graphs" in command:
            log = log.replace("Recorded CUDA graph", "")
        return subprocess.CompletedProcess(command, code, log)

    monkeypatch.setenv("TORCHTITAN_PEER", str(tmp_path))
    monkeypatch.setattr(throughput.subprocess, "run", run)
    return left


def test_steps_of_torchtitans_log() -> None:
    first, *others = throughput.peer_reports(LOG)
    assert first == {"step": 1, "train/loss": 12.01, RESERVED: 60.1, TPS: 987.0}
    assert [(report["step"], report[TPS]) for report in others] == [(15, 63140.0), (20, 63150.0)]


def test_a_failed_run_is_repeated_once_without_cuda_graphs(answers: list[tuple[int, str]]) -> None:
    answers += [(1, "CUDA error"), (0, LOG), (0, LOG)]
    repeated = throughput.measure_peer(OPTIONS, "llama3_1b")
    assert "CUDA error" in repeated["failed_with_cuda_graphs"]
    assert not repeated["cuda_graphs"]
    assert "failed" not in repeated
    control = throughput.measure_peer(OPTIONS, "llama3_1b")
    assert control["cuda_graphs"]
    assert "failed_with_cuda_graphs" not in control
    answers += [(1, "CUDA error"), (1, "out of memory")]
    assert "out of memory" in throughput.measure_peer(OPTIONS, "llama3_1b")["failed"]
    assert answers == []


def test_ratios_are_to_the_fastest_configuration_that_ran(answers: list[tuple[int, str]]) -> None:
    faster = LOG.replace("63,1", "65,1")
    answers += [(0, LOG), (0, faster), (1, ""), (1, ""), (0, LOG), (0, LOG.replace("63,1", "95,1"))]
    runs = [throughput.measure_peer(OPTIONS, peer) for peer in ("flex", "sdpa", "broken", "flex")]
    peers = throughput.peer_medians(runs)
    assert {peer: medians["runs"] for peer, medians in peers.items()} == {"flex": 2, "sdpa": 1}
    assert throughput.fastest(peers) == "sdpa"
    runs.append(throughput.measure_peer(OPTIONS, "flex"))
    assert throughput.fastest(throughput.peer_medians(runs)) == "sdpa"  # the median, not the fastest run


def test_a_result_repeats_its_configurations_of_torchtitan() -> None:
    reports = [{"step": step} for step in (10, 15, 20)]
    ours = {"trainer": "titanlite", "reports": reports, "counted": reports[1:]}
    result = {"config": "debug.toml", "overrides": ["--a=1"], "ngpu": 2, "medians": {"runs": 3}}
    new = result | {"peers": {"sdpa": {}}, "runs": [{"trainer": "torchtitan", "peer": "flex"}, ours]}
    asked = dict.fromkeys(("ngpu", "rounds", "steps", "skip", "peer")) | {"config": "old.json"}
    options = argparse.Namespace(**asked)
    assert throughput.repeat(options, new) == ["--a=1"]
    repeated = {"config": "train_configs/debug.toml", "ngpu": 2, "rounds": 3, "steps": 20, "skip": 10}
    assert vars(options) == repeated | {"peer": ["flex"]}
    alone = argparse.Namespace(**asked)
    throughput.repeat(alone, result | {"runs": [ours]})
    assert alone.peer is None
    old = result | {"peer_options": "--model.flavor 1B", "runs": [ours]}
    with pytest.raises(SystemExit, match=r"^old\.json is beside torchtitan 0\.2\.2, .*pass --peer"):
        throughput.repeat(argparse.Namespace(**asked), old)
    named = argparse.Namespace(**asked | {"peer": ["llama3_1b"]})
    assert throughput.repeat(named, old) == ["--a=1"]
    assert named.peer == ["llama3_1b"]
