"""A causal depthwise convolution over a few tokens, followed by SiLU, which stays within documents.

Shape suffixes: B batch, T tokens, D channels, W width of the kernel, P = W - 1 earlier tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def short_convolution(
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    starts: torch.Tensor | None = None,
    earlier_BPD: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(sum over w of weight[:, W - 1 - w] * x[t - w]), computed in fp32 (fp64 for fp64) and returned in
    x's dtype. The weight is rounded to x's dtype first, because FSDP gathers it in that dtype.

    `starts` bool [B, T]: True at the first token of each document; tokens before it count as zeros.
    `earlier_BPD`: the inputs of the P tokens before; None: zeros.

    Sums of shifted inputs instead of torch's convolution, which has no masks."""
    T, P = x_BTD.shape[1], weight_DW.shape[1] - 1
    dtype = torch.promote_types(x_BTD.dtype, torch.float32)
    if earlier_BPD is None:
        earlier_BPD = x_BTD.new_zeros(x_BTD.shape[0], P, x_BTD.shape[2])
    inputs = torch.cat((earlier_BPD, x_BTD), dim=1)
    weight = weight_DW.to(x_BTD.dtype).to(dtype)
    total = inputs[:, P:].to(dtype) * weight[:, P]
    hidden = None if starts is None else torch.zeros_like(starts)
    for distance in range(1, P + 1):
        shifted = inputs[:, P - distance : P - distance + T]
        if starts is not None and hidden is not None:  # a start among the last `distance` tokens
            hidden = hidden | F.pad(starts, (distance - 1, 0))[:, :T]
            shifted = shifted.masked_fill(hidden[..., None], 0.0)
        total = total + shifted.to(dtype) * weight[:, P - distance]
    return F.silu(total).to(x_BTD.dtype)
