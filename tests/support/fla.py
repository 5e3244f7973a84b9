"""Stands in for the functions of flash-linear-attention that titanlite calls, on any device: with the same
arguments, and outputs, states and gradients by the reference. Other results have only the right shapes."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from titanlite.attention.gated_delta_rule import CHUNK_SIZE, gated_delta_rule

NORMS, RULE = "fla.modules.norm.l2norm", "fla.ops.gated_delta_rule.chunk"


def stand_in_for_fla(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let `import fla...` find the functions of this module. Returns a list of their calls: "whole" or
    "documents", and for each backward "backward"."""
    calls = list[str]()

    def forward(*tensors: torch.Tensor, **how: Any) -> tuple[Any, ...]:
        calls.append("whole" if how["cu_seqlens"] is None else "documents")
        return _forward(*tensors, **how)

    def backward(*tensors: torch.Tensor, **how: Any) -> tuple[Any, ...]:
        calls.append("backward")
        return _backward(*tensors, **how)

    for name in (NORMS, RULE):
        for i in range(name.count(".") + 1):
            parent = ".".join(name.split(".")[: i + 1])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    vars(sys.modules[NORMS]).update(l2norm_fwd=_normalize, l2norm_bwd=_normalize_backward)
    vars(sys.modules[RULE]).update(chunk_gated_delta_rule_fwd=forward, chunk_gated_delta_rule_bwd=backward)
    return calls


def _normalize(x: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.float().square().sum(-1) + eps)
    return (x.float() * rstd[..., None]).to(x.dtype), rstd


def _normalize_backward(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    y, dy = y.float(), dy.float()
    return (dy - (dy * y).sum(-1, keepdim=True) * y) * rstd[..., None]


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
) -> tuple[Any, ...]:
    assert scale == q.shape[-1] ** -0.5
    assert g.dtype == torch.float32
    assert (cu_seqlens is None) == (chunk_indices is None)
    assert cu_seqlens is None or len(q) == 1
    assert all(x.is_contiguous() for x in (q, k, v, g, beta))
    out, state = _of_documents([q, k, v, g, beta], initial_state, cu_seqlens)
    inverse = torch.zeros(*v.shape[:3], CHUNK_SIZE, dtype=k.dtype)
    return g.clone(), out, inverse, state if output_final_state else None, initial_state, None


def _of_documents(
    tensors: list[torch.Tensor], state: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the states after whole sequences or after each document, which may be empty."""
    if cu_seqlens is None:
        return gated_delta_rule(*tensors, state)
    outs, states = [], []
    q, _, v, _, _ = tensors
    for i, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        first = v.new_zeros(1, v.shape[2], q.shape[3], v.shape[3]) if state is None else state[i, None]
        if begin == end:
            states.append(first)
            continue
        out, last = gated_delta_rule(*(x[:, begin:end] for x in tensors), first)
        outs.append(out)
        states.append(last)
    return torch.cat(outs, 1), torch.cat(states)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    inverse: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
) -> tuple[Any, ...]:
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, do))

    def gradients() -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        first = None if initial_state is None else initial_state.detach().requires_grad_()
        out, state = _of_documents(leaves, first, cu_seqlens)
        outs, weights = ([out], [do]) if dht is None else ([out, state], [do, dht])
        return list(torch.autograd.grad(outs, leaves if first is None else [*leaves, first], weights))

    with ThreadPoolExecutor(1) as pool:  # autograd is off in the thread of an operator
        g_q, g_k, g_v, g_g, g_beta, *g_initial = pool.submit(gradients).result()
    return g_q, g_k, g_v, g_beta, g_g, g_initial[0] if g_initial else None, None, None
