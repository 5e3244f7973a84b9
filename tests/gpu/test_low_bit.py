"""AdamW with fp32, bfloat16 and 8-bit state on CUDA: one compiled kernel per parameter, equal bits however a
weight is sharded, no host synchronisation in a step, and the memory that it saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.support.gpu import column, run
from tests.support.low_bit import Cut, grid, joined, rows, trained_shards, whole
from titanlite.optim import adamw, low_bit
from titanlite.optim.adamw import StateDtype, build_adamw
from titanlite.optim.base import guarded_step
from titanlite.torch_compat import compile_update

pytestmark = pytest.mark.gpu
INT8 = "--optimizer.state_dtype=int8"
WIDE = ["--model.overrides.dim=64", "--model.overrides.hidden_dim=128", "--model.overrides.head_dim=16"]
SHAPES = [(4096, 4096), (8192, 2048), (2, 100, 64), (1000, 64), (1024,), (30, 40), (3,)]


def optimizer_of(
    shapes: list[tuple[int, ...]], state_dtype: StateDtype, device: str = "cuda"
) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    group = {"params": params, "lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95}
    return build_adamw([group], 1e-8, state_dtype)


def give_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def test_fp32_state_is_that_of_torchs_fused_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large parameters have a compiled kernel, small ones torch's. The third step is skipped."""
    monkeypatch.setattr(adamw, "MANY", 1000)
    optimizer = optimizer_of([(2048, 4096), (1024, 4096), (30, 40), ()], "float32")
    assert isinstance(optimizer, low_bit.CompiledAdamW)
    params = optimizer.param_groups[0]["params"]
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    theirs = torch.optim.AdamW(copies, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, 6):
        give_gradients(optimizer, step)
        for p, copy in zip(params, copies):
            p.grad = torch.full_like(p, torch.nan) if step == 3 else p.grad
            copy.grad = p.grad.clone()
        apply, divisor = torch.tensor(step != 3, device="cuda"), torch.tensor(3.0, device="cuda")
        for one in (optimizer, theirs):
            guarded_step(one, apply, divisor)
    for p, copy in zip(params, copies):
        torch.testing.assert_close(p, copy, rtol=1e-5, atol=1e-6)
        for key, tensor in theirs.state[copy].items():
            torch.testing.assert_close(optimizer.state[p][key], tensor, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):  # control
        torch.testing.assert_close(params[0], copies[0] * (1 + 1e-4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_the_compiled_update_is_the_eager_one(state_dtype: StateDtype) -> None:
    ours, theirs = (optimizer_of(SHAPES[2:], state_dtype, device) for device in ("cuda", "cpu"))
    for step in range(1, 6):
        for optimizer, device in ((ours, "cuda"), (theirs, "cpu")):
            give_gradients(optimizer, step)
            apply, divisor = torch.tensor(step != 3, device=device), torch.tensor(2.0, device=device)
            guarded_step(optimizer, apply, divisor)
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"]):
        # A value half-way between two codes may be rounded to either.
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-3, atol=1e-3)
        assert ((p.detach().cpu() - q.detach()).abs() < 1e-5).float().mean() > 0.99
        for key, tensor in ours.state[p].items():
            other = theirs.state[q][key]
            assert tensor.dtype == other.dtype
            if tensor.dtype in (torch.int8, torch.uint8):
                difference = (tensor.cpu().int() - other.int()).abs()
                assert difference.max() <= 1
                assert difference.float().mean() < 1e-2
            else:
                torch.testing.assert_close(tensor.cpu(), other, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("cut", [rows, grid])
def test_shards_have_the_bits_of_the_whole(cut: Cut) -> None:
    wanted = joined(trained_shards(whole, "cuda"))
    assert torch.equal(joined(trained_shards(cut, "cuda")), wanted)
    torch.testing.assert_close(wanted.cpu(), joined(trained_shards(whole)), rtol=2e-2, atol=1e-3)


def test_no_block_size_of_the_kernel_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor times the kernel with several block sizes and keeps one. Each is tried here. Control: with
    inductor's own rounding, the block size shows in the bits."""
    from torch._inductor import config
    from torch._inductor.runtime import triton_heuristics

    monkeypatch.setattr(config, "compile_threads", 1)  # compile in this process
    monkeypatch.setattr(config, "force_disable_caches", True)
    configurations = triton_heuristics._persistent_reduction_configs
    tried: list[str] = []

    def results(compiled: Callable[..., None]) -> list[torch.Tensor]:
        monkeypatch.setattr(low_bit, "_compiled_update", lambda: compiled)
        states, tried[:] = [], []
        for i in range(4):

            def chosen(*args: Any, i: int = i, **keywords: Any) -> list[Any]:
                every = configurations(*args, **keywords)
                tried.append(str(every[min(i, len(every) - 1)]))
                return every[min(i, len(every) - 1) :][:1]

            monkeypatch.setattr(triton_heuristics, "_persistent_reduction_configs", chosen)
            torch._dynamo.reset()
            states.append(joined(trained_shards(whole, "cuda")))
        assert len(set(tried)) > 1, tried
        return states

    exact = results(compile_update(low_bit._update))
    assert all(torch.equal(state, exact[0]) for state in exact)
    loose = results(torch.compile(low_bit._update, fullgraph=True))
    assert not all(torch.equal(state, loose[0]) for state in loose)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_a_skipped_step_leaves_every_bit(state_dtype: StateDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "MANY", 1000)
    optimizer = optimizer_of(SHAPES, state_dtype)
    give_gradients(optimizer, 1)
    guarded_step(optimizer, torch.tensor(True, device="cuda"), None)
    params = optimizer.param_groups[0]["params"]
    before = [t.detach().clone() for p in params for t in (p, *optimizer.state[p].values())]
    for p in params:
        p.grad = torch.full_like(p, torch.nan)
    guarded_step(optimizer, torch.tensor(False, device="cuda"), torch.tensor(torch.nan, device="cuda"))
    after = [t.detach() for p in params for t in (p, *optimizer.state[p].values())]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_a_step_does_not_wait_and_runs_one_kernel_per_parameter(state_dtype: StateDtype) -> None:
    torch._dynamo.reset()
    optimizer = optimizer_of(SHAPES, state_dtype)
    apply, divisor = torch.tensor(True, device="cuda"), torch.tensor(2.0, device="cuda")
    for step in (1, 2):
        give_gradients(optimizer, step)
        guarded_step(optimizer, apply, divisor)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        guarded_step(optimizer, apply, divisor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        guarded_step(optimizer, apply, divisor)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.name.startswith("triton_")]
    assert len(kernels) == len(SHAPES), kernels
    assert len(set(kernels)) <= 2, "one kernel for parameters with blocks, one for all others"


def test_8_bit_state_saves_its_memory_and_needs_no_more_in_a_step() -> None:
    def used(state_dtype: StateDtype) -> tuple[int, int]:
        """Bytes of the state, and what a step needs beyond it."""
        optimizer = optimizer_of(SHAPES[:2], state_dtype)
        give_gradients(optimizer, 1)
        before = torch.cuda.memory_allocated() - sum(
            t.numel() * t.itemsize for state in optimizer.state.values() for t in state.values()
        )
        for _ in range(2):
            guarded_step(optimizer, torch.tensor(True, device="cuda"), None)
        torch.cuda.reset_peak_memory_stats()
        after = torch.cuda.memory_allocated()
        guarded_step(optimizer, torch.tensor(True, device="cuda"), None)
        return after - before, torch.cuda.max_memory_allocated() - after

    size = 2 * 4096 * 4096
    (fp32, _), (bfloat16, _), (int8, extra) = (used(kind) for kind in ("float32", "bfloat16", "int8"))
    assert (fp32 - int8) / size > 5.8
    assert (fp32 - bfloat16) / size > 3.9
    assert extra < 0.01 * size


@pytest.mark.parametrize("keys", [[], ["--training.enable_cpu_offload"]], ids=["cuda", "CPU offload"])
def test_a_run_is_near_fp32_state_and_resumes_to_the_bit(
    tmp_path: Path, corpus: Path, keys: list[str]
) -> None:
    exact = run(tmp_path, corpus, *WIDE, *keys, name="fp32")
    whole_run = run(tmp_path, corpus, *WIDE, *keys, INT8, name="whole")
    run(tmp_path, corpus, *WIDE, *keys, INT8, "--training.steps=3", name="parts")
    parts = run(tmp_path, corpus, *WIDE, *keys, INT8, name="parts")
    for key in ("train/loss", "train/grad_norm"):
        assert column(parts, key) == column(whole_run, key)
    assert column(parts, "train/loss") != column(exact, "train/loss")
    assert column(parts, "train/loss") == pytest.approx(column(exact, "train/loss"), rel=1e-2)
