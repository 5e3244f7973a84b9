"""Values of another head dim than queries and keys, as in multi-head latent attention: each kernel takes them
or is refused before the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.examples.sliding_window import SlidingWindow
from titanlite.attention import varlen
from titanlite.attention.base import AttentionNeeds
from titanlite.attention.head_tail import HeadTailAttention
from titanlite.attention.kv_cache import KVCache
from titanlite.attention.sdpa import CAUSAL, SDPAttention, example_inputs
from titanlite.config.component import ConfigError

B, T, H, E, V = 2, 16, 4, 24, 16
NEEDS = AttentionNeeds(
    device=torch.device("cpu"), dtype=torch.float32, seq_len=T, n_heads=H, n_kv_heads=H, head_dim=E,
    v_head_dim=V,
)  # fmt: skip


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, H, dim, generator=generator) for dim in (E, E, V)]


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / E**0.5
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhv->bqhv", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class OneRank:
    """A SequenceSharding over one rank."""

    size, rank, own_chunks = 1, 0, (0, 1)

    def gather_in_order(self, x: torch.Tensor) -> torch.Tensor:
        return x


def varlen_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    """Takes equal head dims only, as torch's kernel does."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    sequences = (x.unflatten(0, (B, T)) for x in (q, k, v))
    return CAUSAL.attend(*sequences).flatten(0, 1)


@pytest.mark.parametrize("kernel", ["sdpa", "sdpa with a mask", "varlen", "head_tail"])
def test_every_kernel_takes_them(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_varlen_attention", varlen_kernel)
    attention = {
        "sdpa": CAUSAL,
        "sdpa with a mask": SDPAttention(torch.ones(T, T, dtype=torch.bool).tril()[None, None]),
        "varlen": varlen.VarlenAttention(torch.arange(0, B * T + 1, T, dtype=torch.int32), T),
        "head_tail": HeadTailAttention(OneRank()),  # type: ignore[arg-type]
    }[kernel]
    inputs = [x.requires_grad_() for x in tensors()]
    out, wanted = attention.attend(*inputs), by_hand(*inputs)
    assert out.shape == (B, T, H, V)
    assert torch.allclose(out, wanted, atol=1e-5)
    grad = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, inputs, grad)
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_cache_keeps_them() -> None:
    q, k, v = tensors()
    cache, out = KVCache(T), []
    for new in (slice(0, 5), slice(5, 6), slice(6, T)):
        cache.advance(len(range(T)[new]), q.device)
        out.append(cache.attend(q[:, new], k[:, new], v[:, new]))
    assert torch.allclose(torch.cat(out, 1), by_hand(q, k, v), atol=1e-5)


def test_torch_is_asked_for_a_kernel_with_their_head_dim() -> None:
    assert [x.shape[-1] for x in example_inputs(NEEDS, T)] == [E, E, V]
    assert [x.shape[-1] for x in example_inputs(replace(NEEDS, v_head_dim=0), T)] == [E, E, E]


def test_a_backend_from_outside_has_to_say_that_it_takes_them() -> None:
    class Outside(SlidingWindow):
        name = "outside"

    message = "'outside' does not support values of head dim 16 with queries and keys of head dim 24"
    with pytest.raises(ConfigError) as e:
        Outside().build(NEEDS)
    assert (str(e.value), e.value.key) == (message, "attention.backend")
    assert Outside().build(replace(NEEDS, v_head_dim=E)).name == "outside"
    Outside.supports_v_head_dim = True
    assert Outside().build(NEEDS).name == "outside"
