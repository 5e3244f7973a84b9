"""Sampling: a cache changes no logit; draws keep to temperature, top_k and top_p as transformers' do, and to
the seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.parallel_residual import ParallelResidual
from tests.support.tiers import full
from titanlite.attention.kv_cache import KVCache
from titanlite.config.component import ConfigError
from titanlite.generate import (
    CachedLogits,
    Generation,
    before_any,
    choose,
    generate,
    next_tokens,
    uncached_logits,
)
from titanlite.models.base import Decoder
from titanlite.models.gemma3 import Gemma3
from titanlite.models.gpt import Gpt
from titanlite.models.llama3 import Llama3
from titanlite.models.mistral import Mistral
from titanlite.models.olmo3 import Olmo3
from titanlite.models.qwen2 import Qwen2
from titanlite.models.qwen3 import Qwen3
from titanlite.tokenizers.bytes import Bytes

CPU = torch.device("cpu")
SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 64}
SCALED = {"rope_factor": 8.0, "rope_original_max_position": 16, "rope_theta": 1e4}
FAMILIES = {
    "llama3": Llama3(flavor="debug", overrides={**SHAPE, **SCALED, "vocab_size": 258}),
    "qwen3": Qwen3(flavor="debug", overrides={**SHAPE, "vocab_size": 258, "tie_word_embeddings": False}),
    "qwen2": Qwen2(flavor="debug", overrides={**SHAPE, "vocab_size": 258}),
    "mistral": Mistral(flavor="debug", overrides={**SHAPE, "vocab_size": 258, "sliding_window": 5}),
    "gemma3": Gemma3(flavor="debug", overrides={**SHAPE, "vocab_size": 258, "sliding_window": 5}),
    "olmo3": Olmo3(flavor="debug", overrides={**SHAPE, "vocab_size": 258, "sliding_window": 5}),
    "gpt": Gpt(flavor="debug", overrides={**SHAPE, "vocab_size": 258, "sliding_window": 5}),
    "one of its own": ParallelResidual(flavor="tiny"),
}
PROMPT = [5, 9, 200, 7, 7, 31, 2]


def random_net(family: str, seed: int = 0) -> Decoder:
    net = FAMILIES[family].build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 + (p.ndim == 1))
    return net.requires_grad_(False)


@pytest.fixture(params=FAMILIES)
def net(request: pytest.FixtureRequest) -> Decoder:
    return random_net(request.param)


def both(net: Decoder, prompt: list[int], steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits with a cache and without, as the sequence grows by the likeliest tokens."""
    ids = list(prompt)
    cached = CachedLogits(net, len(ids) + steps, CPU)
    whole = uncached_logits(net, len(ids) + steps, 0, CPU)
    pairs = []
    for _ in range(steps):
        pairs.append((cached(ids), whole(ids)))
        ids.append(int(pairs[-1][1].argmax()))
    return pairs


def same(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["several", "one"])
def test_a_cache_changes_no_logit(net: Decoder, prompt: list[int]) -> None:
    pairs = both(net, prompt, 12)
    assert all(logits.isfinite().all() for pair in pairs for logits in pair)
    assert same(pairs)


@pytest.mark.parametrize(
    "fault", ["positions start anew", "the newest token is hidden", "keys are forgotten"]
)
def test_control_a_wrong_cache_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    advance, append = KVCache.advance, KVCache.append

    def wrong_advance(cache: KVCache, new: int, device: torch.device) -> torch.Tensor:
        positions = advance(cache, new, device)
        if fault == "the newest token is hidden" and cache._mask is not None:
            cache._mask[..., -1] = False
        return positions - positions[0] if fault == "positions start anew" else positions

    def wrong_append(cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = append(cache, k, v)
        keys[:, : cache.filled - k.shape[1]] *= fault != "keys are forgotten"
        return keys, values

    monkeypatch.setattr(KVCache, "advance", wrong_advance)
    monkeypatch.setattr(KVCache, "append", wrong_append)
    assert not same(both(random_net("qwen3"), PROMPT, 4))


def test_control_a_cache_without_the_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "of_kind", lambda cache, kind, tokens: cache)
    assert not same(both(random_net("mistral"), PROMPT[:1], 12))


def test_a_text_is_drawn_with_its_seed() -> None:
    net, config = random_net("llama3"), Generation(temperature=1.0, max_new_tokens=10)

    def made(seed: int) -> list[int]:
        return list(next_tokens(CachedLogits(net, len(PROMPT) + 10, CPU), PROMPT, config, 258, seed))

    assert made(7) == made(7) != made(8)


def test_samples_while_training_are_the_same_with_a_cache() -> None:
    net, tokenizer = random_net("llama3"), Bytes().build()
    config = Generation(temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=12)
    text = generate(net, tokenizer, "ab", config, 3, CPU)
    prompt = [tokenizer.bos, *b"ab"]
    made = list(next_tokens(CachedLogits(net, 15, CPU), prompt, config, tokenizer.vocab_size, 3))
    ids = before_any(made, {tokenizer.eos})
    assert text == "ab" + tokenizer.decode(ids)


def drawn(logits: torch.Tensor, draws: int = 3000, **options: Any) -> torch.Tensor:
    """How often each token is chosen."""
    generator = torch.Generator().manual_seed(0)
    config = Generation(**options)
    tokens = torch.tensor([choose(logits, config, generator) for _ in range(draws)])
    return torch.bincount(tokens, minlength=len(logits)) / draws


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5}, {"temperature": 0.9, "top_k": 6, "top_p": 0.8},
        full({"temperature": 1.0}), full({"temperature": 1.0, "top_k": 3}),
        full({"temperature": 1.5, "top_p": 0.7}), full({"temperature": 1.0, "top_p": 1e-6}),
        full({"temperature": 1.0, "top_k": 1}), full({"temperature": 1.0, "top_k": 99}),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_drawn_as_transformers_draws(options: dict[str, Any]) -> None:
    process = pytest.importorskip("transformers").generation.logits_process
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2
    warpers = [process.TemperatureLogitsWarper(options["temperature"])]
    if "top_k" in options:
        warpers.append(process.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(process.TopPLogitsWarper(options["top_p"]))
    wanted = process.LogitsProcessorList(warpers)(None, logits[None].clone())[0].softmax(-1)
    actual = drawn(logits, **options)
    assert torch.equal(actual[wanted == 0], torch.zeros(int((wanted == 0).sum())))
    assert (actual - wanted).abs().max() < 0.04


def test_temperature_0_takes_the_likeliest() -> None:
    logits = torch.tensor([0.0, 2.0, 1.9])
    assert drawn(logits, draws=20, temperature=0, top_k=2, top_p=0.5)[1] == 1


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"top_p": 0.0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"), ({"temperature": -0.1}, "temperature"), ({"freq": -1}, "freq"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"), ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as e:
        Generation(**options)
    assert e.value.key == key
