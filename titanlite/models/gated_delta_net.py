"""The gated delta net of Qwen3.5 and, with other projections, Qwen3-Next: a layer in the place of attention
whose state has a fixed size (Yang, Kautz & Hatamizadeh 2024, arXiv 2412.06464).

Parameter names and shapes are those of transformers' Qwen3_5GatedDeltaNet, so that safetensors files load by
name. Qwen3-Next has one matrix, in_proj_qkvz, with the rows of in_proj_qkv and in_proj_z, and another,
in_proj_ba, with the rows of in_proj_b and in_proj_a, both ordered by key head; the function is the same.

Shape suffixes: B batch, T tokens, D model dim, K heads of queries and keys, H heads of values and states, E
head dim of queries and keys, V head dim of values, C channels of the convolution, W its width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.attention.gated_delta_rule import state_flops_per_token
from titanlite.attention.gated_delta_rule_kernels import RuleInputs
from titanlite.attention.linear import LinearAttention
from titanlite.models.layers import Linear, RMSNorm, all_heads

DT_BIAS_INIT = 1.0
DECAY_RATE_INIT = (0.01, 16.0)  # exp(A_log) is initially uniform between these two


def initial_a_log(normal: torch.Tensor) -> torch.Tensor:
    """Initial values of A_log from values of a standard normal distribution, elementwise."""
    low, high = DECAY_RATE_INIT
    # In fp64, as in initialize.py: the last bits of fp32 logarithms depend on the device.
    uniform = 0.5 * (1.0 + torch.erf(normal.double() / math.sqrt(2.0)))
    return torch.log(low + (high - low) * uniform).to(normal.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)). Not torch's softplus: the layout of its gradient is not always the layout that torch
    2.13 compiles for, and then the compile backend "aot_eager" fails."""
    return torch.logaddexp(x, torch.zeros_like(x))


class ConvolutionWeight(nn.Module):
    """The weight of a depthwise convolution, with the name and shape of nn.Conv1d's. `own_rows`: selects the
    channels of this rank's heads; parallel/ may replace it."""

    def __init__(self, num_channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))
        self.own_rows: Callable[[Any], torch.Tensor] = all_heads

    def forward(self) -> torch.Tensor:
        """The weights [C, W] of this rank's channels."""
        return self.own_rows(self.weight).squeeze(1)


class GatedDeltaNet(nn.Module):
    """Queries, keys and values are projected, convolved over `conv_width` tokens and passed through SiLU.
    beta = sigmoid(in_proj_b(x)) and the log decay = -exp(A_log) softplus(in_proj_a(x) + dt_bias) are numbers
    for each token and head of the values. The outputs of the rule are normalised for each head, gated by
    silu(in_proj_z(x)) and projected.

    `num_value_heads` is a multiple of `num_key_heads`. A_log and dt_bias are rounded to the dtype of the
    activations, because FSDP gathers them in that dtype. `own_heads`: selects the values of this rank's
    heads; parallel/ may replace it."""

    def __init__(
        self,
        dim: int,
        num_heads: tuple[int, int],
        head_dims: tuple[int, int],
        norm_eps: float,
        conv_width: int = 4,
    ):
        """`num_heads` and `head_dims`: of queries and keys, and of values."""
        super().__init__()
        (num_key_heads, num_value_heads), (self.key_head_dim, self.value_head_dim) = num_heads, head_dims
        assert num_value_heads % num_key_heads == 0
        key_dim, value_dim = num_key_heads * self.key_head_dim, num_value_heads * self.value_head_dim
        self.stacked = key_dim, key_dim, value_dim
        """The numbers of rows of in_proj_qkv, and of channels, of the queries, the keys and the values."""
        self.conv1d = ConvolutionWeight(sum(self.stacked), conv_width)
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.norm = RMSNorm(self.value_head_dim, norm_eps)
        self.out_proj = Linear(value_dim, dim)
        self.in_proj_qkv = Linear(dim, sum(self.stacked))
        self.in_proj_z = Linear(dim, value_dim)
        self.in_proj_b = Linear(dim, num_value_heads)
        self.in_proj_a = Linear(dim, num_value_heads)
        self.own_heads: Callable[[Any], torch.Tensor] = all_heads

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: LinearAttention
    ) -> torch.Tensor:
        """The outputs [B, T, D]. `cos` and `sin`, of rotary positions, are not used."""
        z_BTHV = self.in_proj_z(x_BTD).unflatten(-1, (-1, self.value_head_dim))
        qkv_BTC = attention.convolve(self.in_proj_qkv(x_BTD), self.conv1d())
        # Not self.stacked: under tensor parallel, this rank has only some of the heads.
        value_dim = z_BTHV.shape[-2] * self.value_head_dim
        key_dim = (qkv_BTC.shape[-1] - value_dim) // 2
        q, k, v = qkv_BTC.split((key_dim, key_dim, value_dim), dim=-1)
        q_BTKE, k_BTKE = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (q, k))
        v_BTHV = v.unflatten(-1, (-1, self.value_head_dim))

        dtype = torch.promote_types(v.dtype, torch.float32)
        beta_BTH = self.in_proj_b(x_BTD).to(dtype).sigmoid()
        rate, bias = (self.own_heads(p).to(v.dtype).to(dtype) for p in (self.A_log, self.dt_bias))
        log_decay_BTH = -rate.exp() * softplus(self.in_proj_a(x_BTD).to(dtype) + bias)

        out_BTHV = attention.attend_linearly(RuleInputs(q_BTKE, k_BTKE, v_BTHV, log_decay_BTH, beta_BTH))
        gated_BTHV = (self.norm(out_BTHV).to(dtype) * F.silu(z_BTHV.to(dtype))).to(v.dtype)
        return self.out_proj(gated_BTHV.flatten(-2))

    def state_flops_per_token(self) -> int:
        """Model FLOPs of forward and backward for one token, without those of the parameters."""
        num_heads = self.stacked[2] // self.value_head_dim
        return state_flops_per_token(num_heads, self.key_head_dim, self.value_head_dim)
