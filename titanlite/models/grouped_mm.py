"""Grouped matrix products: each group of rows is multiplied with its own matrix.

torch's grouped_mm computes them in one kernel, for bf16 on CUDA. Elsewhere a loop does, as an operator of our
own: torch's has no backward for zero rows, and its fp32 form does not compile. The gradient of the weights
comes from an operator of our own everywhere, which makes its inputs row-major: torch's kernel needs them so,
and inductor may pass column-major ones.

Shape suffixes: R rows, E groups, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

GroupedMM = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function with the arguments of grouped_mm."""


def grouped_mm(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The products [R, O] of rows with the transposed matrix of their group, in the dtype of `x_RI`. Group e
    is the rows from ends_E[e - 1], or 0, up to ends_E[e]; it may be empty. `ends_E`: int32, the last is R."""
    weight_EOI = weight_EOI.to(x_RI.dtype)
    if _has_kernel(x_RI):
        return F.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)
    return grouped_loop(x_RI, weight_EOI, ends_E)


def _has_kernel(x_RI: torch.Tensor) -> bool:
    return x_RI.is_cuda and x_RI.dtype == torch.bfloat16 and x_RI.shape[0] > 0


@torch.library.custom_op("titanlite::grouped_mm", mutates_args=())
def grouped_loop(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """grouped_mm as one product after another."""
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    for rows, weight_OI in zip(_groups(ends_E), weight_EOI):
        torch.mm(x_RI[rows], weight_OI.T, out=out_RO[rows])
    return out_RO


@torch.library.custom_op("titanlite::grouped_mm_weight", mutates_args=())
def grouped_mm_weight(g_RO: torch.Tensor, x_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The gradient [E, O, I] of grouped_mm's weight, for the gradient `g_RO` of its output."""
    if _has_kernel(x_RI):
        return F.grouped_mm(g_RO.contiguous().T, x_RI.contiguous(), offs=ends_E).contiguous()
    out_EOI = x_RI.new_empty(len(ends_E), g_RO.shape[1], x_RI.shape[1])
    for rows, out_OI in zip(_groups(ends_E), out_EOI):
        torch.mm(g_RO[rows].T, x_RI[rows], out=out_OI)
    return out_EOI


def _groups(ends_E: torch.Tensor) -> list[slice]:
    """The rows of each group. Waits for the device."""
    ends = ends_E.tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


@grouped_loop.register_fake
def _(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])


@grouped_mm_weight.register_fake
def _(g_RO: torch.Tensor, x_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return x_RI.new_empty(ends_E.shape[0], g_RO.shape[1], x_RI.shape[1])


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g_RO: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x_RI, weight_EOI, ends_E = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    g_RI = grouped_loop(g_RO, weight_EOI.transpose(1, 2), ends_E) if needs_x else None
    return g_RI, grouped_mm_weight(g_RO, x_RI, ends_E) if needs_weight else None, None


grouped_loop.register_autograd(_backward, setup_context=_save)
