"""The guard on GPUs: fused AdamW decides inside its kernel, also compiled and over NCCL; outliers are found
without synchronising."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.gpu import shards, trained
from titanlite.checkpoint.commit import list_committed
from titanlite.checkpoint.state import non_finite
from titanlite.host_copy import HostCopy
from titanlite.metrics.guard import Guard, StepGuard

pytestmark = pytest.mark.gpu
BAD = """
from tests.support.non_finite import bad_steps
faults = bad_steps({{2, 3, 5}}, "{fault}")
faults.__enter__()
"""
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def shards_after(folder: Path, corpus: Path, fault: str, ngpu: int, *overrides: str) -> dict[str, bytes]:
    """The last checkpoint of a run with that fault in three of its steps."""
    (tmp := folder / fault).mkdir()
    (tmp / f"bad_{fault}.py").write_text(BAD.format(fault=fault))
    keys = [f'--job.imports=["bad_{fault}"]', "--model.overrides.tie_word_embeddings=false", *overrides]
    log = trained(tmp, corpus, *keys, ngpu=ngpu)
    assert ("is skipped" in log) == (fault != "nothing")
    return shards(tmp / "run", 8)


@pytest.mark.parametrize(
    ("ngpu", "overrides"),
    [
        (1, []),
        (1, ["--compile.enable"]),
        (1, ["--training.enable_cpu_offload"]),
        pytest.param(2, [], marks=TWO),
        pytest.param(2, ["--compile.enable", "--parallelism.tensor_parallel_degree=2"], marks=TWO),
        pytest.param(2, ["--parallelism.pipeline_parallel_degree=2"], marks=TWO),
        pytest.param(
            2, ["--parallelism.context_parallel_degree=2", "--training.deterministic=false"], marks=TWO
        ),
    ],
    ids=["one", "compiled", "offload", "dp_shard", "tp, compiled", "pp", "cp"],
)
def test_a_bad_step_is_one_that_did_nothing(
    tmp_path: Path, corpus: Path, ngpu: int, overrides: list[str]
) -> None:
    wanted = shards_after(tmp_path, corpus, "nothing", ngpu, *overrides)
    assert wanted
    for fault in ("gradient", "loss"):
        assert shards_after(tmp_path, corpus, fault, ngpu, *overrides) == wanted, fault


def test_a_run_that_diverges_ends_with_4(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "bad_gradient.py").write_text(BAD.replace("2, 3, 5", "4, 5").format(fault="gradient"))
    log = trained(
        tmp_path, corpus, '--job.imports=["bad_gradient"]', "--guard.max_consecutive=2",
        "--checkpoint.interval=1", code=4,
    )  # fmt: skip
    assert "2 steps in a row, 4 to 5, had" in log
    assert "goes back to step 2, the newest healthy checkpoint" in log
    assert [step for step, _ in list_committed(tmp_path / "run/checkpoint")] == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_found(dtype: torch.dtype, value: float) -> None:
    tensors = {name: torch.randn(1000, 700, device="cuda").to(dtype) for name in "ab"}
    assert non_finite({"model": tensors}) == []
    tensors["b"][999, 699] = value
    assert non_finite({"model": tensors}) == ["model.b"]


def test_a_host_copy_has_the_values_of_its_time() -> None:
    x = torch.zeros(1000, device="cuda")
    copies = []
    for _ in range(50):
        x += 1
        copies.append(HostCopy(x))
    assert [copy.result()[0].item() for copy in copies] == list(range(1, 51))


def decisions(device: torch.device) -> tuple[list[bool], dict]:
    """Whether a guard on this device applies each of 400 steps, and the guard's state."""
    rng = np.random.default_rng(0)
    losses, norms = 3 + 0.05 * rng.normal(size=400), np.exp(0.3 * rng.normal(size=400))
    losses[200:300:7] += 2
    losses[300:] += 1  # a level shift
    losses[350], norms[360:364] = math.nan, 100
    guard = StepGuard(Guard(skip_sigma=6.0, window=32), device)
    on_device = torch.tensor(np.stack([losses, norms]), dtype=torch.float32, device=device)
    num_targets = torch.tensor(1000, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        applied = [
            guard.judge(loss, norm, guard.summands(norm), i, 8 * i, 8 * i + 8, num_targets)
            for i, (loss, norm) in enumerate(on_device.unbind(1), 1)
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.stack(applied).tolist(), guard.state_dict()


def test_outliers_are_found_without_synchronising_as_on_the_cpu() -> None:
    applied, state = decisions(torch.device("cuda"))
    on_cpu, its_state = decisions(torch.device("cpu"))
    assert applied == on_cpu
    assert state["spikes"] == its_state["spikes"]
    assert state["outliers"]["losses"] == its_state["outliers"]["losses"]
    wanted = [*range(200, 300, 7), *range(300, 308), 350, *range(360, 364)]
    assert [i for i, ok in enumerate(applied) if not ok] == wanted
