"""Experts on CUDA: the grouped product of torch, no wait for the device, equal bits in every run, and runs
of one and two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gpu import column, reference, run
from titanlite.models.grouped_mm import grouped_loop, grouped_mm, grouped_mm_weight
from titanlite.models.moe import MoE
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.parallel.float8 import grouped_mm_by_rows

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SIZES = {"all": [40, 8, 100, 3], "empty groups": [0, 151, 0, 0], "one row": [0, 0, 1, 0], "no rows": [0] * 4}
MODEL = [
    "--model.name=qwen3_moe", "--model.overrides.n_experts=4", "--model.overrides.n_experts_per_token=2",
    "--model.overrides.moe_hidden_dim=32", "--model.overrides.head_dim=16", "--training.seq_len=256",
    "--data.holdout_sequences=0", "--training.global_batch_size=4",
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_grouped_products_equal_the_loop(sizes: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 48, 64, device="cuda", requires_grad=True)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    out = grouped_mm(x, weight, ends)
    wanted = grouped_loop(x.float(), weight.bfloat16().float(), ends)  # torch has no kernel for fp32
    g = torch.randn_like(out)
    actual = (out, *torch.autograd.grad(out, (x, weight), g))
    for a, b in zip(actual, (wanted, *torch.autograd.grad(wanted, (x, weight), g.float())), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=5e-2)
    by_itself = grouped_mm_weight(g, x.detach(), ends).float()
    torch.testing.assert_close(by_itself, actual[2], rtol=2e-2, atol=5e-2)
    assert not actual[2][torch.tensor(sizes) == 0].any(), "an expert without rows has a gradient of 0"


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_float8_products_equal_the_emulated_ones(sizes: list[int], transposed: bool) -> None:
    """As the forward computes them, and, with a transposed weight, as the backward does."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4, 48, 64, device="cuda", dtype=torch.bfloat16)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    actual, wanted = (grouped_mm_by_rows(x, weight, ends, emulate) for emulate in (False, True))
    torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=5e-2)


def layer() -> MoE:
    torch.manual_seed(0)
    shape = {"dim": 256, "n_experts": 32, "n_experts_per_token": 4, "moe_hidden_dim": 128}
    mlp = MoE(Qwen3MoE(flavor="debug", overrides=shape).config).cuda()
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.05)
    # Compiled, the router's weight is not rounded to bf16, which changes the choices of 1% of the tokens.
    mlp.gate.weight.data = mlp.gate.weight.bfloat16().float()
    return mlp


def results(mlp: MoE) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of the weights."""
    torch.manual_seed(1)
    x = torch.randn(2, 1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = mlp(x)
    g = torch.randn_like(out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = mlp(x)
        return [out.detach(), *torch.autograd.grad(out, (x, *mlp.parameters()), g)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_layer_waits_for_nothing_and_has_equal_bits_every_time() -> None:
    mlp = layer()
    first = results(mlp)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, results(mlp), strict=True))


def test_a_compiled_layer_equals_the_layer() -> None:
    mlp = layer()
    wanted = results(mlp)
    mlp.compile(fullgraph=True, dynamic=False)
    for a, b in zip(results(mlp), wanted, strict=True):
        assert (a.float() - b.float()).norm() < 2e-2 * b.float().norm()


@pytest.mark.parametrize(
    "keys",
    [
        ["--compile.enable"],
        ["--compile.enable", "--activation_checkpoint.mode=full"],
        ["--compile.enable", "--activation_checkpoint.mode=selective"],
        ["--activation_checkpoint.mode=selective"],
    ],
    ids=str,
)
def test_compile_and_recompute_give_the_same_loss(tmp_path: Path, corpus: Path, keys: list[str]) -> None:
    losses = column(run(tmp_path, corpus, *MODEL, *keys), "train/loss")
    assert losses == pytest.approx(column(reference(corpus, *MODEL), "train/loss"), rel=1e-2)  # bf16


def test_experts_in_float8_train_like_those_in_bf16(tmp_path: Path, corpus: Path) -> None:
    pytest.importorskip("torchao")
    keys = [*MODEL, "--compile.enable", "--float8.enable", "--float8.recipe=rowwise"]
    others = column(run(tmp_path, corpus, *keys, name="others"), "train/loss")
    experts = column(run(tmp_path, corpus, *keys, "--float8.experts", name="experts"), "train/loss")
    assert experts != others
    assert experts == pytest.approx(others, rel=2e-2)


def test_deterministic_runs_are_equal_to_the_bit(tmp_path: Path, corpus: Path) -> None:
    one, two = (
        run(tmp_path, corpus, *MODEL, "--training.deterministic", "--compile.enable", name=name)
        for name in ("one", "two")
    )
    assert column(one, "train/loss") == column(two, "train/loss")
    assert column(one, "train/grad_norm") == column(two, "train/grad_norm")


@two_gpus
@pytest.mark.parametrize("keys", [[], ["--parallelism.context_parallel_degree=2"]], ids=["fsdp", "cp"])
def test_two_gpus_equal_one(tmp_path: Path, corpus: Path, keys: list[str]) -> None:
    fp32 = "--training.mixed_precision_param=float32"
    one = reference(corpus, *MODEL, fp32)
    two = run(tmp_path, corpus, *MODEL, fp32, *keys, ngpu=2)
    assert column(two, "train/loss") == pytest.approx(column(one, "train/loss"), rel=1e-3)
