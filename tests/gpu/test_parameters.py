"""Clipping by tensor and the statistics of parameters on CUDA: without a host synchronisation in a step, and
with the values of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.gpu import column, run
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import guarded_step
from titanlite.parallel.clip import Clipper, grad_norms

pytestmark = pytest.mark.gpu
TENSOR = "--training.clip=tensor"


def weights_and_averages(device: str, kind: Any) -> dict[str, torch.Tensor]:
    """Ten steps, of which one is skipped, on the device."""
    torch.manual_seed(0)
    net = nn.ParameterDict({name: nn.Parameter(torch.randn(40, 30)) for name in "abc"}).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    clipper = Clipper(kind, 1.0, net, optimizer)
    flags = [torch.tensor(step != 104, device=device) for step in range(111)]
    gradients = [[torch.randn(40, 30).to(device) * (i + 1) for _ in "abc"] for i in range(10)]
    for i, step in enumerate([1, 2, *range(101, 109)]):
        if i == 1 and device == "cuda":  # the first step makes the optimizer's state
            torch.cuda.set_sync_debug_mode("error")
        for p, gradient in zip(net.values(), gradients[i]):
            p.grad = gradient
        try:
            norms = grad_norms(net)
            guarded_step(optimizer, flags[step], clipper.clip(norms, flags[step], step))
        finally:
            if device == "cuda" and i == 9:
                torch.cuda.set_sync_debug_mode("default")
    averages = {f"{name} average": optimizer.state[p].get("clip_norm") for name, p in net.items()}
    return {**dict(net.items()), **{name: t for name, t in averages.items() if t is not None}}


@pytest.mark.parametrize("kind", ["global", "tensor"])
def test_clipping_on_cuda_is_that_of_the_cpu_and_never_waits(kind: str) -> None:
    try:
        ours = weights_and_averages("cuda", kind)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = weights_and_averages("cpu", kind)
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name].detach().cpu(), tensor.detach(), rtol=1e-4, atol=1e-5)


def test_a_synchronisation_would_be_noticed() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_update_of_the_fused_kernel_is_recomputed() -> None:
    config = AdamW(lr=1e-2, weight_decay=0.3)
    p = nn.Parameter(torch.randn(300, 200, device="cuda"))
    optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, fused=True)
    for step in (1, 2, 3):
        before = p.detach().clone()
        p.grad = torch.randn_like(p)
        optimizer.step()
        state, group = {**optimizer.state[p], "step": step}, optimizer.param_groups[0]
        update = config.update_of(p.detach(), state, group)
        assert ((update - (before - p.detach())).norm() / update.norm()).item() < 1e-4
    signal, noise = config.signal_and_noise(state, group)
    assert (signal + noise).item() == pytest.approx(60000, rel=0.05)  # the mean square of the gradients


def test_a_run_clips_by_tensor_reports_and_resumes(tmp_path: Path, corpus: Path) -> None:
    keys = (TENSOR, "--metrics.detail_freq=1")
    whole = run(tmp_path, corpus, *keys, name="whole")
    run(tmp_path, corpus, *keys, "--training.steps=3", name="parts")
    parts = run(tmp_path, corpus, *keys, name="parts")
    for key in ("train/loss", "train/grad_norm", "norms/update_ratio_max", "train/clipped_tensors"):
        assert column(parts, key) == column(whole, key)
    first, second = (
        (tmp_path / name / "parameters.jsonl").read_text().splitlines() for name in ("whole", "parts")
    )
    assert first == second
    ratios = [numbers[2] for numbers in json.loads(first[-1])["parameters"].values()]
    assert all(0 < ratio < 1 for ratio in ratios)
