"""Statistics of token losses on CUDA: no host synchronisation, no more memory than the step needs, the values
of the CPU, and a comparison in fp64 that TF32 does not reach. The z-loss by the kernels of CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.gpu import column, run
from titanlite.attention.sdpa import SDPA
from titanlite.data.batch import Batch
from titanlite.losses import WHOLE_VOCABULARY, ChunkedCrossEntropy, CrossEntropy
from titanlite.mesh import ALONE
from titanlite.metrics.token_statistics import TokenStatistics, exact_losses
from titanlite.models.llama3 import Llama3
from titanlite.parallel.apply import parallelize
from titanlite.parallel.compile import Compile
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallel.sharded_model import ShardedModel

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPE = {
    "dim": 1024,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 8,
    "head_dim": 128,
    "hidden_dim": 2816,
    "vocab_size": 32768,
}
SEQUENCES, SEQ_LEN = 8, 2048
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def head_inputs(dtype: torch.dtype, device: torch.device) -> Inputs:
    """Hidden states, weight, targets, positions and sources."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 512, 256, generator=generator).to(dtype)
    weight = (torch.randn(4099, 256, generator=generator) * 0.1).to(dtype)
    targets = torch.randint(0, 4099, (4, 512), generator=generator)
    targets[1, :100] = -100
    positions, sources = torch.arange(512), torch.tensor([0, 1, 1, 0])
    return hidden.to(device), weight.to(device), targets.to(device), positions.to(device), sources.to(device)


def statistics(device: torch.device, seq_len: int = 512) -> TokenStatistics:
    return TokenStatistics(
        seq_len=seq_len, num_micro_batches=1, sources=["a", "b"], is_cross_entropy=True, device=device
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_those_of_the_cpu_and_never_wait(dtype: torch.dtype) -> None:
    ours, wanted = statistics(CUDA), statistics(torch.device("cpu"))
    inputs = head_inputs(dtype, CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.observe(*inputs, WHOLE_VOCABULARY)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted.observe(*head_inputs(dtype, torch.device("cpu")), WHOLE_VOCABULARY)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    values = [x.metrics(x.sums.cpu().double(), x.maxima.cpu(), 0.0) for x in (ours, wanted)]
    assert values[0] == pytest.approx(values[1], rel=tolerance, abs=2e-3)


def test_tf32_does_not_reach_the_comparison() -> None:
    hidden, weight, targets, *_ = head_inputs(torch.float32, CUDA)
    logits = F.linear(hidden.double(), weight.double()).flatten(0, 1)
    wanted = F.cross_entropy(logits, targets.flatten(), reduction="none")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        actual = exact_losses(hidden.flatten(0, 1), weight, targets.flatten(), WHOLE_VOCABULARY)
        by_tf32 = F.linear(hidden, weight).flatten(0, 1)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert (actual - wanted).abs().max() < 1e-10
    assert (by_tf32 - logits).abs().max() > 1e-4, "control: TF32 is in use"


def model(compiled: bool) -> ShardedModel:
    with torch.device("meta"):
        net = Llama3(flavor="debug", overrides=SHAPE).build()
    settings = ParallelSettings(
        attention=SDPA(), compile=Compile(enable=compiled), param_dtype=torch.bfloat16
    )
    sharded = parallelize(net, ChunkedCrossEntropy(), ALONE, settings)
    sharded.materialize(CUDA, seed=0)
    return sharded


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_needs_no_more_memory(compiled: bool) -> None:
    torch.compiler.reset()
    sharded = model(compiled)
    tokens = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, SEQ_LEN + 1), device=CUDA)
    sources = torch.arange(SEQUENCES, device=CUDA) % 2
    batch = Batch(tokens[:, :-1], tokens[:, 1:], SEQUENCES * SEQ_LEN, 0, source_ids=sources)
    num_targets = torch.tensor(batch.num_targets, device=CUDA)

    def step(observer: TokenStatistics | None) -> tuple[int, torch.Tensor]:
        """Peak memory and loss."""
        for p in sharded.net.parameters():
            p.grad = None
        torch.cuda.reset_peak_memory_stats()
        loss = sharded.forward_backward([batch], num_targets, observer)
        return torch.cuda.max_memory_allocated(), loss

    step(None)  # compiles, and makes the workspaces of kernels
    observer = statistics(CUDA, SEQ_LEN)
    (peak, loss), (its_peak, its_loss) = step(None), step(observer)
    assert its_peak <= 1.02 * peak, f"{its_peak / 2**20:.0f} MiB, not {peak / 2**20:.0f}"
    assert torch.equal(loss, its_loss)
    difference = observer.difference(observer.sums.cpu().double(), loss.item())
    assert difference is not None
    assert abs(difference.of_loss) < 1e-4
    assert abs(difference.of_logits) < 1e-3


@pytest.mark.parametrize(
    ("ngpu", "overrides"),
    [
        (1, []),
        (1, ["--compile.enable"]),
        pytest.param(2, ["--parallelism.tensor_parallel_degree=2"], marks=TWO),
    ],
    ids=["eager", "compiled", "tp"],
)
def test_a_run_with_them_is_the_same_to_the_bit(
    tmp_path: Path, corpus: Path, ngpu: int, overrides: list[str]
) -> None:
    without = run(tmp_path, corpus, *overrides, "--metrics.detail_freq=0", ngpu=ngpu, name="without")
    keys = [*overrides, "--metrics.detail_freq=1"]
    with_detail = run(tmp_path, corpus, *keys, ngpu=ngpu, name="with")
    for key in ("train/loss", "train/grad_norm"):
        assert column(with_detail, key) == column(without, key)
    assert all(abs(value) < 5e-3 for value in column(with_detail, "numerics/loss_minus_fp32"))
    assert not any("compile/graphs" in line for line in with_detail[1:])


@pytest.mark.parametrize("backend", [None, "inductor"], ids=["eager", "compiled"])
def test_the_gradient_of_a_z_loss_in_bf16_is_that_of_its_formula(backend: str | None) -> None:
    multiplier = 0.02
    exact = [x.double().requires_grad_() for x in head_inputs(torch.bfloat16, CUDA)[:2]]
    targets = head_inputs(torch.bfloat16, CUDA)[2]
    logits = F.linear(*exact).flatten(0, 1)
    z_loss = multiplier * logits.logsumexp(-1)[targets.flatten() != -100].square().sum()
    (F.cross_entropy(logits, targets.flatten(), reduction="sum") + z_loss).backward()
    errors = []
    for loss in (CrossEntropy, ChunkedCrossEntropy):
        actual = head_inputs(torch.bfloat16, CUDA)[:2]
        hidden, weight = (x.requires_grad_() for x in actual)
        values = loss(z_loss_multiplier=multiplier).build(backend)(hidden, weight, targets)
        assert values[1].item() == pytest.approx(z_loss.item(), rel=1e-3)
        values[0].backward()
        errors.append([((a.grad - b.grad).norm() / b.grad.norm()).item() for a, b in zip(actual, exact)])
    whole, chunked = errors
    assert all(c < 1.1 * w for c, w in zip(chunked, whole)), errors
    assert max(whole) < 0.02
