"""Attention sinks and soft caps: outputs and gradients of every attention object equal a softmax that is
written out, and a backend that has neither is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, create_block_mask, flex_attention

from tests.examples.sliding_window import SlidingWindow
from tests.support.tiers import full
from titanlite.attention import flex
from titanlite.attention.auto import Auto
from titanlite.attention.base import Attention, AttentionBackend, AttentionKind, AttentionNeeds, kernels
from titanlite.attention.flash_attention_4 import FlashAttention4
from titanlite.attention.flex import Flex, WindowedFlex
from titanlite.attention.head_tail import HeadTail, HeadTailAttention
from titanlite.attention.kv_cache import KVCache
from titanlite.attention.recording import RecordingAttention
from titanlite.attention.sdpa import SDPA, GatheredAttention
from titanlite.attention.varlen import Varlen
from titanlite.config.component import ConfigError

B, T, H, K, E = 3, 12, 4, 2, 8
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(12)], [0, *range(10), 0]])
KINDS = {
    "sinks": AttentionKind(has_sinks=True),
    "cap": AttentionKind(soft_cap=1.5),
    "window, sinks and cap": AttentionKind(3, True, 1.5),
    "window beyond the sequence, sinks": AttentionKind(99, True),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def tensors(kind: AttentionKind, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys, values and, if the kind has them, sinks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.randn(B, T, heads, E, generator=generator).to(dtype) for heads in (H, K, K))
    sinks = torch.randn(H, generator=generator).to(dtype)
    return [x.requires_grad_() for x in (q, k, v, *([sinks] if kind.has_sinks else []))]


def written_out(kind: AttentionKind, inputs: list[torch.Tensor], documents: bool = False) -> torch.Tensor:
    """exp(score) v, summed over the visible keys, by the sum of exp(score) over them and exp(sink)."""
    q, k, v, *sinks = inputs
    k, v = (x.repeat_interleave(H // K, 2) for x in (k, v))
    scores = torch.einsum("bqhe,bshe->bhqs", q, k) / math.sqrt(E)
    if kind.soft_cap:
        scores = kind.soft_cap * (scores / kind.soft_cap).tanh()
    distance = torch.arange(T)[:, None] - torch.arange(T)
    visible = ((distance >= 0) & (distance < (kind.window or T)))[None]
    if documents:
        numbers = (POSITIONS == 0).cumsum(1)
        visible = visible & (numbers[:, :, None] == numbers[:, None])
    weights = scores.exp() * visible[:, None]
    total = weights.sum(-1, keepdim=True)
    if sinks:
        total = total + sinks[0].exp()[:, None, None]
    return torch.einsum("bhqs,bshe->bqhe", weights / total, v)


def assert_equal(kind: AttentionKind, attention: Attention, documents: bool, dtype: torch.dtype) -> None:
    """Outputs and gradients, also of the sinks."""
    inputs = tensors(kind, dtype)
    out, wanted = attention.attend(*inputs), written_out(kind, inputs, documents)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, theirs = (torch.autograd.grad(x, inputs, grad) for x in (out, wanted))
    for actual, expected in zip((out, *ours), (wanted, *theirs)):
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@DTYPES
@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize("name", KINDS)
def test_sdpa(name: str, documents: bool, dtype: torch.dtype) -> None:
    attention = SDPA().for_documents(POSITIONS, 5) if documents else SDPA().for_sequences(POSITIONS)
    assert_equal(KINDS[name], attention.of_kind(KINDS[name], POSITIONS), documents, dtype)


def flex_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any, enable_gqa: bool, **options: Any
) -> Any:
    """torch's flex_attention, which has no backward on a CPU."""
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (B, H, T, T)), indexing="ij")
    scores = options.get("score_mod", lambda score, *_: score)(q @ k.mT / math.sqrt(E), b, h, i, j)
    scores = scores.masked_fill(~block_mask.mask_mod(b, h, i, j), -math.inf)
    out = scores.softmax(-1) @ v
    return (out, AuxOutput(lse=scores.logsumexp(-1))) if "return_aux" in options else out


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_flex_attention", flex_attention)
    monkeypatch.setattr(flex, "_create_block_mask", create_block_mask)
    monkeypatch.setattr(flex, "_with_lse", AuxRequest(lse=True))


def of_flex(name: str, documents: bool) -> Attention:
    attention = Flex().for_documents(POSITIONS, 5) if documents else Flex().for_sequences(POSITIONS)
    return attention.of_kind(KINDS[name], POSITIONS)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [full(False), True], ids=["sequences", "documents"])
@pytest.mark.parametrize("name", KINDS)
def test_flex(flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch, name: str, documents: bool) -> None:
    """The function by hand equals torch's, and with it gradients are right, too. The kernel itself runs in
    tests/gpu/test_sinks_and_caps.py."""
    attention = of_flex(name, documents)
    with torch.no_grad():
        by_torch = attention.attend(*(x.detach() for x in tensors(KINDS[name])))
    monkeypatch.setattr(flex, "_flex_attention", flex_by_hand)
    assert torch.allclose(attention.attend(*tensors(KINDS[name])), by_torch, atol=1e-5)
    assert_equal(KINDS[name], attention, documents, torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.full
def test_flex_in_a_compiled_function(flex_on_cpu: None, name: str) -> None:
    """One graph, which serves the next micro-batch."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def attend(attention: Attention, *inputs: torch.Tensor) -> torch.Tensor:
        return attention.attend(*inputs)

    inputs = [x.detach() for x in tensors(KINDS[name])]
    for _ in range(3):
        attention = of_flex(name, documents=True)
        wanted = written_out(KINDS[name], inputs, documents=True)
        assert torch.allclose(attend(attention, *inputs), wanted, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", KINDS)
def test_control_each_of_them_counts(name: str) -> None:
    kind = KINDS[name]
    inputs = tensors(kind)
    wanted = SDPA().for_sequences(POSITIONS).of_kind(kind, POSITIONS).attend(*inputs)
    if kind.has_sinks:
        without = SDPA().for_sequences(POSITIONS).of_kind(kind, POSITIONS).attend(*inputs[:3])
        assert (without - wanted).abs().max() > 0.1
        raised = SDPA().for_sequences(POSITIONS).of_kind(kind, POSITIONS).attend(*inputs[:3], inputs[3] + 0.1)
        assert (raised - wanted).abs().max() > 1e-2
    if kind.soft_cap:
        uncapped = SDPA().for_sequences(POSITIONS).of_kind(kind._replace(soft_cap=0.0), POSITIONS)
        assert (uncapped.attend(*inputs) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("name", KINDS)
def test_a_cache_keeps_them(name: str) -> None:
    inputs = tensors(KINDS[name])
    (q, k, v), sinks = inputs[:3], inputs[3:]
    cache, out = KVCache(T), []
    with torch.no_grad():
        for new in (slice(0, 5), slice(5, 6), slice(6, T)):
            cache.advance(len(range(T)[new]), q.device)
            of_kind = cache.of_kind(KINDS[name], q[:, new, 0, 0])
            out.append(of_kind.attend(q[:, new], k[:, new], v[:, new], *sinks))
    assert torch.allclose(torch.cat(out, 1), written_out(KINDS[name], inputs), atol=1e-5)


class SecondHalf:
    """A SequenceSharding of two ranks, whose rank has the second half of each sequence and all keys. Windows
    within a chunk are in tests/distributed/test_context_windows.py."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.window != 3])
def test_context_parallel(name: str, documents: bool) -> None:
    kind, positions = KINDS[name], torch.arange(T)
    numbers = (POSITIONS == 0).cumsum(1) if documents else None
    attention = SDPA().masked(positions[T // 2 :], positions, numbers)
    gathered = GatheredAttention(attention, SecondHalf(), SDPA(), numbers)  # type: ignore[arg-type]
    q, *rest = inputs = tensors(kind)
    out = gathered.of_kind(kind, POSITIONS[:, T // 2 :]).attend(q[:, T // 2 :], *rest)
    assert torch.allclose(out, written_out(kind, inputs, documents)[:, T // 2 :], atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_recording(name: str) -> None:
    """The largest capped logit, and the entropy of the probabilities of keys and sink."""
    kind, queries, records = KINDS[name], torch.arange(T), list[Any]()
    recorder = RecordingAttention(
        SDPA().for_sequences(POSITIONS), queries, lambda *args: records.append(args)
    )
    inputs = tensors(kind)
    out = recorder.of_kind(kind, POSITIONS).attend(*inputs)
    assert torch.allclose(out, written_out(kind, inputs), atol=1e-5)
    (largest, entropy, num_queries) = records[0]
    assert num_queries == B * T
    q, k, _, *sinks = inputs
    scores = torch.einsum("bqhe,bshe->bhqs", q, k.repeat_interleave(H // K, 2)) / math.sqrt(E)
    scores = kind.soft_cap * (scores / kind.soft_cap).tanh() if kind.soft_cap else scores
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = scores.masked_fill(~((distance >= 0) & (distance < (kind.window or T))), -math.inf)
    assert torch.allclose(largest, scores.amax((0, 2, 3)))
    if sinks:
        scores = torch.cat((scores, sinks[0][:, None, None].expand(B, -1, T, 1)), -1)
    expected = torch.special.entr(scores.softmax(-1)).sum((0, 2, 3))
    assert torch.allclose(entropy, expected, rtol=1e-4)


# ---- backends

NEEDS = AttentionNeeds(
    device=torch.device("cpu"), dtype=torch.bfloat16, seq_len=64, n_heads=4, n_kv_heads=2, head_dim=16
)
SINKS, CAP = (AttentionKind(16, has_sinks=True), AttentionKind()), (AttentionKind(soft_cap=50.0),)


@pytest.mark.parametrize("kinds", [SINKS, CAP], ids=["sinks", "cap"])
@pytest.mark.parametrize("options", [{}, {"masks_documents": True}, {"context_parallel": True}], ids=str)
@pytest.mark.parametrize(("device", "chosen"), [("cpu", "sdpa"), ("cuda", "flex")])
def test_the_kernel_that_auto_chooses(
    device: str, chosen: str, options: dict[str, bool], kinds: tuple[AttentionKind, ...]
) -> None:
    needs = replace(NEEDS, device=torch.device(device), kinds=kinds, **options)
    if chosen == "flex" or "context_parallel" in options:  # layers without sinks have another kernel
        needs = replace(needs, kinds=kinds[:1])
    built = Auto().build(needs)
    assert built.name == chosen
    assert isinstance(built, WindowedFlex) == (chosen == "flex")
    assert built.kernel(replace(needs, kinds=kinds[:1])) == {"sdpa": "softmax on cpu"}.get(chosen, chosen)


def test_the_log_names_the_kernel_of_each_kind() -> None:
    kinds = [AttentionKind(16, True), AttentionKind(0, True), AttentionKind(), AttentionKind(0, False, 50.0)]
    assert kernels(SDPA(), NEEDS, kinds) == (
        "softmax on cpu (window 16, sinks, 1 layer), softmax on cpu (full, sinks, 1 layer), "
        "sdpa on cpu (full, 1 layer), softmax on cpu (full, cap 50, 1 layer)"
    )


class Outside(SlidingWindow):
    name = "outside"


@pytest.mark.parametrize(
    ("kinds", "feature"),
    [(SINKS[:1], "attention sinks"), (CAP, "a soft cap of attention scores")],
    ids=["sinks", "cap"],
)
@pytest.mark.parametrize(
    "backend", [Varlen, HeadTail, FlashAttention4, Outside], ids=lambda backend: backend.name
)
def test_a_backend_without_them_is_refused(
    backend: type[AttentionBackend], kinds: tuple[AttentionKind, ...], feature: str
) -> None:
    kinds = tuple(kind._replace(window=0) for kind in kinds)
    with pytest.raises(ConfigError) as e:
        backend().build(replace(NEEDS, kinds=kinds))
    assert str(e.value).startswith(
        f"{backend.name!r} does not support {feature}, which the model has; working backends: "
    )
    working = str(e.value).rpartition(": ")[2].split(", ")
    assert "sdpa" in working
    assert not {"auto", "flex", "varlen", "head_tail", "flash_attention_4"} & set(working)
    assert e.value.key == "attention.backend"


def test_flex_is_refused_on_a_cpu() -> None:
    message = (
        "'flex' does not work on cpu with bfloat16, head_dim 16 and attention sinks; working backends: sdpa"
    )
    with pytest.raises(ConfigError) as e:
        Flex().build(replace(NEEDS, kinds=(AttentionKind(0, True),)))
    assert str(e.value) == message


@pytest.mark.parametrize("kind", [AttentionKind(0, True), AttentionKind(0, False, 2.0)], ids=str)
def test_attention_without_them_says_so(kind: AttentionKind) -> None:
    """Also when no backend was asked, as in code from outside the package."""
    for attention in (
        Attention(),
        Varlen().for_sequences(POSITIONS),
        HeadTailAttention(SecondHalf()),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="does not support a"):
            attention.of_kind(kind, POSITIONS)
