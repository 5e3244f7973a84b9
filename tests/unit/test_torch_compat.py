"""Pins what titanlite relies on in torch's private names: a test for each function of torch_compat.py. One
that fails with a new version of torch tells which function has to learn it."""

from __future__ import annotations

import io
import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanlite import torch_compat


def wait_for_a_rank_that_does_not_come(seconds: float) -> float:
    """How long an all-reduce waits whose group was given a new timeout."""
    torch_compat.set_group_timeout(None, timedelta(seconds=seconds))
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
    return time.monotonic() - began


def test_a_group_gets_a_new_timeout(run_on: Any) -> None:
    waited = run_on(2, wait_for_a_rank_that_does_not_come, 0.5)[0]
    assert 0.4 < waited < 60  # the timeout of the group before is half an hour


def flat_size() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch_compat.flatten_mesh(mesh["a", "b"], "all")
    return [mesh["all"].size(), mesh["all"].get_local_rank()]


def test_dimensions_of_a_mesh_are_flattened(run_on: Any) -> None:
    assert run_on(4, flat_size) == [[4, rank] for rank in range(4)]


def shards() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    again = torch_compat.dtensor_like(tensor.to_local() + 1, tensor)
    return {
        "offsets": torch_compat.local_offsets(tensor),
        "global": again.full_tensor().flatten().tolist(),
        "placements": again.placements == tensor.placements,
        "grad": again.requires_grad,
    }


def test_a_dtensor_is_made_of_a_local_shard_and_knows_where_it_begins(run_on: Any) -> None:
    expected = {"global": [float(i) for i in range(1, 11)], "placements": True, "grad": False}
    assert run_on(2, shards) == [{"offsets": (offset, 0), **expected} for offset in (0, 3)]


def test_norms_of_many_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, math.nan]), torch.tensor([-math.inf])]
    assert torch_compat.foreach_norm(tensors)[0].item() == 5
    largest = [norm.item() for norm in torch_compat.foreach_norm(tensors, math.inf)]
    assert largest[0] == 4
    assert math.isnan(largest[1])
    assert math.isinf(largest[2])


def test_the_tensor_inside_a_wrapper_is_found() -> None:
    subclass = pytest.importorskip("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
    inner = torch.ones(2, 2)
    from torchao.float8.float8_training_tensor import LinearMMConfig

    wrapped = subclass(inner, LinearMMConfig(), torch.float8_e4m3fn)
    assert torch_compat.plain_tensor(wrapped) is inner
    assert torch_compat.plain_tensor(inner) is inner


def test_a_view_of_a_file_and_its_record(tmp_path: Path) -> None:
    file = tmp_path / "shards"
    stored = io.BytesIO()
    torch.save(torch.arange(3), stored)
    file.write_bytes(b"before" + stored.getvalue() + b"after")
    info = torch_compat.storage_info("shards", 6, len(stored.getvalue()))
    assert (info.relative_path, info.offset, info.length) == ("shards", 6, len(stored.getvalue()))
    with open(file, "rb") as f:
        view = torch_compat.file_view(f, info.offset, info.length)
        assert torch.load(view, weights_only=True).tolist() == [0, 1, 2]


def test_the_compilers_records() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    before = len(torch_compat.compilation_metrics())
    torch.compile(double, backend="eager")(torch.ones(2))
    records = torch_compat.compilation_metrics()
    assert len(records) > before or before == 64  # the number of records that dynamo keeps
    assert records[-1].co_name == "double"
    for name in ("is_forward", "recompile_reason", "entire_frame_compile_time_s"):
        assert hasattr(records[-1], name)
    assert hasattr(records[-1], "backward_cumulative_compile_time_us")


def accumulated(fold: bool) -> str:
    """The dtype in which FSDP keeps a gradient after a backward without gradient synchronisation."""
    net = nn.Linear(4, 4, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    net.set_requires_gradient_sync(False)
    hidden = net(torch.ones(2, 4, dtype=torch.bfloat16))
    net.set_is_last_backward(False)
    (weight,) = net.parameters()
    gradient = torch.autograd.grad(hidden.sum(), [weight])[0]
    assert not isinstance(weight, DTensor)  # gathered
    weight.grad = gradient
    if fold:
        torch_compat.finish_weight_backward(net)
    state = net._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    kept = groups[0].fsdp_params[0].unsharded_accumulated_grad
    return str(weight.grad.dtype if kept is None else kept.dtype)


@pytest.mark.parametrize(("fold", "dtype"), [(True, "torch.float32"), (False, "torch.bfloat16")])
def test_gradients_of_a_weight_backward_are_kept_in_the_reduce_dtype(
    run_on: Any, fold: bool, dtype: str
) -> None:
    assert run_on(2, accumulated, fold) == [dtype, dtype]
