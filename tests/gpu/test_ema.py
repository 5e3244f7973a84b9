"""The average of the weights on GPUs: updated and exchanged without a host synchronisation, and equal to one
computed on the CPU within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.averages import AVERAGED, check_by_hand, sha_of
from tests.support.gpu import trained
from tests.support.runs import UNTIED
from titanlite.optim.ema import EMA, WeightAverage

pytestmark = pytest.mark.gpu
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def averages(device: str) -> list[list[torch.Tensor]]:
    """The average after each of four steps: the first copies the weights, the third is skipped."""
    torch.manual_seed(0)
    net = nn.ParameterDict({name: nn.Parameter(torch.randn(300, 20)) for name in "abc"})
    changes = [[torch.randn(300, 20).to(device) for _ in net] for _ in range(4)]
    average = WeightAverage(EMA(enable=True, decay=0.9, start_step=1), net.to(device))
    flags, values = [torch.tensor(step != 3, device=device) for step in range(5)], []
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for step, change in enumerate(changes, 1):
            with torch.no_grad():
                torch._foreach_add_(list(net.values()), change)
            average.update(step, flags[step])
            with average.as_weights():
                values.append([p.detach().clone() for p in net.values()])
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return values


def test_the_average_on_cuda_is_that_of_the_cpu_and_never_waits() -> None:
    ours, wanted = averages("cuda"), averages("cpu")
    for values, wanted_values in zip(ours, wanted, strict=True):
        for value, wanted_value in zip(values, wanted_values, strict=True):
            torch.testing.assert_close(value.cpu(), wanted_value, rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], ours[2])), "a skipped step has changed the average"
    assert not any(torch.equal(a, b) for a, b in zip(ours[2], ours[3]))


@pytest.mark.parametrize(
    ("ngpu", "overrides"),
    [
        (1, []),
        (1, ["--compile.enable"]),
        (1, ["--training.enable_cpu_offload"]),
        pytest.param(2, [], marks=TWO),
        pytest.param(2, ["--training.enable_cpu_offload"], marks=TWO),
        pytest.param(2, ["--parallelism.tensor_parallel_degree=2"], marks=TWO),
        pytest.param(2, ["--parallelism.pipeline_parallel_degree=2"], marks=TWO),
    ],
    ids=["one", "compiled", "offload", "dp_shard", "dp_shard, offload", "tp", "pp"],
)
def test_a_run_keeps_the_average_and_trains_as_without_it(
    tmp_path: Path, corpus: Path, ngpu: int, overrides: list[str]
) -> None:
    """With asynchronous saves of every step, and a validation of every second one."""
    keys = [UNTIED, *overrides, "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
    trained(tmp_path, corpus, *keys, name="plain", ngpu=ngpu)
    validated = ["--validation.enable", "--validation.freq=2"]
    trained(tmp_path, corpus, *keys, *AVERAGED, *validated, name="averaged", ngpu=ngpu)
    check_by_hand(tmp_path / "averaged", num_saved=8, tolerance=1e-6)
    for section in ("model", "optimizer"):
        assert sha_of(tmp_path / "averaged", section) == sha_of(tmp_path / "plain", section)
