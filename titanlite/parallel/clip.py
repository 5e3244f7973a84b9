"""The total norm of the gradients, over all parameters of all ranks, whatever meshes they lie on; and the
divisor that clips by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.torch_compat import all_reduce, foreach_norm


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], pipeline: DeviceMesh | None = None) -> torch.Tensor:
    """Total norm of the gradients: fp32 scalar, equal on all ranks; no host synchronisation. `pipeline`: the
    ranks that have the other stages of the model."""
    by_mesh: dict[object, list[torch.Tensor]] = defaultdict(
        list
    )  # torch cannot stack norms of different meshes
    for p in parameters:
        if p.grad is not None:
            by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p.grad)
    norms = [norm for gradients in by_mesh.values() for norm in _norms(gradients)]
    total = torch.linalg.vector_norm(torch.stack(norms)).float()
    if pipeline is not None:
        total = all_reduce(total.square(), "sum", pipeline).sqrt()
    return total


def clip_divisor(grad_norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
    """What to divide gradients by so that their total norm is at most `max_norm`: scalar, at least 1; None if
    `max_norm` is 0, for no clipping."""
    return ((grad_norm + 1e-6) / max_norm).clamp(min=1) if max_norm > 0 else None


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norm of each gradient, as plain tensors."""
    if gradients[0].device.type == "cpu":
        # torch's CPU reduction accumulates naively in fp32: an error of 1e-4 at a million elements (torch
        # 2.13).
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    else:
        norms = list(foreach_norm(gradients))
    stacked = torch.stack(norms)
    return list(stacked.full_tensor() if isinstance(stacked, DTensor) else stacked)  # one collective for all
