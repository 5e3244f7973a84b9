"""Attention sinks and soft caps in FlexAttention's kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

from titanlite.attention.auto import Auto
from titanlite.attention.base import Attention, AttentionBackend, AttentionKind, AttentionNeeds

pytestmark = pytest.mark.gpu
T, E = 200, 64


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind(0, True),
        AttentionKind(20, True),
        AttentionKind(0, False, 2.0),
        AttentionKind(20, True, 2.0),
    ],
    ids=str,
)
def test_flex(kind: AttentionKind, documents: bool, dtype: torch.dtype, compiled: bool) -> None:
    """Outputs and gradients, also of the sinks, against the softmax that sdpa's class writes out in fp32.
    They differ without sinks and without the cap."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(T).repeat(3, 1)
    positions[1, 90:] = torch.arange(T - 90)
    heads = [torch.randn(3, T, h, E, generator=generator).to(dtype) for h in (4, 2, 2)]
    heads += [torch.randn(4, generator=generator).to(dtype)] * kind.has_sinks
    weight = torch.randn(3, T, 4, E, generator=generator).cuda()

    def attend(attention: Attention, *inputs: torch.Tensor) -> torch.Tensor:
        return attention.attend(*inputs)

    def results(backend: str, dtype: torch.dtype, kind: AttentionKind) -> list[torch.Tensor]:
        inputs = [h.to("cuda", dtype).requires_grad_() for h in heads]
        chosen, tokens = AttentionBackend.choices[backend](), positions.cuda()
        attention = chosen.for_documents(tokens, 4) if documents else chosen.for_sequences(tokens)
        function = torch.compile(attend, fullgraph=True) if compiled and backend == "flex" else attend
        given = inputs if kind.has_sinks else inputs[:3]
        out = function(attention.of_kind(kind, tokens), *given)
        (out.float() * weight).sum().backward()
        return [x.detach().float() for x in (out, *(x.grad for x in given))]

    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    expected = results("sdpa", torch.float32, kind)
    for ours, theirs in zip(results("flex", dtype, kind), expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max() + 1e-4
    for other in (kind._replace(has_sinks=False), kind._replace(soft_cap=0.0)):
        if other != kind:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                assert (results("sdpa", torch.float32, other)[0] - expected[0]).abs().max() > 0.05


@pytest.mark.parametrize(
    "kinds", [(AttentionKind(128, True), AttentionKind(0, True)), (AttentionKind(0, False, 50.0),)]
)
def test_auto_takes_flex(kinds: tuple[AttentionKind, ...]) -> None:
    needs = AttentionNeeds(
        device=torch.device("cuda"), dtype=torch.bfloat16, seq_len=4096, n_heads=16, n_kv_heads=4, head_dim=E,
        kinds=kinds,
    )  # fmt: skip
    assert Auto().build(needs).kernel(needs) == "flex"
