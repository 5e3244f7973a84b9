"""FSDP on two GPUs: reduced gradients lie in the memory of the computation, and are those of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpu import on_two_gpus
from titanlite.data.batch import Batch
from titanlite.losses import CrossEntropy
from titanlite.mesh import build_mesh
from titanlite.models.llama3 import Llama3
from titanlite.parallel import fsdp
from titanlite.parallel.apply import parallelize
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Parallelism

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SHAPE = {"dim": 1024, "n_layers": 4, "hidden_dim": 4096, "vocab_size": 8192, "tie_word_embeddings": False}


def trained(rank: int, shares: bool, keys: dict[str, Any]) -> tuple[int, int, list[np.ndarray]]:
    """On one of two ranks, after two steps of three micro-batches or one: the bytes of this rank's gradients,
    the bytes that torch has reserved on other streams than the default one, and the gradients of both steps.
    `shares`: as titanlite; otherwise as torch."""
    with pytest.MonkeyPatch.context() as patch:
        if not shares:
            patch.setattr(fsdp, "reduce_fsdp_in_computation_memory", lambda module: None)
        return _trained(rank, keys)


def _trained(rank: int, keys: dict[str, Any]) -> tuple[int, int, list[np.ndarray]]:
    parallelism = Parallelism(fsdp_reshard_after_forward="never", **keys)
    mesh = build_mesh(parallelism, "cuda", rank, 2)
    settings = ParallelSettings(parallelism=parallelism, param_dtype=torch.bfloat16)
    net = Llama3(flavor="debug", overrides=SHAPE).build_on_meta()
    model = parallelize(net, CrossEntropy(), mesh, settings)
    model.materialize(torch.device("cuda", rank), seed=0)
    gradients, num_micro_batches = [], 3 if keys else 1
    for step in range(2):
        batches = []
        for i in range(num_micro_batches):
            torch.manual_seed(100 * step + 10 * i + rank)
            tokens = torch.randint(0, 8192, (4, 129), device="cuda")
            batches.append(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 512, 0))
        model.forward_backward(batches, torch.tensor(1000, device="cuda"))
        gradients += [p.grad.to_local().cpu().numpy() for p in model.net.parameters()]
        size = sum(p.grad.to_local().nbytes for p in model.net.parameters())
        model.net.zero_grad()
    segments = torch.cuda.memory_snapshot()
    return size, sum(s["total_size"] for s in segments if s["stream"] != 0), gradients


@pytest.mark.parametrize("keys", [{}, {"fsdp_reduce": "micro_batch"}], ids=["once", "per micro-batch"])
def test_gradients_do_not_have_memory_of_their_own(tmp_path: Path, keys: dict[str, Any]) -> None:
    runs: dict[bool, Any] = {}
    for shares in (True, False):
        (folder := tmp_path / str(shares)).mkdir()
        runs[shares] = on_two_gpus(folder, trained, shares, keys)
    for ours, torchs in zip(runs[True], runs[False]):
        assert torchs[1] - ours[1] > 0.9 * ours[0]
        assert len(ours[2]) > 0
        half = len(ours[2]) // 2  # the gradients of the second step, for the control
        for a, b, control in zip(ours[2], torchs[2], ours[2][half:]):
            norm = np.linalg.norm(b)
            assert np.linalg.norm(a - b) <= 2e-2 * norm  # attention adds up in another order each time
            assert np.linalg.norm(control - b) > 0.1 * norm
