"""The width rules: shapes that keep their ratios, learning rates and weight decay by update rule, and lines
of TOML that say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tests.support.parallel_residual  # noqa: F401  (registers its family)
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.lab.width import check_supported, param_groups_at, scales_at, shape_at, toml_lines
from titanlite.models.base import ModelFamily
from titanlite.models.deepseek_v3 import DeepSeekV3
from titanlite.models.gemma3 import Gemma3
from titanlite.models.llama3 import Llama3
from titanlite.models.olmoe import Olmoe
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import Optimizer, ParamGroup
from titanlite.optim.muon import Muon

DEBUG = Llama3(flavor="debug", overrides={"n_layers": 2, "vocab_size": 256})


def groups_at(optimizer: Optimizer, multiple: float = 4.0) -> list[ParamGroup]:
    return param_groups_at(optimizer, DEBUG.build_on_meta(), multiple)


def test_shapes_keep_their_ratios() -> None:
    config = Llama3(flavor="125M").config
    assert shape_at(config, config.dim) == {
        key: getattr(config, key) for key in ("dim", "n_heads", "n_kv_heads", "hidden_dim")
    }
    wide = shape_at(config, 2 * config.dim)
    assert wide == {"dim": 1536, "n_heads": 24, "n_kv_heads": 8, "hidden_dim": 4096}
    assert shape_at(config, 256)["n_kv_heads"] == 1, "four heads, a third of them: the largest divisor"
    apart = shape_at(Qwen3(flavor="0.6B").config, 512)
    assert apart["n_heads"] == 8, "with heads of 128, query features are twice dim"
    with pytest.raises(ConfigError, match=r"width 100 has 100 query features, no multiple of head_dim 64"):
        shape_at(config, 100)


def test_shapes_of_experts_keep_their_ratios() -> None:
    config = Olmoe(flavor="1B-7B").config
    wanted = {"dim": 512, "n_heads": 4, "n_kv_heads": 4, "moe_hidden_dim": 256}
    assert shape_at(config, 512) == wanted, "no block has hidden_dim; the experts are as many"
    assert shape_at(Qwen3MoE(flavor="30B-A3B").config, 384)["moe_hidden_dim"] == 144
    assert shape_at(Qwen3MoE(flavor="debug").config, 160)["moe_hidden_dim"] == 240
    uneven = replace(Qwen3MoE(flavor="debug").config, moe_hidden_dim=72)
    assert shape_at(uneven, 160)["moe_hidden_dim"] == 88, "90 is no multiple of 8"


def test_widths_of_latent_attention_and_of_scaled_embeddings_are_refused() -> None:
    config = DeepSeekV3(flavor="debug").config
    with pytest.raises(ConfigError, match="there are no rules for other widths of latent attention"):
        shape_at(config, 2 * config.dim)
    config = Gemma3(flavor="debug").config
    with pytest.raises(ConfigError, match=r"no rules for other widths of a model whose embedding is mult"):
        shape_at(config, 2 * config.dim)


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-3), Muon(lr=1e-3, adjust_lr_fn="spectral")], ids=str)
def test_a_router_is_scaled_as_an_output_and_experts_as_matrices(optimizer: Optimizer) -> None:
    model = Qwen3MoE(flavor="debug", overrides={"n_layers": 1, "vocab_size": 256})
    scales = scales_at(model.config, 4.0)
    assert scales == {"logit_scale": 0.25, "matrix_init_std": 0.01, "router_init_std": 0.005}
    net = replace(model, overrides=model.overrides | scales).build_on_meta()
    prefix = "model.layers.0.mlp."
    assert net.init_normal(f"{prefix}gate.weight") == (0.0, 0.005)
    assert net.init_normal(f"{prefix}experts.gate_up_proj") == (0.0, 0.01)
    wide = replace(optimizer, param_groups=param_groups_at(optimizer, net, 4.0))
    rates = {name: group.peak_lr for group, names in wide.grouped(net).items() for name in names}
    assert rates[f"{prefix}gate.weight"] == pytest.approx(1e-3 / 4)
    experts = 1e-3 / 4 if isinstance(optimizer, AdamW) else 1e-3
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight"):
        assert rates[f"model.layers.0.{name}"] == pytest.approx(experts), name
    assert rates["model.norm.weight"] == rates["model.embed_tokens.weight"] == 1e-3


def test_scales() -> None:
    assert scales_at(DEBUG.config, 4.0) == {"logit_scale": 0.25, "matrix_init_std": 0.01}
    tuned = replace(DEBUG, overrides={"logit_scale": 2.0})
    assert scales_at(tuned.config, 4.0)["logit_scale"] == 0.5


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (AdamW(lr=1e-3), 4.0),
        (Muon(lr=1e-3), 2.0),
        (Muon(lr=1e-3, adjust_lr_fn="spectral"), 1.0),
        (Muon(lr=1e-3, adjust_lr_fn="original"), 1.0),
    ],
    ids=["adamw", "match_rms_adamw", "spectral", "original"],
)
def test_rates_of_the_matrices_follow_the_update_rule(optimizer: Optimizer, factor: float) -> None:
    net = DEBUG.build_on_meta()
    wide = replace(optimizer, param_groups=groups_at(optimizer))
    wide.check(net)
    for settings, names in wide.grouped(net).items():
        matrices = {net.parameter_role(name) == "matrix" for name in names}
        assert len(matrices) == 1, names
        hidden = factor if matrices.pop() else 1.0
        assert settings.peak_lr == pytest.approx(1e-3 / hidden)
        if net.parameter_role(names[0]) != "norm":
            assert settings.peak_lr * settings.weight_decay == pytest.approx(1e-4), "decay per step"
    assert groups_at(optimizer, 1.0) == []


def test_groups_of_the_user_are_scaled_and_the_rest_is_added() -> None:
    mlp = ParamGroup(pattern="*.mlp.*", lr_multiplier=0.5, weight_decay=0.2)
    embedding = ParamGroup(pattern="*.embed_tokens.weight", lr_multiplier=3.0)
    of_another_depth = ParamGroup(pattern="model.layers.7.*")
    groups = groups_at(AdamW(param_groups=[mlp, embedding, of_another_depth]))
    assert groups == [
        replace(mlp, lr_multiplier=0.125, weight_decay=0.8),
        embedding,
        ParamGroup(pattern="*_proj.weight", lr_multiplier=0.25, weight_decay=0.4),
    ]
    by_adamw = ParamGroup(pattern="*.mlp.*", rule="adamw")
    muon = groups_at(Muon(param_groups=[by_adamw]))
    assert [(g.pattern, g.rule, g.lr_multiplier) for g in muon] == [
        ("*.mlp.*", "adamw", 0.25),
        ("*_proj.weight", "", 0.5),
    ]
    with pytest.raises(ConfigError, match=r"'\*' selects matrices of the blocks and other parameters"):
        groups_at(AdamW(param_groups=[ParamGroup(pattern="*")]))


def test_the_lines_are_toml_that_says_the_same() -> None:
    optimizer = AdamW(param_groups=[ParamGroup(pattern="*.mlp.*", lr_multiplier=0.5)])
    fields: dict[str, Any] = {**shape_at(DEBUG.config, 512), **scales_at(DEBUG.config, 4.0)}
    groups = groups_at(optimizer)
    tree = toml.parse("\n".join(toml_lines(DEBUG.config, fields, groups)))
    overrides = tree["model"]["overrides"]
    assert "head_dim" not in overrides, "fields that stay are not named"
    wide = replace(DEBUG, overrides=DEBUG.overrides | overrides)
    assert all(getattr(wide.config, key) == value for key, value in fields.items())
    assert [ParamGroup(**group) for group in tree["optimizer"]["param_groups"]] == groups


def test_without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    check_supported(DEBUG, AdamW())
    other = ModelFamily.choices["parallel_residual"](flavor="tiny")
    with pytest.raises(ConfigError, match=r"'parallel_residual' has no field logit_scale"):
        check_supported(other, AdamW())
    monkeypatch.setattr(AdamW, "width_exponent", Optimizer.width_exponent)
    with pytest.raises(ConfigError, match=r"'adamw' has to change with the width is unknown"):
        check_supported(DEBUG, AdamW())
