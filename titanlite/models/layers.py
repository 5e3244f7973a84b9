"""Layers that families share: linear, head, RMSNorm, rotary embedding, SwiGLU feed-forward.

Shape suffixes: B batch, T tokens, D model dim, F feed-forward dim, H heads, E head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.models.base import HeadFn


class Linear(nn.Linear):
    """A linear layer, by default without bias. The weight and the bias are cast to the dtype of `x`."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = False):
        super().__init__(dim_in, dim_out, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class ElementwiseLayer(nn.Module):
    """Base of layers with a few parameters that are applied to each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Callable[[Any], torch.Tensor] = lambda parameter: parameter
        """A parameter as a plain tensor; parallel/ may replace it."""
        self.own_tokens: Callable[[torch.Tensor], torch.Tensor] = lambda x_BT: x_BT
        """Selects the values of this rank's tokens, [B, T], from those of all; parallel/ may replace it."""


class Head(Linear):
    """The projection to the vocabulary. It applies `head_fn` in its forward, where FSDP has gathered its
    weight."""

    def forward(self, h_BTD: torch.Tensor, head_fn: HeadFn) -> torch.Tensor:  # type: ignore[override]
        return head_fn(h_BTD, self.weight)


def all_heads(parameter: torch.Tensor) -> torch.Tensor:
    """The values of a parameter for the heads of a rank that has all heads."""
    return parameter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dim."""
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.Module):
    """x / rms(x) * weight * scale over the last dim, computed in fp32, returned in x's dtype (Zhang &
    Sennrich 2019). The weight is rounded to x's dtype first, because FSDP gathers it in that dtype: results
    are the same with and without FSDP. `normalize`: a function with the arguments of rms_norm, which
    parallel/ may replace."""

    offset: ClassVar[float] = 0.0
    """A number that is added to the weight, in fp32."""

    def __init__(self, dim: int, eps: float, scale: float = 1.0):
        super().__init__()
        self.eps, self.scale = eps, scale
        self.weight = nn.Parameter(torch.empty(dim))
        self.normalize: Callable[..., torch.Tensor] = rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype).float()
        if self.offset:
            weight = weight + self.offset
        if self.scale != 1.0:
            weight = weight * self.scale
        return self.normalize(x.float(), weight, self.eps).to(x.dtype)


class OffsetNorm(RMSNorm):
    """x / rms(x) * (1 + weight) over the last dim."""

    offset = 1.0


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies, for longer sequences; factor 1 means no scaling.

    `linear` multiplies all wavelengths by `factor` (Chen et al. 2023). `llama3` (meta-llama/llama-models,
    apply_scaling) and `yarn` (Peng et al. 2023) multiply long wavelengths by `factor`, keep short ones, and
    interpolate those in between. The number of turns that a wavelength makes over original_max_position
    tokens decides: for `llama3` it is long below low_freq_factor turns and short above high_freq_factor
    turns, for `yarn` long below beta_slow turns and short above beta_fast turns. `yarn` also multiplies
    queries and keys by attention_factor; 0: by 0.1 ln(factor) + 1. `truncate`: whether `yarn` rounds the
    indices of the frequencies with these turns outwards.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    type: str = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """The scaled frequencies, from the frequencies fp32 [E / 2] of a model with the base `theta`."""
        if self.factor == 1.0:
            return frequencies
        if self.type == "linear":
            return frequencies / self.factor
        blend = self._llama3(frequencies) if self.type == "llama3" else self._yarn(frequencies, theta)
        return (1 - blend) * frequencies / self.factor + blend * frequencies

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        """The share of each frequency that is not scaled."""
        turns = self.original_max_position * frequencies / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return blend.clamp(0.0, 1.0)

    def _yarn(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """The share of each frequency that is not scaled. It falls linearly with the index of the
        frequency."""
        E = 2 * len(frequencies)

        def index(turns: float) -> float:
            """The index of the frequency that makes so many turns over the original length."""
            return E * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, E - 1)
        indices = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
        width = last - first if last != first else 0.001
        return 1 - ((indices - first) / width).clamp(0.0, 1.0)

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.type != "yarn" or self.factor == 1.0:
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0


def rope_tables(
    positions: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for int64 positions [..., T]: fp32 [..., T, E], with two equal halves.

    Each forward computes the tables with a few small kernels. A buffer would have to be right on the meta
    device, in checkpoints and for longer sequences.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    frequencies = scaling.scaled(1.0 / theta**exponents, theta)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scaling.magnitude == 1.0 else (cos * scaling.magnitude, sin * scaling.magnitude)


def identity_tables(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as rope_tables returns them, with which apply_rope changes nothing."""
    shape = (*positions.shape, head_dim)
    return torch.ones(shape, device=positions.device), torch.zeros(shape, device=positions.device)


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
