"""Attention by FlashAttention 4, a package of its own with kernels for Hopper and Blackwell GPUs
(github.com/Dao-AILab/flash-attention, in flash_attn/cute)."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch

from titanlite.attention.base import Attention, AttentionBackend, AttentionNeeds
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.head_tail import HeadTail, HeadTailAttention, head_tail_attention
from titanlite.attention.sdpa import example_inputs
from titanlite.attention.torch_compat import flash_attention_4_can_be_deterministic, use_flash_attention_4
from titanlite.attention.varlen import Varlen
from titanlite.config.component import ConfigError

HOPPER, BLACKWELL = 9, 10  # compute capabilities for which torch accepts the package
# Sequence lengths by head dim from which forward and backward together took at least 5% less time than
# cuDNN's on an H100 (benchmarks/results/attention_kernels_h100.json, torch 2.11): its kernels take a dozen
# seconds to compile at every start.
FASTER_FROM = {64: 4096, 128: 16384}


@dataclass(frozen=True, kw_only=True)
class FlashAttention4(Varlen, name="flash_attention_4"):
    """FlashAttention 4, for whole sequences and context parallel; needs the package flash-attn-4, a Hopper or
    Blackwell GPU, and bf16 or fp16. Document masks and sliding windows need torch 2.13, too, and do not work
    with context parallel."""

    kept_ops: ClassVar[tuple[str, ...]] = (*Varlen.kept_ops, *HeadTail.kept_ops)

    def __post_init__(self) -> None:
        if self.sdpa_kernel != "auto":
            raise ConfigError(f"{self.name!r} has a kernel of its own; leave it at 'auto'", "sdpa_kernel")

    @classmethod
    def works_on(cls, needs: AttentionNeeds) -> bool:
        return not problem(needs)

    @classmethod
    def is_fastest(cls, needs: AttentionNeeds) -> bool:
        """Whether the package is installed and was measured as the fastest backend for such a GPU and such
        shapes, without masks."""
        if needs.device.type != "cuda" or not is_installed() or _capability(needs.device) != HOPPER:
            return False
        masks = needs.masks_documents or needs.has_effective_window or needs.has_other_values
        return not masks and needs.seq_len >= FASTER_FROM.get(needs.head_dim, needs.seq_len + 1)

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        if reason := problem(needs):
            raise ConfigError(f"{self.name!r} {reason}", "attention.backend")
        return super().build(needs)

    @property
    def allowed_kernels(self) -> Collection[str]:
        return {"flash", "efficient"}  # the second for the masks of sampling; torch prefers the first

    def kernel(self, needs: AttentionNeeds) -> str:
        return self.name

    def for_context_parallel(
        self, sharding: SequenceSharding, tokens_BT: torch.Tensor, positions_BT: torch.Tensor | None
    ) -> Attention:
        if positions_BT is not None:  # as in HeadTail
            return super().for_context_parallel(sharding, tokens_BT, positions_BT)
        return HeadTailAttention(sharding, flash=True)


def problem(needs: AttentionNeeds) -> str:
    """Why FlashAttention 4 cannot run; empty if it can, and then torch's flash kernels are exchanged for it.
    Runs forward and backward of a short sequence, which compiles the kernels in a few seconds."""
    if needs.device.type != "cuda" or needs.dtype not in (torch.bfloat16, torch.float16):
        dtype = str(needs.dtype).removeprefix("torch.")
        return f"needs a GPU and bf16 or fp16, not {needs.device.type} and {dtype}"
    if _capability(needs.device) not in (HOPPER, BLACKWELL):
        return "needs a Hopper or Blackwell GPU"
    if needs.context_parallel and (needs.masks_documents or needs.has_effective_window):
        return "does not support document masks and sliding windows under context parallel"
    if torch.are_deterministic_algorithms_enabled() and not flash_attention_4_can_be_deterministic():
        return f"is not deterministic with torch {torch.__version__}: unset training.deterministic"
    if not is_installed():
        return "needs the package flash-attn-4: pip install 'titanlite[flash4]'"
    try:
        use_flash_attention_4(True)
        _try(needs)
    except Exception as e:  # the package compiles its kernels when they are called, and fails in many ways
        use_flash_attention_4(False)
        line = (str(e).strip().splitlines() or [type(e).__name__])[0]
        return f"does not run with these packages, model and masks: {line}"
    return ""


def is_installed() -> bool:
    """Whether the package flash-attn-4 is installed; does not import it."""
    return all(importlib.util.find_spec(name) is not None for name in ("flash_attn", "flash_attn.cute"))


def _try(needs: AttentionNeeds) -> None:
    length = min(needs.seq_len, 256)
    q, k, v = inputs = example_inputs(needs, length)
    if needs.context_parallel:
        out = head_tail_attention(q[:, :, length // 2 :], k, v, 1, 2, flash=True)[0]
    else:
        tokens = torch.arange(length, device=needs.device)[None]
        backend = Varlen()
        masked = needs.masks_documents
        attention = backend.for_documents(tokens, 1) if masked else backend.for_sequences(tokens)
        if needs.has_effective_window:
            attention = attention.with_window(min(needs.window, length // 2), tokens)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = attention.attend(*(x.transpose(1, 2) for x in inputs))
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]
