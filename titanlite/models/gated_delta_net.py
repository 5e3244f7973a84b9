"""The gated delta net of Qwen3.5 and, with other projections, Qwen3-Next: a layer in the place of attention
whose state has a fixed size (Yang, Kautz & Hatamizadeh 2024, arXiv 2412.06464).

Parameter names and shapes are those of transformers' Qwen3_5GatedDeltaNet, so that safetensors files load by
name. Qwen3-Next has one matrix, in_proj_qkvz, with the rows of in_proj_qkv and in_proj_z, and another,
in_proj_ba, with the rows of in_proj_b and in_proj_a, both ordered by key head; the function is the same.

Shape suffixes: B batch, T tokens, D model dim, K heads of queries and keys, H heads of values and states, E
head dim of queries and keys, V head dim of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.models.gated_delta_rule import state_flops_per_token
from titanlite.models.gated_delta_rule_kernels import Documents, Rule, RuleInputs, kernel_for, torch_rule
from titanlite.models.layers import Linear
from titanlite.models.short_convolution import ShortConvolution

DT_BIAS_INIT = 1.0
DECAY_RATE_INIT = (0.01, 16.0)  # exp(A_log) is initially uniform between these two


@dataclass
class GatedDeltaNetCache:
    """The state of one layer between forwards of consecutive tokens: the last inputs of the convolution
    [B, width - 1, channels] and the state of the rule [B, H, E, V]. Its size does not depend on the number of
    tokens. A new object stands for the beginning of the sequences."""

    convolution: torch.Tensor | None = None
    state: torch.Tensor | None = None


class GatedRMSNorm(nn.Module):
    """x / rms(x) * weight * silu(gate) over the last dim, computed in fp32 (fp64 for fp64) and returned in
    x's dtype. The weight is rounded to x's dtype first, as in layers.RMSNorm."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(x.dtype).to(dtype)
        normed = F.rms_norm(x.to(dtype), weight.shape, weight, self.eps)
        return (normed * F.silu(gate.to(dtype))).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)). Not torch's softplus: the layout of its gradient is not always the layout that torch
    2.13 compiles for, and then the compile backend "aot_eager" fails."""
    return torch.logaddexp(x, torch.zeros_like(x))


class GatedDeltaNet(nn.Module):
    """Queries, keys and values are projected, mixed with the three tokens before and passed through SiLU.
    beta = sigmoid(in_proj_b(x)) and the log decay = -exp(A_log) softplus(in_proj_a(x) + dt_bias) are numbers
    for each token and head of the values. The outputs of the rule are normalised for each head, gated by
    silu(in_proj_z(x)) and projected.

    `num_value_heads` is a multiple of `num_key_heads`. `rule`: the implementation of the gated delta rule;
    `choose_kernel` replaces it. A_log and dt_bias are rounded to the dtype of the activations, because FSDP
    gathers them in that dtype."""

    def __init__(
        self,
        dim: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        norm_eps: float,
        conv_width: int = 4,
    ):
        super().__init__()
        assert num_value_heads % num_key_heads == 0
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        self.key_dim, self.value_dim = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        num_channels = 2 * self.key_dim + self.value_dim
        self.conv1d = ShortConvolution(num_channels, conv_width)
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.norm = GatedRMSNorm(value_head_dim, norm_eps)
        self.out_proj = Linear(self.value_dim, dim)
        self.in_proj_qkv = Linear(dim, num_channels)
        self.in_proj_z = Linear(dim, self.value_dim)
        self.in_proj_b = Linear(dim, num_value_heads)
        self.in_proj_a = Linear(dim, num_value_heads)
        self.rule: Rule = torch_rule

    def forward(
        self,
        x_BTD: torch.Tensor,
        documents: Documents | None = None,
        cache: GatedDeltaNetCache | None = None,
    ) -> torch.Tensor:
        """The outputs [B, T, D]. `documents`: of packed sequences, which do not see each other. `cache`: the
        state after the tokens before; it becomes the state after these tokens."""
        starts = None if documents is None else documents.starts
        earlier, state = (None, None) if cache is None else (cache.convolution, cache.state)
        qkv, last = self.conv1d(self.in_proj_qkv(x_BTD), starts, earlier)
        q, k, v = qkv.split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
        q_BTKE, k_BTKE = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (q, k))
        v_BTHV, z_BTHV = (x.unflatten(-1, (-1, self.value_head_dim)) for x in (v, self.in_proj_z(x_BTD)))

        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        beta_BTH = self.in_proj_b(x_BTD).to(dtype).sigmoid()
        rate, bias = (p.to(x_BTD.dtype).to(dtype) for p in (self.A_log, self.dt_bias))
        log_decay_BTH = -rate.exp() * softplus(self.in_proj_a(x_BTD).to(dtype) + bias)

        inputs = RuleInputs(q_BTKE, k_BTKE, v_BTHV, log_decay_BTH, beta_BTH)
        out_BTHV, state = self.rule(inputs, state, documents, cache is not None)
        if cache is not None:
            cache.convolution, cache.state = last, state
        return self.out_proj(self.norm(out_BTHV, z_BTHV).flatten(-2))

    def choose_kernel(self, device: torch.device, dtype: torch.dtype) -> None:
        """Take the implementation of the rule for activations of this dtype on this device."""
        self.rule = kernel_for(device, dtype)

    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward for one token: 6 N for the N parameters, of which the
        convolution's are multiplied with every token, too, and the products of the state
        (state_flops_per_token). Independent of the sequence length."""
        num_heads = self.value_dim // self.value_head_dim
        state = state_flops_per_token(num_heads, self.key_head_dim, self.value_head_dim)
        return 6 * sum(p.numel() for p in self.parameters()) + state
