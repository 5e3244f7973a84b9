"""Layers shared by the families: linear, head, RMSNorm, rotary embedding, SwiGLU feed-forward.

Shape suffixes: B batch, T tokens, D model dim, F feed-forward dim, H heads, E head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.models.base import HeadFn


class Linear(nn.Linear):
    """Without bias; the product is taken in the dtype of `x`, whatever the weight's."""

    def __init__(self, dim_in: int, dim_out: int):
        super().__init__(dim_in, dim_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Head(Linear):
    """The projection to the vocabulary. It is called like any module, so that FSDP gathers its weight for
    `head_fn`."""

    def forward(self, h_BTD: torch.Tensor, head_fn: HeadFn) -> torch.Tensor:  # type: ignore[override]
        return head_fn(h_BTD, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in fp32, returned in x's dtype (Zhang & Sennrich
    2019). The weight is rounded to x's dtype first, as FSDP gathers it: alone or sharded, it is the same."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.to(x.dtype).float(), self.eps).to(x.dtype)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies; factor 1 is none.

    Wavelengths over original_max_position / low_freq_factor are stretched by `factor`, those under
    original_max_position / high_freq_factor are kept, those between are blended (meta-llama/llama-models,
    apply_scaling).
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rope_tables(
    positions: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for int64 positions [..., T]: fp32 [..., T, E], the two halves alike.

    Computed anew in each forward: a few small kernels, and no buffer that a meta device, a checkpoint or a
    longer sequence could get wrong.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling.factor != 1.0:
        turns = scaling.original_max_position * frequencies / (2 * math.pi)
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        frequencies = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x_BTHE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its position, in fp32 and real arithmetic (it fuses under compile, complex does
    not).

    Element e is paired with e + E/2 ("rotate half", Hugging Face's layout); tables are [T, E] or [B, T, E].
    """
    x = x_BTHE.float()
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)).to(x_BTHE.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) without biases (Shazeer 2020)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.gate_proj = Linear(dim, hidden_dim)
        self.up_proj = Linear(dim, hidden_dim)
        self.down_proj = Linear(hidden_dim, dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
