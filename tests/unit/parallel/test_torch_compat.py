"""Pins what titanlite relies on in private names of torch and torchao, for compiled and sharded blocks: a
test for each function of parallel/torch_compat.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from titanlite.parallel import torch_compat
from titanlite.torch_compat import fake_process_group


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_of_8_bit_weights_are_made_in_the_backward(device: str) -> None:
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    layer = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64, bias=False)))[0]
    weight = hp_tensor_to_float8_dynamic(
        layer.weight.detach().to(device, torch.bfloat16),
        torch.float8_e4m3fn,
        layer.linear_mm_config,
        gemm_input_role=GemmInputRole.WEIGHT,
    ).requires_grad_()
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device, requires_grad=True)

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        args = x, weight.t(), layer.linear_mm_config, layer.config
        return nn.functional.silu(matmul_with_hp_or_float8_args.apply(*args))

    def run(options: dict[str, Any] | None) -> tuple[set[int], list[torch.Tensor]]:
        """The storages of 8-bit weights that the forward keeps, and the gradients."""
        torch._dynamo.reset()
        y = torch.compile(forward, fullgraph=True, options=options)(x, weight)
        saved: Any = y.grad_fn.saved_tensors
        kept = {
            t.untyped_storage().data_ptr()
            for t in saved
            if t.shape == (64, 64) and t.dtype == torch.float8_e4m3fn
        }
        return kept, list(torch.autograd.grad(y.sum(), [x, weight]))

    copies, expected = run(None)
    kept, actual = run(torch_compat.recompute_float8_copies())
    own = {weight._data.untyped_storage().data_ptr()}
    assert len(copies) == 1
    assert not copies & own
    assert kept == own
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


class Compiled(Exception):
    """The compiler has generated code: its argument."""


def test_products_beside_collectives_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def keep(code: str) -> None:
        raise Compiled(code)  # the operators have no CPU kernel

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(keep))
    monkeypatch.setattr(config, "force_disable_caches", True)

    def code(fn: Any, options: dict[str, Any] | None) -> str:
        torch._dynamo.reset()
        with pytest.raises(Exception, match="def call") as raised:
            torch.compile(fn, fullgraph=True, options=options)(torch.ones(512, 512), torch.ones(512, 512))
        return str(raised.value)

    with fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        name = mesh.get_group().group_name
        split = torch_compat.enable_async_tensor_parallel(mesh)
        for operator, fn in (
            ("fused_all_gather_matmul", lambda x, w: funcol.all_gather_tensor(x, 0, name) @ w),
            ("fused_matmul_reduce_scatter", lambda x, w: funcol.reduce_scatter_tensor(x @ w, "sum", 0, name)),
        ):
            assert operator in code(fn, split)
            assert operator not in code(fn, None)


def test_float8_layers_of_torchao() -> None:
    float8 = pytest.importorskip("torchao.float8")
    net = nn.Sequential(nn.Linear(16, 16, bias=False))
    assert not torch_compat.is_float8_linear(net[0])
    float8.convert_to_float8_training(net, config=float8.Float8LinearConfig(emulate=True))
    assert torch_compat.is_float8_linear(net[0])
    values = torch.randn(16, 16)
    cast = torch_compat.float8_input_cast(net[0])(values)
    torch.testing.assert_close(cast.to_original_precision(), values, rtol=0.07, atol=0.01)
    style = torch_compat.float8_rowwise_parallel()
    assert issubclass(style, torch.distributed.tensor.parallel.RowwiseParallel)
