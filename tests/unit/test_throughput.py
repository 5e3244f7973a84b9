"""benchmarks/throughput.py: the peers' log lines, torchtitan's repetition after a failure, and which of the
configurations the ratios are to. The models of benchmarks/olmo_core_peer are as large as titanlite's."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import titanlite.job  # noqa: F401  (registers the model families)
from benchmarks import throughput
from benchmarks.olmo_core_peer import PARAMETERS, compat
from benchmarks.throughput import RESERVED, TPS
from titanlite.models.base import ModelFamily

LOG = """torchtitan_peer: torch 2.11.0+cu130: set_timeout is _set_pg_timeout
[titan] 2026-11-27 10:00:00,000 - root - INFO - step:  1  loss: 12.01  grad_norm:  3.9  memory: 60.10GiB(43.0%)  tps: 987
[titan] 2026-11-27 10:00:01,000 - root - INFO - Recorded CUDA graph
[titan] 2026-11-27 10:00:09,000 - root - INFO - step: 15  loss: \x1b[32m11.90\x1b[0m  grad_norm:  1.2  memory: 66.93GiB(47.9%)  tps: 63,140  mfu: 52%
[titan] 2026-11-27 10:00:09,000 - root - INFO - step: 20  loss: 11.85  grad_norm:  1.1  memory: 66.93GiB(47.9%)  tps: 63,150  mfu: 52%
"""  # noqa: E501
OPTIONS = argparse.Namespace(ngpu=1, steps=20, skip=10, peer=None)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, str]]:
    """Exit codes and logs of the next runs of a peer. What is left over was not run."""
    left: list[tuple[int, str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        code, log = left.pop(0)
        if "--training.disable_cuda_graphs" in command:
            log = log.replace("Recorded CUDA graph", "")
        return subprocess.CompletedProcess(command, code, log)

    for program, version in {"torchtitan": "0.3.0", "ai2_olmo_core": "3.0.0"}.items():
        about = tmp_path / program / f"{program}-{version}.dist-info/METADATA"
        about.parent.mkdir(parents=True)
        about.write_text(f"Metadata-Version: 2.1\nName: {program.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.setenv("TORCHTITAN_PEER", str(tmp_path / "torchtitan"))
    monkeypatch.setenv("OLMO_CORE_PEER", str(tmp_path / "ai2_olmo_core"))
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


def test_ratios_to_each_program(answers: list[tuple[int, str]]) -> None:
    fast, slow = LOG.replace("63,1", "65,1"), LOG.replace("63,1", "31,5")
    answers += [(0, LOG), (0, slow), (0, slow.replace("31,5", "30,0")), (1, "out of memory"), (0, fast)]
    peers = ["flex", "olmo_core:1b", "olmo_core:1b --x=1", "olmo_core:8b", "sdpa"]
    runs = [throughput.measure_peer(OPTIONS, peer) for peer in peers]
    assert answers == []  # the failure was not repeated: OLMo-core has no CUDA graphs to leave out
    ours: dict[str, Any] = {"trainer": "titanlite", "counted": [{TPS: 70000.0, RESERVED: 40.0}]}
    options = argparse.Namespace(**vars(OPTIONS) | {"peer": peers, "config": "a.toml", "before": None})
    result = throughput.summary(options, [], [*runs, ours])
    assert (result["torchtitan"], result["olmo_core"]) == ("0.3.0", "3.0.0")
    assert {peer: medians["program"] for peer, medians in result["peers"].items()} == {
        "flex": "torchtitan", "sdpa": "torchtitan",
        "olmo_core:1b": "olmo_core", "olmo_core:1b --x=1": "olmo_core",
    }  # fmt: skip
    assert result["ratios_to"] == {
        "torchtitan": {"peer": "sdpa", TPS: 70000 / 65145, RESERVED: 40 / 66.93},
        "olmo_core": {"peer": "olmo_core:1b", TPS: 70000 / 31545, RESERVED: 40 / 66.93},
    }


def test_the_command_of_a_program(answers: list[tuple[int, str]]) -> None:
    command, env = throughput.peer_command("olmo_core:llama3_1b --model.n_layers=2", 4, "out", "--a", "b")
    assert command[-8:] == [
        "benchmarks.olmo_core_peer.train", "--config", "llama3_1b", "--dump_folder", "out", "--a", "b",
        "--model.n_layers=2",
    ]  # fmt: skip
    assert "ai2_olmo_core" in env["PYTHONPATH"]
    control, env = throughput.peer_command("llama3_1b --module a:b", 4, "out")
    assert "benchmarks.torchtitan_peer.train" in control
    assert "ai2_olmo_core" not in env["PYTHONPATH"]
    with pytest.raises(SystemExit, match="unknown program olmo; choose torchtitan or olmo_core"):
        throughput.peer_command("olmo:llama3_1b", 1, "out")


@pytest.mark.parametrize("config", PARAMETERS)
def test_titanlites_parameters(config: str) -> None:
    untied = {"vocab_size": 128256, "tie_word_embeddings": False}
    family, flavor, overrides = {
        "llama3_125m": ("llama3", "125M", untied),
        "llama3_1b": ("llama3", "1B", untied),
        "llama3_8b": ("llama3", "8B", {}),
        "qwen3_0_6b": ("qwen3", "0.6B", {}),
        "qwen3_30b_a3b_8layers": ("qwen3_moe", "30B-A3B", {"n_layers": 8, "vocab_size": 128256}),
    }[config]
    choice: Any = ModelFamily.choices[family]
    model = choice(flavor=flavor, overrides=overrides).build_on_meta()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[config]


@pytest.mark.parametrize("trans_b", [False, True])
def test_the_stand_in_for_grouped_gemm(trans_b: bool) -> None:
    sizes = [8, 0, 24]
    rows = torch.randn(32, 16, requires_grad=True)
    weights = torch.randn(3, *((24, 16) if trans_b else (16, 24)), requires_grad=True)
    products = compat.grouped_mm(rows, weights, torch.tensor(sizes), trans_b=trans_b)
    groups = zip(rows.split(sizes), weights.transpose(1, 2) if trans_b else weights)
    expected = torch.cat([group @ weight for group, weight in groups])
    torch.testing.assert_close(products, expected)
    loss, same = products.square().sum(), expected.square().sum()
    torch.testing.assert_close(
        torch.autograd.grad(loss, (rows, weights)), torch.autograd.grad(same, (rows, weights))
    )


def test_a_result_repeats_its_peers() -> None:
    reports = [{"step": step} for step in (10, 15, 20)]
    ours = {"trainer": "titanlite", "reports": reports, "counted": reports[1:]}
    result = {"config": "debug.toml", "overrides": ["--a=1"], "ngpu": 2, "medians": {"runs": 3}}
    theirs = [{"trainer": "torchtitan", "peer": "flex"}, {"trainer": "olmo_core", "peer": "olmo_core:1b"}]
    new = result | {"peers": {"sdpa": {}}, "runs": [*theirs, ours]}
    asked = dict.fromkeys(("ngpu", "rounds", "steps", "skip", "peer")) | {"config": "old.json"}
    options = argparse.Namespace(**asked)
    assert throughput.repeat(options, new) == ["--a=1"]
    repeated = {"config": "train_configs/debug.toml", "ngpu": 2, "rounds": 3, "steps": 20, "skip": 10}
    assert vars(options) == repeated | {"peer": ["flex", "olmo_core:1b"]}
    alone = argparse.Namespace(**asked)
    throughput.repeat(alone, result | {"runs": [ours]})
    assert alone.peer is None
    old = result | {"peer_options": "--model.flavor 1B", "runs": [ours]}
    with pytest.raises(SystemExit, match=r"^old\.json is beside torchtitan 0\.2\.2, .*pass --peer"):
        throughput.repeat(argparse.Namespace(**asked), old)
    named = argparse.Namespace(**asked | {"peer": ["llama3_1b"]})
    assert throughput.repeat(named, old) == ["--a=1"]
    assert named.peer == ["llama3_1b"]
