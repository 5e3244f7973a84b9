"""Layers of several kinds in one model: patterns, pipeline stages, rotary bases, and the tokens they see."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from titanlite.attention.base import AttentionKind, AttentionNeeds, kernels
from titanlite.attention.sdpa import CAUSAL, SDPA
from titanlite.config.component import ConfigError
from titanlite.interop.weights import contradictions
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.qwen3 import Qwen3

SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 48}
SHAPE |= {"vocab_size": 64, "tie_word_embeddings": False}
MIXED = {"sliding_window": 4, "layer_pattern": "LSS", "window_rope_theta": 50.0}
TOKENS = torch.arange(40).view(2, 20)


def model(**overrides: Any) -> Decoder:
    net = Qwen3(flavor="debug", overrides={**SHAPE, **overrides}).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (p.ndim == 1))
    return net


@pytest.mark.parametrize(
    ("overrides", "letters"),
    [
        ({}, "LLL"),
        ({"sliding_window": 4}, "SSS"),
        (MIXED, "LSS"),
        ({"sliding_window": 4, "layer_pattern": "SL"}, "SLS"),
        ({"sliding_window": 4, "layer_pattern": "SLLLL"}, "SLL"),
    ],
)
def test_a_pattern_is_repeated_over_the_layers(overrides: dict[str, Any], letters: str) -> None:
    config = Qwen3(flavor="debug", overrides={**SHAPE, **overrides}).config
    assert config.layer_letters == letters
    window = overrides.get("sliding_window", 0)
    assert config.attention_kinds == [AttentionKind(window if letter == "S" else 0) for letter in letters]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layer_pattern": "SL"}, "layer_pattern = 'SL' needs a sliding_window above 0"),
        ({"layer_pattern": "LX", "sliding_window": 4}, r"layer_pattern = 'LX': 'X' is neither L \(all"),
        ({"layer_pattern": "L", "sliding_window": 4}, "layer_pattern = 'L': none of the 3 layers is S"),
        ({"window_rope_theta": -1.0}, "window_rope_theta = -1.0 is below 0"),
    ],
)
def test_wrong_patterns_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3(flavor="debug", overrides={**SHAPE, **overrides})


def test_patterns_with_the_same_layers_are_one_architecture() -> None:
    def fields(**overrides: Any) -> dict[str, Any]:
        return Qwen3(flavor="debug", overrides={**SHAPE, **overrides}).config.architecture_fields()

    assert fields(sliding_window=4, layer_pattern="SL") == fields(sliding_window=4, layer_pattern="SLS")
    assert fields(sliding_window=4, layer_pattern="SLL") == fields(sliding_window=4, layer_pattern="SLLSL")
    assert fields(sliding_window=4, layer_pattern="S") == fields(sliding_window=4)
    assert fields(sliding_window=4, layer_pattern="SL") != fields(sliding_window=4, layer_pattern="LS")
    assert contradictions(fields(**MIXED), fields(**{**MIXED, "window_rope_theta": 60.0}))
    pattern = {"sliding_window": 4, "layer_pattern": "SL"}
    for other in ({"sliding_window": 4}, {}, {"sliding_window": 4, "layer_pattern": "LS"}):
        assert contradictions(fields(**pattern), fields(**other)), other
        assert contradictions(fields(**other), fields(**pattern)), other
    assert not contradictions(fields(), fields(window_rope_scaled=False))


@torch.no_grad()
def test_layers_without_rotary_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are layers of another model whose rotary positions are all 0."""
    net, kinds = model(layer_pattern="NL"), list[Any]()
    for block in net.blocks().values():
        block.register_forward_hook(lambda block, args, out: kinds.append(args[1]))
    out = net(TOKENS)
    assert [bool((cos == 1).all()) for cos in kinds] == [True, False, True]
    alone = model(layer_pattern="N", n_layers=1)
    assert torch.equal(alone(TOKENS), model(n_layers=1)(TOKENS, torch.zeros(20, dtype=torch.int64)))
    assert (out - model()(TOKENS)).abs().max() > 0.1  # control
    with pytest.raises(ConfigError, match="all layers have rotary positions"):
        Qwen3(flavor="debug", overrides={**SHAPE, "layer_pattern": "NL"}).hf_config()


def test_rotary_positions_by_kind_have_no_place_in_a_config_json() -> None:
    for overrides in (MIXED, {"sliding_window": 4, "rope_factor": 2.0, "window_rope_scaled": False}):
        with pytest.raises(ConfigError, match="all layers have the same rotary embedding"):
            Qwen3(flavor="debug", overrides={**SHAPE, **overrides}).hf_config()


@torch.no_grad()
def test_pipeline_stages_have_the_kinds_of_their_layers() -> None:
    net = model(**MIXED)
    first = net.pipeline_stage(["0"], first=True, last=False)
    last = net.pipeline_stage(["1", "2"], first=False, last=True)
    assert torch.equal(last(first(TOKENS)), net(TOKENS))


@torch.no_grad()
def test_each_kind_has_its_rotary_base() -> None:
    """A model whose kinds all have one base differs from one in which the layers with a window have another,
    from their first query on that sees two keys."""
    whole, other = model(**MIXED)(TOKENS), model(**{**MIXED, "window_rope_theta": 0.0})(TOKENS)
    assert torch.equal(whole[:, 0], other[:, 0])
    assert not torch.isclose(whole[:, 1:], other[:, 1:]).all(-1).any()
    base = Qwen3(flavor="debug").config.rope_theta
    assert torch.equal(other, model(**{**MIXED, "window_rope_theta": base})(TOKENS))


@torch.no_grad()
def test_tokens_outside_of_all_windows_change_nothing() -> None:
    """Three layers with windows of 4 see the newest 10 tokens; with one full layer they see all."""
    changed = TOKENS.clone()
    changed[:, 0] += 1
    for overrides, first_equal in (({"sliding_window": 4}, 10), (MIXED, 20)):
        net = model(**overrides)
        equal = (net(TOKENS) == net(changed)).all(-1).all(0)
        assert equal.tolist() == [i >= first_equal for i in range(20)]


def test_attention_is_made_once_per_forward_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[AttentionKind]()
    of_kind = type(CAUSAL).of_kind

    def noted(self: Any, kind: AttentionKind, tokens: torch.Tensor) -> Any:
        made.append(kind)
        return of_kind(self, kind, tokens)

    monkeypatch.setattr(type(CAUSAL), "of_kind", noted)
    model(**MIXED)(TOKENS)
    assert made == [AttentionKind(), AttentionKind(4)]
    made.clear()
    model()(TOKENS)
    assert made == []


def test_flops_count_the_keys_of_each_layer() -> None:
    per_key = 6 * 4 * 2 * 8
    full, windows, mixed = (
        model(**overrides).flops_per_token(100) for overrides in ({}, {"sliding_window": 4}, MIXED)
    )
    assert full - windows == per_key * 3 * 96
    assert full - mixed == per_key * 2 * 96


def test_the_log_names_the_kernel_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = AttentionNeeds(
        device=torch.device("cpu"), dtype=torch.float32, seq_len=20, n_heads=4, n_kv_heads=2, head_dim=8,
        kinds=(AttentionKind(), AttentionKind(4)),
    )  # fmt: skip
    monkeypatch.setattr(SDPA, "kernel", lambda self, needs: "flex" if needs.window else "flash")
    kinds = [AttentionKind(), AttentionKind(4), AttentionKind(4)]
    assert kernels(SDPA(), needs, kinds) == "flash (full, 1 layer), flex (window 4, 2 layers)"
    assert kernels(SDPA(), needs, kinds[1:]) == "flex (window 4, 2 layers)"
    assert kernels(SDPA(), needs, kinds[:1]) == "flash"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "gpt_oss", "olmo3"])
def test_a_file_that_claims_a_billion_layers_costs_nothing(family: str) -> None:
    choice: Any = ModelFamily.choices[family]
    config = choice(flavor="debug").hf_config() | {"num_hidden_layers": 10**9}
    config.pop("layer_types", None)
    began = time.process_time()
    fields = choice.from_hf_config(config).config.architecture_fields()
    assert time.process_time() - began < 1
    assert fields["n_layers"] == 10**9
