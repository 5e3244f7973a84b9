"""bf16 in a process that shards nothing: weights stay fp32, and the layers cast them where they are used,
which the compiler makes part of its kernels. FSDP would copy the weights, and the gradients, for nothing."""

from __future__ import annotations

import torch
from torch import nn

from titanlite.models.base import Decoder


def apply_precision(net: Decoder, dtype: torch.dtype) -> None:
    """Let activations have `dtype`, which they have from the embedding on."""
    for module in net.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, tokens, found: found.to(dtype))
