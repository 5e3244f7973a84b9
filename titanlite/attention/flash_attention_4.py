"""Attention by FlashAttention 4, kernels for Hopper and Blackwell GPUs in the package flash-attn-4
(github.com/Dao-AILab/flash-attention, flash_attn/cute)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

import torch

from titanlite.attention.base import Attention, AttentionBackend, AttentionKind, AttentionNeeds
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.head_tail import HeadTail, HeadTailAttention, head_tail_attention
from titanlite.attention.sdpa import example_inputs
from titanlite.attention.varlen import Varlen
from titanlite.config.component import ConfigError
from titanlite.torch_compat import flash_attention_4_can_be_deterministic, use_flash_attention_4

CAPABILITIES = (9, 10)  # for which torch accepts the package


@dataclass(frozen=True, kw_only=True)
class FlashAttention4(Varlen, name="flash_attention_4"):
    """FlashAttention 4, for whole sequences and context parallel. Needs flash-attn-4, a GPU of compute
    capability 9 or 10 (H100, B200), and bf16 or fp16; document masks and sliding windows need torch 2.13 and
    no context parallel. `auto` does not take it."""

    kept_ops: ClassVar[tuple[str, ...]] = (*Varlen.kept_ops, *HeadTail.kept_ops)

    def __post_init__(self) -> None:
        if self.sdpa_kernel != "auto":
            raise ConfigError(f"{self.name} ignores it; remove the key or set it to 'auto'", "sdpa_kernel")

    @classmethod
    def works_on(cls, needs: AttentionNeeds) -> bool:
        return not obstacle(needs)

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        """Exchanges torch's flash kernels for FlashAttention 4 in this whole process, and runs forward and
        backward of a short sequence, which compiles kernels for a dozen seconds."""
        self.check_softmax(needs)
        if reason := obstacle(needs):
            raise ConfigError(f"{self.name!r} {reason}", "attention.backend")
        try:
            use_flash_attention_4(True)
            _try(needs)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # the package fails in many ways, at its import and when kernels are compiled
            use_flash_attention_4(False)
            line = (str(e).strip().splitlines() or [type(e).__name__])[0]
            raise ConfigError(
                f"{self.name!r} does not run with these packages, model and masks: {line}",
                "attention.backend",
            ) from e
        return super().build(needs)

    @property
    def allowed_kernels(self) -> Collection[str]:
        return {"flash"}

    def kernel(self, needs: AttentionNeeds) -> str:
        return self.name

    def for_context_parallel(
        self,
        sharding: SequenceSharding,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None,
        num_documents: int,
    ) -> Attention:
        if positions_BT is not None:  # as in HeadTail
            return super().for_context_parallel(sharding, tokens_BT, positions_BT, num_documents)
        return HeadTailAttention(sharding, flash=True)


def obstacle(needs: AttentionNeeds) -> str:
    """Why FlashAttention 4 cannot run, as far as it shows without running it; empty if nothing shows."""
    if needs.device.type != "cuda":
        return f"needs a GPU, not {needs.device.type}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, not {str(needs.dtype).removeprefix('torch.')}"
    if _capability(needs.device) not in CAPABILITIES:
        return "needs a GPU of compute capability 9 or 10, such as H100 and B200"
    if needs.context_parallel and (needs.masks_documents or needs.has_effective_window):
        return "does not support document masks and sliding windows under context parallel"
    if torch.are_deterministic_algorithms_enabled() and not flash_attention_4_can_be_deterministic():
        return f"is not deterministic with torch {torch.__version__}: unset training.deterministic"
    if not is_installed():
        return "needs the package flash-attn-4: pip install 'titanlite[flash4]'"
    return ""


def is_installed() -> bool:
    """Whether the package flash-attn-4 is installed."""
    try:
        return bool(version("flash-attn-4"))
    except PackageNotFoundError:
        return False


def _try(needs: AttentionNeeds) -> None:
    """Forward and backward. Kernels for a single tile of queries or keys are others than for several."""
    length = min(needs.seq_len, 2048)
    q, k, v = inputs = example_inputs(needs, length)
    if needs.context_parallel:
        out = head_tail_attention(q[:, :, length // 2 :], k, v, 1, 2, flash=True)[0]
    else:
        tokens = torch.arange(length, device=needs.device)[None]
        backend = Varlen()
        masked = needs.masks_documents
        attention = backend.for_documents(tokens, 1) if masked else backend.for_sequences(tokens)
        kinds = {AttentionKind(min(kind.window, length // 2)) for kind in needs.kinds}
        heads = [x.transpose(1, 2) for x in inputs]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.cat([attention.of_kind(kind, tokens).attend(*heads) for kind in sorted(kinds)])
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]
