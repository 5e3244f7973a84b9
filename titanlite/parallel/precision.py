"""bf16 in a single process: weights stay fp32 and each layer casts its weight, which the compiler fuses into
its kernels. FSDP would copy weights and gradients."""

from __future__ import annotations

import torch
from torch import nn

from titanlite.models.base import Decoder


def apply_precision(net: Decoder, dtype: torch.dtype) -> None:
    """Cast the output of the embedding to `dtype`. All other layers keep the dtype of their input."""
    for module in net.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, tokens, hidden: hidden.to(dtype))
