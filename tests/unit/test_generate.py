"""Sampling: a cache changes no logit, whatever rows are side by side; draws keep to temperature, top_k and
top_p as transformers' do, and to a row's own seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.parallel_residual import ParallelResidual
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
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3 import Qwen3
from titanlite.tokenizers.bytes import Bytes

CPU = torch.device("cpu")
SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 64}
SCALED = {"rope_factor": 8.0, "rope_original_max_position": 16, "rope_theta": 1e4}
FAMILIES = {
    "llama3": Llama3(flavor="debug", overrides={**SHAPE, **SCALED, "vocab_size": 258}),
    "qwen3": Qwen3(flavor="debug", overrides={**SHAPE, "vocab_size": 258, "tie_word_embeddings": False}),
    "one of its own": ParallelResidual(flavor="tiny"),
}
PROMPTS = [[5, 9, 200, 7, 7, 31, 2], [250], [4, 4, 90, 100]]


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


def both(net: Decoder, prompts: list[list[int]], steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits with a cache and without, as the rows grow by the likeliest tokens."""
    rows = [list(prompt) for prompt in prompts]
    cached = CachedLogits(net, steps, CPU)
    whole = uncached_logits(net, max(map(len, rows)) + steps, 0, CPU)
    found = []
    for _ in range(steps):
        found.append((cached(rows), whole(rows)))
        for row, logits in zip(rows, found[-1][1]):
            row.append(int(logits.argmax()))
    return found


def same(found: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in found)


@pytest.mark.parametrize(
    "prompts", [PROMPTS, PROMPTS[:1], [[1, 2, 3], [4, 5, 6]]], ids=["padded", "one", "even"]
)
def test_a_cache_changes_no_logit(net: Decoder, prompts: list[list[int]]) -> None:
    found = both(net, prompts, 12)
    assert all(logits.isfinite().all() for pair in found for logits in pair)
    assert same(found)


@pytest.mark.parametrize("what", ["padding is seen", "positions count padding", "keys are forgotten"])
def test_control_a_wrong_cache_is_noticed(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    advance, append = KVCache.advance, KVCache.append

    def wrong_advance(cache: KVCache, new: int) -> torch.Tensor:
        positions = advance(cache, new)
        if what == "padding is seen":
            cache._mask = torch.ones_like(cache._mask).tril(cache.filled - new)
        return positions + cache.padding[:, None] if what == "positions count padding" else positions

    def wrong_append(cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = append(cache, k, v)
        keys[:, : cache.filled - k.shape[1]] *= what != "keys are forgotten"
        return keys, values

    monkeypatch.setattr(KVCache, "advance", wrong_advance)
    monkeypatch.setattr(KVCache, "append", wrong_append)
    net = random_net("qwen3")
    # Rotary positions are relative: what only shifts a row as a whole changes nothing.
    assert same(both(net, PROMPTS, 4)) == (what == "positions count padding")


def test_the_likeliest_tokens_are_the_same_alone_and_side_by_side(net: Decoder) -> None:
    config = Generation(temperature=0, max_new_tokens=10)

    def made(prompts: list[list[int]]) -> list[list[int]]:
        return [list(ids) for ids in zip(*next_tokens(CachedLogits(net, 10, CPU), prompts, config, 258, 0))]

    together = made(PROMPTS)
    assert together == [made([prompt])[0] for prompt in PROMPTS]
    assert len({tuple(ids) for ids in together}) == len(PROMPTS)


def test_a_row_is_drawn_with_its_own_seed() -> None:
    net, config = random_net("llama3"), Generation(temperature=1.0, max_new_tokens=10)

    def made(prompts: list[list[int]], seed: int) -> list[list[int]]:
        return [
            list(ids) for ids in zip(*next_tokens(CachedLogits(net, 10, CPU), prompts, config, 258, seed))
        ]

    together = made([PROMPTS[0]] * 3, seed=7)
    assert together == [made([PROMPTS[0]], seed=7 + i)[0] for i in range(3)]
    assert together[0] != together[1] != together[2]


def test_samples_while_training_are_the_same_with_a_cache() -> None:
    net, tokenizer = random_net("llama3"), Bytes().build()
    config = Generation(temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=12)
    text = generate(net, tokenizer, "ab", config, 3, CPU)
    steps = next_tokens(
        CachedLogits(net, 12, CPU), [[tokenizer.bos, *b"ab"]], config, tokenizer.vocab_size, 3
    )
    ids = before_any([step[0] for step in steps], {tokenizer.eos})
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
        {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.7}, {"temperature": 0.9, "top_k": 6, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 99},
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
    found = drawn(logits, **options)
    assert torch.equal(found[wanted == 0], torch.zeros(int((wanted == 0).sum())))
    assert (found - wanted).abs().max() < 0.04


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
