"""Stands in for the functions of flash-linear-attention that titanlite calls, on any device: the same
arguments, results and gradients, computed by the reference."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

from titanlite.attention.gated_delta_rule import CHUNK_SIZE, gated_delta_rule

NORMS, RULE = "fla.modules.norm.l2norm", "fla.ops.gated_delta_rule.chunk"
_pool = ThreadPoolExecutor(1)  # autograd is off in the thread of an operator


def stand_in_for_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import fla...` finds the functions of this module. Without document masks only."""
    names = {".".join(name.split(".")[: i + 1]) for name in (NORMS, RULE) for i in range(name.count(".") + 1)}
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module, functions in ((NORMS, (l2norm_fwd, l2norm_bwd)), (RULE, (_forward, _backward))):
        for function in functions:
            name = function.__name__.replace("_forward", "chunk_gated_delta_rule_fwd")
            name = name.replace("_backward", "chunk_gated_delta_rule_bwd")
            setattr(sys.modules[module], name, function)


def l2norm_fwd(x: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.float().square().sum(-1) + eps)
    return (x.float() * rstd[..., None]).to(x.dtype), rstd


def l2norm_bwd(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
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
    cu_seqlens: None,
    chunk_indices: None,
) -> tuple[Any, ...]:
    assert all(x.is_contiguous() for x in (q, k, v, g, beta))
    out, state = gated_delta_rule(q, k, v, g, beta, initial_state)
    inverse = torch.zeros(*v.shape[:3], CHUNK_SIZE, dtype=k.dtype)
    return g.clone(), out, inverse, state if output_final_state else None, initial_state, None


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
    cu_seqlens: None,
    chunk_indices: None,
) -> tuple[Any, ...]:
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, do))

    def gradients() -> list[torch.Tensor]:
        given = [q, k, v, g, beta, *([] if initial_state is None else [initial_state])]
        leaves = [x.detach().requires_grad_() for x in given]
        out, state = gated_delta_rule(*leaves[:5], *leaves[5:])
        outs, weights = ([out], [do]) if dht is None else ([out, state], [do, dht])
        return list(torch.autograd.grad(outs, leaves, weights))

    g_q, g_k, g_v, g_g, g_beta, *g_initial = _pool.submit(gradients).result()
    return g_q, g_k, g_v, g_beta, g_g, g_initial[0] if g_initial else None, None, None
