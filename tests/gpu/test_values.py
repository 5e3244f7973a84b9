"""Values of another head dim than queries and keys, as in multi-head latent attention, with every kernel on a
GPU."""

from __future__ import annotations

import pytest
import torch

from titanlite.attention.auto import Auto
from titanlite.attention.base import AttentionBackend, AttentionNeeds

pytestmark = pytest.mark.gpu
T, E, V = 200, 192, 128  # the head dims of DeepSeek-V3


@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen"])
def test_kernels_take_them(backend: str, documents: bool) -> None:
    """Outputs and gradients in bf16 against a dense mask in fp32."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(T).repeat(3, 1)
    positions[1, 90:] = torch.arange(T - 90)
    heads = [torch.randn(3, T, 4, dim, generator=generator).bfloat16() for dim in (E, E, V)]
    weight = torch.randn(3, T, 4, V, generator=generator)

    def results(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (h.to("cuda", dtype).requires_grad_() for h in heads)
        chosen, tokens = AttentionBackend.choices[backend](), positions.cuda()
        attention = chosen.for_documents(tokens, 4) if documents else chosen.for_sequences(tokens)
        out = attention.attend(q, k, v)
        (out.float() * weight.cuda()).sum().backward()
        return [x.detach().float() for x in (out, q.grad, k.grad, v.grad)]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = results("sdpa", torch.float32)
    for ours, theirs in zip(results(backend, torch.bfloat16), expected):
        assert (ours - theirs).abs().max() <= 3e-2 * theirs.abs().max()


def test_a_run_finds_a_fused_kernel() -> None:
    needs = AttentionNeeds(
        device=torch.device("cuda"), dtype=torch.bfloat16, seq_len=4096, n_heads=16, n_kv_heads=16,
        head_dim=E, v_head_dim=V,
    )  # fmt: skip
    try:
        assert Auto().build(needs).kernel(needs) in ("cudnn", "efficient")
    finally:
        for enable in ("flash", "cudnn", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{enable}_sdp")(True)
