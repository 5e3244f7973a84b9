"""The norms of the gradients, of each parameter and in total, and clipping: gradients are scaled down to a
maximum total norm, or each to a maximum that follows its own norm."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.mesh import ALONE, Mesh, local_shard
from titanlite.optim.base import CLIP_NORM
from titanlite.parallel.same_bits import squared_norms
from titanlite.torch_compat import all_reduce, foreach_copy, foreach_norm

MARGIN, DECAY, GLOBAL_STEPS = 1.05, 0.98, 100  # of AdaGC: lambda_rel, beta and the warmup


class GradNorms(NamedTuple):
    """Norms of the gradients of one step.

    `total`: norm of the gradients of the whole model, an fp32 scalar; copies of the model may differ in its
    last digits. `names`: this rank's parameters with a gradient. `norms`: [len(names)], the norm of the whole
    gradient of each of these parameters, equal on all ranks that have a shard or a copy of it."""

    total: torch.Tensor
    names: list[str]
    norms: torch.Tensor


@torch.no_grad()
def grad_norms(net: nn.Module, mesh: Mesh = ALONE) -> GradNorms:
    """The norms of the gradients of `net`, without a host synchronisation. Collective over `mesh`."""
    if mesh.same_bits:
        gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        squares = squared_norms(list(gradients.values()), mesh)
        return GradNorms(squares.sum().sqrt().float(), list(gradients), squares.sqrt())
    # torch cannot stack norms of gradients on different meshes.
    by_mesh: dict[object, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, p in net.named_parameters():
        if p.grad is not None:
            by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None][name] = p.grad
    norms = torch.cat([_norms(list(gradients.values())) for gradients in by_mesh.values()])
    total = torch.linalg.vector_norm(norms).float()
    if mesh.pp is not None:
        total = all_reduce(total.square(), "sum", mesh.pp).sqrt()
    return GradNorms(total, [name for gradients in by_mesh.values() for name in gradients], norms)


def clip_divisor(grad_norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
    """The divisor of gradients that reduces their total norm to at most `max_norm`: scalar, at least 1. None
    if `max_norm` is 0: no clipping."""
    return ((grad_norm + 1e-6) / max_norm).clamp(min=1) if max_norm > 0 else None


def _norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Norm of each gradient, as one plain tensor."""
    if gradients[0].device.type == "cpu":
        # On CPU torch 2.13 sums sequentially in fp32: the error is 1e-4 for a million elements.
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    else:
        norms = list(foreach_norm(gradients))
    stacked = torch.stack(norms)
    return stacked.full_tensor() if isinstance(stacked, DTensor) else stacked  # a single collective


class Clipper:
    """Clips the gradients of each step, without a host synchronisation.

    `clip` = "global": all gradients are divided by one number, so that their total norm is at most
    `max_norm`.

    `clip` = "tensor": AdaGC (Wang et al. 2025, arXiv 2502.11034). Each gradient is scaled down to at most
    1.05 times the running average of its norm after clipping: average = 0.98 average + 0.02 norm. The first
    100 steps clip globally, and the average is the smallest norm after clipping so far. Unlike in the paper,
    a norm of 0 leaves the average as it is, because an average of 0 would scale every later gradient to 0.
    The averages are optimizer state: the scalar `<parameter>.clip_norm` of each parameter, equal on all
    ranks. A skipped step does not change them.
    """

    def __init__(
        self,
        clip: Literal["global", "tensor"],
        max_norm: float,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self._max_norm = max_norm
        self._parameters = dict(net.named_parameters()) if clip == "tensor" else {}
        self._averages = {
            name: torch.full((), torch.inf, device=local_shard(p).device)
            for name, p in self._parameters.items()
        }
        self.num_clipped: torch.Tensor | None = None
        """Number of this rank's gradients that the newest step has scaled down; None with "global"."""
        if clip == "tensor":
            optimizer.register_step_post_hook(self._add_state)

    @torch.no_grad()
    def clip(self, norms: GradNorms, apply: torch.Tensor, step: int) -> torch.Tensor | None:
        """Clip the gradients of `step`. Returns the divisor of all gradients that is left to the optimizer's
        step, or None. `apply`: bool scalar, False if the step is skipped."""
        divisor = clip_divisor(norms.total, self._max_norm)
        if not self._parameters:
            return divisor
        averages = [self._averages[name] for name in norms.names]
        average, norm = torch.stack(averages), norms.norms.float()
        if step <= GLOBAL_STEPS:
            factor = torch.ones_like(norm) if divisor is None else (1 / divisor).expand_as(norm)
            updated = torch.minimum(average, factor * norm)
        else:
            divisor = None
            factor = (MARGIN * average / norm).clamp(max=1)
            for name, one in zip(norms.names, factor.unbind()):
                gradient = self._parameters[name].grad
                assert gradient is not None
                local_shard(gradient).mul_(one)
            # The average is infinite if all earlier norms were 0.
            updated = torch.where(average.isinf(), norm, DECAY * average + (1 - DECAY) * factor * norm)
        changes = apply.to(norm.device) & (norm > 0)
        foreach_copy(averages, torch.where(changes, updated, average).unbind())
        self.num_clipped = (factor < 1).sum()
        return divisor

    def _add_state(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Add the averages to the optimizer's state. Called after each of its steps: before its first step,
        an optimizer would take a parameter with state for one whose state it has made."""
        for name, p in self._parameters.items():
            if p.grad is not None:
                optimizer.state[p].setdefault(CLIP_NORM, self._averages[name])
