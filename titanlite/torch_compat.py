"""Private and version-dependent names of torch, reached through this module only.

Each function hides one name that PyTorch may rename or change without notice. It says what titanlite relies
on, and tests/unit/test_torch_compat.py has a test for each that fails when the name or its behaviour changes.
Tested with torch 2.11 to 2.13."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# ---- distributed


def set_group_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Change the timeout of later collectives of `group`; None: the default group. torch has no public way to
    change it once a group exists."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def flatten_mesh(mesh: DeviceMesh, name: str) -> None:
    """Add to the root of `mesh` a dimension `name` that flattens all dimensions of `mesh`. Afterwards
    `root[name]` finds it."""
    mesh._flatten(name)


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor with the mesh, placements and global shape of `like`, whose local shard is `local`.

    DTensor.from_local would move `local` to the device of the mesh; here a shard in host memory stays there.
    """
    return DTensor(local, like._spec, requires_grad=False)


def local_offsets(tensor: DTensor) -> tuple[int, ...]:
    """The index in the global tensor at which this rank's shard begins, for each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(
        compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    )


def finish_weight_backward(module: torch.nn.Module) -> None:
    """Add the gradients of an FSDP module's gathered parameters to the accumulators in FSDP's reduce dtype.

    FSDP does so at the end of its own backward, but not after a backward of the weights alone, which a
    zero-bubble pipeline schedule runs. The gradients of the next micro-batch would then be added in bf16."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group, 2.13 several
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in group.fsdp_params if group is not None else ():
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


# ---- tensors


def foreach_norm(tensors: Sequence[torch.Tensor], ord: float = 2.0) -> tuple[torch.Tensor, ...]:
    """The norm of each tensor, in few kernels. NaN in a tensor makes its norm NaN, also for `ord`
    infinity."""
    return torch._foreach_norm(list(tensors), ord)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a wrapper subclass, such as torchao's weights that are cast to float8 when FSDP
    gathers them; other tensors are returned as they are. Shares memory with `tensor`; a DTensor stays a
    DTensor."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(local):
        return tensor
    inner = getattr(local, local.__tensor_flatten__()[0][0])
    return dtensor_like(inner, tensor) if isinstance(tensor, DTensor) else inner


# ---- checkpoint files


def storage_info(file: str, offset: int, length: int) -> Any:
    """DCP's record of where a tensor is stored: `length` bytes from `offset` on in `file`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def file_view(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """The bytes [offset, offset + length) of an open file as a file of their own. DCP's own reader passes
    such views to torch.load."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return cast(IO[bytes], _create_file_view(cast(Any, file), offset, length))


# ---- compiler


def compilation_metrics() -> list[Any]:
    """One record per graph that torch.compile has made in this process, each with
    `entire_frame_compile_time_s`; empty as long as nothing was compiled. Does not import the compiler, which
    takes a second."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.get_compilation_metrics() if dynamo is not None else []
