"""Deterministic runs on CUDA: memory is filled before another stream writes to it, and runs that disturb each
other's timing have the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.gpu import column, reference, run, shards
from titanlite.runtime.process import determinism
from titanlite.torch_compat import _allocate_reduction

pytestmark = pytest.mark.gpu
LAYOUTS = {
    "tp": "--parallelism.tensor_parallel_degree=2",
    "dp_shard": "--parallelism.fsdp_reshard_after_forward=always",
    "pp": "--parallelism.pipeline_parallel_degree=2",
}
KEYS = ["--training.steps=40", "--lr_scheduler.total_steps=40", "--checkpoint.interval=40"]


def written_by_another_stream(allocate: bool) -> torch.Tensor:
    """Ones that another stream writes to new memory of a busy default stream. `allocate`: the memory is of
    _allocate_reduction(); otherwise the other stream does not wait for it."""
    cuda = torch.device("cuda", 0)
    parameter = SimpleNamespace(sharded_param=SimpleNamespace(grad=None), orig_dtype=torch.float32)
    other = torch.cuda.Stream()
    with determinism(True):
        torch.empty(1000, device=cuda).fill_(1)  # CUDA may wait for the device when it loads a kernel
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        if allocate:
            with torch.cuda.stream(other):
                memory = _allocate_reduction([parameter], (1000,), dtype=torch.float32, device=cuda)
        else:
            memory = torch.empty(1000, device=cuda)
        with torch.cuda.stream(other):
            memory.fill_(1)
    torch.cuda.synchronize()
    return memory.cpu()


def test_memory_is_filled_before_a_reduction_writes() -> None:
    assert written_by_another_stream(allocate=False).isnan().all()
    assert written_by_another_stream(allocate=True).eq(1).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_beside_each_other_have_equal_bits(tmp_path: Path, corpus: Path) -> None:
    """Ten runs of 40 steps at once on the same two GPUs."""
    names = [f"{layout}-{i}" for layout, num in (("tp", 6), ("dp_shard", 2), ("pp", 2)) for i in range(num)]
    reference(corpus)  # tokenises the corpus

    def train(name: str) -> list[dict]:
        keys = [*KEYS, "--model.overrides.tie_word_embeddings=false", LAYOUTS[name.split("-")[0]]]
        return run(tmp_path / name, corpus, *keys, ngpu=2)

    with ThreadPoolExecutor(len(names)) as pool:
        runs = dict(zip(names, pool.map(train, names), strict=True))
    for name, metrics in runs.items():
        first = f"{name.split('-')[0]}-0"
        for key in ("train/loss", "train/grad_norm"):
            values = column(metrics, key)
            assert len(values) == 40
            assert torch.tensor(values).isfinite().all(), (name, key, values)
            assert values == column(runs[first], key), (name, key)
        assert shards(tmp_path / name / "run", 40) == shards(tmp_path / first / "run", 40) != {}, name
