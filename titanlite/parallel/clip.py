"""Gradient clipping by total norm, over all parameters of all ranks, whatever meshes they lie on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, pipeline: DeviceMesh | None = None
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm` (0: leave them). Returns the norm
    before, fp32 scalar, equal on all ranks; no host sync. `pipeline`: ranks with the rest of the model."""
    by_mesh: dict[object, list[nn.Parameter]] = defaultdict(
        list
    )  # torch cannot stack norms of different meshes
    for p in parameters:
        if p.grad is not None:
            by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    norms = [n for group in by_mesh.values() for n in _norms([p.grad for p in group if p.grad is not None])]
    total = torch.linalg.vector_norm(torch.stack(norms)).float()
    if pipeline is not None:
        total = funcol.all_reduce(total.square(), "sum", pipeline).sqrt()
    if max_norm > 0:
        for group in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norm of each gradient, as plain tensors."""
    if gradients[0].device.type == "cpu":
        # torch's CPU reduction accumulates naively in fp32: an error of 1e-4 at a million elements (torch
        # 2.13).
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    else:
        norms = list(torch._foreach_norm(gradients))
    stacked = torch.stack(norms)
    return list(stacked.full_tensor() if isinstance(stacked, DTensor) else stacked)  # one collective for all
