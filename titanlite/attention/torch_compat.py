"""Private and version-dependent APIs of torch for attention. Each function has a test in
tests/unit/attention/test_torch_compat.py, which fails when torch changes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def sdp_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> int:
    """The SDPBackend that scaled_dot_product_attention chooses for [B, heads, T, E]; causal if `mask` is
    None. Raises RuntimeError if no enabled kernel takes these tensors."""
    gqa = q.shape[1] != k.shape[1]
    return torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, flash: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exps, for [B, H, T, E]: [B, H, T, E], and fp32 with B * H * T elements. On
    CUDA by cuDNN, or with `flash` by the flash kernel; by torch's flash kernel on CPU, which needs as many
    key heads as query heads."""
    if not q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif flash:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = cudnn(q, k, v, None, True, 0.0, causal, False)
    return out, lse


def attention_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    flash: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v for the kernels of attention_with_lse. `lse`: [B, H, T, 1]."""
    q, k, v = inputs
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.squeeze(-1), 0.0, causal
        )
    dropout_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # not used: dropout is 0
    if flash:
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.squeeze(-1), None, None, q.shape[2], k.shape[2], 0.0, causal,
            dropout_seed, dropout_seed,
        )  # fmt: skip
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, dropout_seed, dropout_seed, None, None, None, q.shape[2], k.shape[2],
        0.0, causal,
    )  # fmt: skip


def load_varlen_attention() -> Callable[..., torch.Tensor] | None:
    """torch's causal attention within documents: a function of q, k, v [tokens, heads, E], cu_seqlens,
    max_seqlen and the sliding window in tokens, 0 for none. None if this torch lacks the kernel.

    torch 2.13 takes fewer key heads than query heads only with `enable_gqa`, which torch 2.11 does not have.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # not on every platform
        return None
    takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int = 0,
    ) -> torch.Tensor:
        # The numbers of earlier and later tokens that a token sees; -1: no limit.
        options: dict[str, Any] = {"window_size": (window - 1, 0)}
        if takes_gqa and q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        out: Any = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
        return out

    return attend


def use_flash_attention_4(on: bool) -> None:
    """Let scaled_dot_product_attention and varlen attention use the flash kernels of the package
    flash-attn-4, in this whole process, or torch's own again. Raises ImportError or RuntimeError if the
    installed package does not fit this torch."""
    if on == (torch.nn.attention.current_flash_attention_impl() == "FA4"):
        return
    if on:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    else:
        torch.nn.attention.restore_flash_attention_impl()


def flash_attention_4_can_be_deterministic() -> bool:
    """Whether this torch asks FlashAttention 4 for deterministic gradients where it has been told to use
    deterministic algorithms."""
    from torch.nn.attention import _fa4

    return "deterministic" in inspect.signature(_fa4._fa4_run_backward).parameters
