"""Pins what titanlite relies on in torch's private names of attention: a test for each function of
titanlite/attention/torch_compat.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from titanlite.attention import torch_compat


def test_varlen_attention_takes_the_arguments_that_are_passed() -> None:
    """The kernel runs on CUDA only; FakeTensorMode runs all of its Python code."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    attend = torch_compat.load_varlen_attention()
    assert attend is not None
    with FakeTensorMode():
        q, k = (torch.empty(12, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="cuda")
        assert attend(q, k, k, cu_seqlens, 8).shape == (12, 4, 16)
        assert attend(q, q, q, cu_seqlens, 8).shape == (12, 4, 16)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_log_sum_exps_and_its_backward(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 8, 16, generator=generator) for _ in range(4))
    out, lse = torch_compat.attention_with_lse(q, k, v, causal)
    scores = q @ k.transpose(-1, -2) / 4
    if causal:
        scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(lse.reshape(2, 3, 8), scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    for x in (q, k, v):
        x.requires_grad_()
    nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(grad)
    lse = lse.reshape(2, 3, 8, 1)
    ours = torch_compat.attention_backward(grad, (q.detach(), k.detach(), v.detach()), out, lse, causal)
    for x, gradient in zip((q, k, v), ours):
        torch.testing.assert_close(gradient, x.grad)


@pytest.mark.gpu
def test_the_sdp_choice_of_a_gpu() -> None:
    q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    assert SDPBackend(torch_compat.sdp_choice(q, k, k, None)) != SDPBackend.ERROR


def test_flash_attention_4_takes_the_place_of_the_flash_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    attention: Any = torch.nn.attention
    assert "FA4" in attention.list_flash_attention_impls()

    def fails() -> None:
        raise ImportError

    with monkeypatch.context() as patch:
        patch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA4", fails)
        with pytest.raises(ImportError):
            torch_compat.use_flash_attention_4(True)
    assert attention.current_flash_attention_impl() is None

    class Handle:
        def remove(self) -> None:
            calls.append("removed")

    def register() -> Handle:
        calls.append("registered")
        return Handle()

    calls = list[str]()
    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA4", register)
    for on in (False, True, True, False, False):
        torch_compat.use_flash_attention_4(on)
        assert (attention.current_flash_attention_impl() == "FA4") == on
    assert calls == ["registered", "removed"]


def test_torch_asks_flash_attention_4_for_deterministic_gradients() -> None:
    """If not, runs with training.deterministic refuse the package."""
    assert torch_compat.flash_attention_4_can_be_deterministic()
