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
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(sum over w of weight[:, W - 1 - w] * x[t - w]), computed in fp32 (fp64 for fp64) and returned in
    x's dtype, and the inputs of the last P tokens for the next call. The weight is rounded to x's dtype
    first, because FSDP gathers it in that dtype.

    `starts` bool [B, T]: True at the first token of each document; tokens before it count as zeros.
    `earlier_BPD`: the second result of the call for the tokens before; None: zeros.

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
    last = inputs[:, T:]
    if starts is not None:
        later_starts = F.pad(starts, (P, 0))[:, T:].flip(1).cumsum(1).flip(1)  # at each token or after it
        hidden = F.pad(later_starts, (0, 1))[:, 1:] > 0
        last = last.masked_fill(hidden[..., None], 0.0)
    return F.silu(total).to(x_BTD.dtype), last
