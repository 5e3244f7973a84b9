"""Layers that families share: linear, head, RMSNorm, rotary embedding, SwiGLU feed-forward.

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
    """A linear layer without bias. The weight is cast to the dtype of `x`."""

    def __init__(self, dim_in: int, dim_out: int):
        super().__init__(dim_in, dim_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Head(Linear):
    """The projection to the vocabulary. It applies `head_fn` in its forward, where FSDP has gathered its
    weight."""

    def forward(self, h_BTD: torch.Tensor, head_fn: HeadFn) -> torch.Tensor:  # type: ignore[override]
        return head_fn(h_BTD, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight * scale over the last dim, computed in fp32, returned in x's dtype (Zhang &
    Sennrich 2019). The weight is rounded to x's dtype first, because FSDP gathers it in that dtype: results
    are the same with and without FSDP."""

    def __init__(self, dim: int, eps: float, scale: float = 1.0):
        super().__init__()
        self.eps, self.scale = eps, scale
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype).float()
        if self.scale != 1.0:
            weight = weight * self.scale
        return F.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies; factor 1 means no scaling.

    Wavelengths above original_max_position / low_freq_factor are multiplied by `factor`, wavelengths below
    original_max_position / high_freq_factor stay as they are, and wavelengths between the two are
    interpolated (meta-llama/llama-models, apply_scaling).
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rope_tables(
    positions: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for int64 positions [..., T]: fp32 [..., T, E], with two equal halves.

    Each forward computes the tables with a few small kernels. A buffer would have to be right on the meta
    device, in checkpoints and for longer sequences.
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
    """Rotate queries or keys by their positions, in fp32. `cos` and `sin` are [T, E] or [B, T, E].

    Element e is paired with element e + E/2 ("rotate half", Hugging Face's layout). Real arithmetic, because
    torch.compile does not fuse complex numbers.
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
