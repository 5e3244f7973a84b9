"""The total norm of the gradients over all parameters and ranks, and the divisor that clips gradients to a
maximum norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.torch_compat import all_reduce, foreach_norm


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], pp: DeviceMesh | None = None) -> torch.Tensor:
    """Total norm of the gradients: fp32 scalar, equal on all ranks; no host synchronisation. `pp`: the
    mesh of the pipeline-parallel ranks; None without pipeline parallel."""
    # torch cannot stack norms of gradients on different meshes.
    by_mesh: dict[object, list[torch.Tensor]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p.grad)
    norms = [norm for gradients in by_mesh.values() for norm in _norms(gradients)]
    total = torch.linalg.vector_norm(torch.stack(norms)).float()
    if pp is not None:
        total = all_reduce(total.square(), "sum", pp).sqrt()
    return total


def clip_divisor(grad_norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
    """The divisor of gradients that reduces their total norm to at most `max_norm`: scalar, at least 1. None
    if `max_norm` is 0: no clipping."""
    return ((grad_norm + 1e-6) / max_norm).clamp(min=1) if max_norm > 0 else None


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norm of each gradient, as plain tensors."""
    if gradients[0].device.type == "cpu":
        # On CPU torch 2.13 sums sequentially in fp32: the error is 1e-4 for a million elements.
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    else:
        norms = list(foreach_norm(gradients))
    stacked = torch.stack(norms)
    return list(stacked.full_tensor() if isinstance(stacked, DTensor) else stacked)  # a single collective
