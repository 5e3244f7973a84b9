"""Muon on CUDA: its kernels, its bits on two GPUs, and no wait for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpu import column, on_two_gpus, reference, run
from tests.support.optimizer_layouts import LR, assert_equal, set_gradients_of
from titanlite.mesh import ALONE, Mesh, build_mesh
from titanlite.models.base import Decoder
from titanlite.models.llama3 import Llama3
from titanlite.optim.base import guarded_step
from titanlite.optim.muon import Muon
from titanlite.optim.orthogonalize import coefficients_of, orthogonalize
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.initialize import fill_normal
from titanlite.parallelism import Parallelism

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SHAPE = {
    "dim": 256, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "hidden_dim": 704,
    "tie_word_embeddings": False,
}  # fmt: skip


def steps(optimizer: Muon, device: str, mesh: Mesh = ALONE) -> dict[str, torch.Tensor]:
    """Whole weights and momentum on the CPU after four steps with the gradients of `gradient`."""
    net: Decoder = Llama3(flavor="debug", overrides=SHAPE).build().to(device)
    for name, p in net.named_parameters():
        fill_normal(p, name, 1.0 if p.ndim == 1 else 0.0, 0.05, seed=0)
    if mesh.device_mesh is not None:
        always = Parallelism(fsdp_reshard_after_forward="always")
        apply_fsdp(net, mesh, torch.float32, torch.float32, always, cpu_offload=False)
    built = optimizer.build(net, mesh)
    for step in range(4):
        set_gradients_of(net, step)
        guarded_step(built, torch.tensor(True, device=device), torch.tensor(2.0, device=device))
    tensors = {name: p.detach() for name, p in net.named_parameters()}
    tensors |= {
        f"{name}.momentum": built.state[p]["momentum_buffer"]
        for name, p in net.named_parameters()
        if "momentum_buffer" in built.state[p]
    }
    return {name: (t.full_tensor() if mesh.device_mesh else t).cpu() for name, t in tensors.items()}


def test_singular_values_end_in_the_band_in_bf16() -> None:
    x = torch.randn(2, 512, 2048, device="cuda")
    values = torch.linalg.svdvals(
        orthogonalize(x, coefficients_of("polar_express", 5), torch.bfloat16).float()
    )
    assert 0.86 < values.min() < values.max() < 1.13


@pytest.mark.parametrize("normalize", ["none", "neuron"])
def test_the_steps_are_those_of_the_cpu(normalize: Any) -> None:
    optimizer = Muon(lr=LR, ns_dtype="float32", normalize=normalize, cautious_weight_decay=True)
    cuda, cpu = steps(optimizer, "cuda"), steps(optimizer, "cpu")
    for name, wanted in cpu.items():
        error = (cuda[name] - wanted).norm() / wanted.norm()
        assert error < 2e-3, name  # tf32 is off; what is left comes from small singular values


def test_a_step_never_waits_for_the_device() -> None:
    net: Decoder = Llama3(flavor="debug", overrides=SHAPE).build().to("cuda")
    optimizer = Muon(normalize="neuron", split_heads=True).build(net, ALONE)
    apply, divisor = torch.tensor(True, device="cuda"), torch.tensor(1.0, device="cuda")

    def step() -> None:
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        guarded_step(optimizer, apply, divisor)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # another learning rate must not compile again
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            apply.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sharded_steps(rank: int, optimizer: Muon) -> dict[str, np.ndarray]:
    tensors = steps(optimizer, "cuda", build_mesh(Parallelism(), "cuda", rank, 2))
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@two_gpus
@pytest.mark.parametrize("keys", [{}, {"normalize": "neuron", "split_heads": True}], ids=str)
def test_two_gpus_have_the_bits_of_one(tmp_path: Path, keys: dict[str, Any]) -> None:
    optimizer = Muon(lr=LR, **keys)
    alone = steps(optimizer, "cuda")
    for result in on_two_gpus(tmp_path, sharded_steps, optimizer):
        assert_equal({name: torch.from_numpy(array) for name, array in result.items()}, alone)


@two_gpus
@pytest.mark.parametrize("axis", ["tensor_parallel", "context_parallel", "pipeline_parallel"])
def test_two_gpus_train_as_one(tmp_path: Path, corpus: Path, axis: str) -> None:
    keys = [
        "--optimizer.name=muon",
        "--optimizer.ns_dtype=float32",
        "--training.seq_len=256",
        "--data.holdout_sequences=0",
        "--model.overrides.head_dim=16",
        "--training.global_batch_size=4",
        "--model.overrides.tie_word_embeddings=false",
        "--training.mixed_precision_param=float32",
    ]
    one = reference(corpus, *keys)
    two = run(tmp_path, corpus, *keys, f"--parallelism.{axis}_degree=2", ngpu=2)
    assert column(two, "train/loss") == pytest.approx(column(one, "train/loss"), rel=1e-4)
