"""Adapters: what they compute, which layers get them, how they start, and what is trained."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.models import family, row
from titanlite.config.component import ConfigError
from titanlite.losses import CrossEntropy
from titanlite.mesh import ALONE
from titanlite.models.base import Decoder
from titanlite.models.lora import LoRA
from titanlite.optim.muon import Muon
from titanlite.parallel.apply import parallelize
from titanlite.parallel.initialize import fill_normal
from titanlite.parallel.settings import ParallelSettings


def adapted(*, pipeline_parallel: bool = False, **keys: Any) -> Decoder:
    """A model with initial weights and adapters."""
    net = family().build_on_meta()
    LoRA(enable=True, **{"rank": 4, "alpha": 6.0, **keys}).apply(net, pipeline_parallel)
    parallelize(net, CrossEntropy(), ALONE, ParallelSettings()).materialize(torch.device("cpu"), seed=0)
    return net


def layers_of(net: Decoder) -> set[str]:
    return {name.partition(".lora_A")[0] for name, _ in net.named_modules() if name.endswith("lora_A")}


def test_adapters_of_a_model_on_meta_allocate_and_draw_nothing() -> None:
    before = torch.get_rng_state()
    net = family().build_on_meta()
    LoRA(enable=True).apply(net, pipeline_parallel=False)
    assert {p.device.type for p in net.parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)


@torch.no_grad()
def test_a_layer_computes_the_merged_matrix() -> None:
    net = adapted(targets=["q_proj"]).double()
    layer = net.get_submodule("model.layers.1.self_attn.q_proj")
    for name, p in layer.named_parameters():
        fill_normal(p, name, 0.0, 0.5, seed=1)
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    merged = layer.weight + 6.0 / 4 * layer.lora_B.weight @ layer.lora_A.weight
    assert torch.allclose(layer(x), x @ merged.T, atol=1e-12)
    assert not torch.allclose(layer(x), x @ layer.weight.T, atol=0.1)


def test_adapters_start_as_nothing_and_names_of_the_base_model_stay() -> None:
    plain, net = family().build_on_meta(), adapted()
    parallelize(plain, CrossEntropy(), ALONE, ParallelSettings()).materialize(torch.device("cpu"), seed=0)
    with torch.no_grad():
        assert torch.equal(net(row(16)), plain(row(16)))
    ours, theirs = dict(net.named_parameters()), dict(plain.named_parameters())
    assert all(torch.equal(ours[name], p) for name, p in theirs.items())
    assert len(ours) == len(theirs) + 2 * 7 * 2
    a = ours["model.layers.0.mlp.down_proj.lora_A.weight"].detach()
    bound = 1 / math.sqrt(64)
    assert a.shape == (4, 64)
    assert 0.9 * bound < a.abs().max() <= bound
    assert a.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert abs(a.mean()) < 0.1 * bound
    assert {name for name, p in ours.items() if p.requires_grad} == ours.keys() - theirs.keys()


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj"], {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}),
        (["mlp.up_proj"], {f"model.layers.{i}.mlp.up_proj" for i in (0, 1)}),
        (["model.layers.1.self_attn.*"], {f"model.layers.1.self_attn.{k}_proj" for k in "qkvo"}),
        (["1.mlp.down_proj", "0.mlp.[gd]*_proj"], {
            "model.layers.1.mlp.down_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj",
        }),
    ],
)  # fmt: skip
def test_targets(targets: list[str], layers: set[str]) -> None:
    assert layers_of(adapted(targets=targets)) == layers


def test_targets_are_the_same_to_a_run_if_they_choose_the_same_layers() -> None:
    def identity(*targets: str) -> list[str]:
        return LoRA(targets=list(targets)).identity(family().build_on_meta())["targets"]

    assert identity("q_proj", "v_proj") == identity("v_proj", "q_proj", "q_*") == identity("[qv]_proj")
    assert identity("q_proj", "v_proj") == ["q_proj", "v_proj"]
    assert identity("*") == identity("mlp.*", "self_attn.*_proj")
    assert identity("1.*.q_proj", "mlp.up_proj") == ["model.layers.1.self_attn.q_proj", "up_proj"]
    different = [identity(*targets) for targets in (["*"], ["q_proj"], ["0.*.q_proj"], ["1.*.q_proj"])]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])


def test_routers_get_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    role = Decoder.parameter_role
    monkeypatch.setattr(
        Decoder, "parameter_role", lambda net, name: "router" if "0.mlp.up" in name else role(net, name)
    )
    assert layers_of(adapted(targets=["up_proj"])) == {"model.layers.1.mlp.up_proj"}
    with pytest.raises(ConfigError, match=r"0.mlp.up_proj.* matches no linear layer"):
        adapted(targets=["0.mlp.up_proj"])


@pytest.mark.parametrize(
    ("keys", "message", "key"),
    [
        ({"rank": 0}, "0 is below 1", "rank"),
        ({"alpha": 0.0}, "0.0 is not above 0", "alpha"),
        ({"targets": []}, "empty", "targets"),
        ({"targets": ["*", "q_prj"]}, "did you mean 'q_proj'", "lora.targets.1"),
        ({"targets": ["lm_head"]}, "matches no linear layer of the blocks", "lora.targets.0"),
        ({"targets": ["roj"]}, "matches no linear layer of the blocks", "lora.targets.0"),
        (
            {"targets": ["0.mlp.up_proj"], "pipeline_parallel": True},
            "an adapter in every block; model.layers.1 has none", "lora.targets",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(keys: dict[str, Any], message: str, key: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        adapted(**keys)
    assert e.value.key == key


def test_other_sections_that_do_not_fit() -> None:
    LoRA(enable=True).check("base", float8=False)
    for path, float8, key in (("", False, "lora.enable"), ("base", True, "float8.enable")):
        with pytest.raises(ConfigError) as e:
            LoRA(enable=True).check(path, float8)
        assert e.value.key == key
        LoRA().check(path, float8)


def test_adapters_have_the_rule_adamw_and_are_decayed() -> None:
    net = adapted()
    (settings,) = Muon(weight_decay=0.3).grouped(net)
    assert (settings.rule, settings.weight_decay) == ("adamw", 0.3)
    optimizer = Muon().build(net, ALONE)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 28


def test_flops_leave_out_the_gradients_of_frozen_weights() -> None:
    net, plain = adapted(), family().build_on_meta()
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    num, attention = plain.num_matmul_parameters(), 12 * 2 * 32 * 16
    assert plain.flops_per_token(16) == 6 * num + attention
    assert net.flops_per_token(16) == 4 * num + 6 * trained + attention
    (line,) = LoRA(enable=True, rank=4, alpha=6.0).describe(net)
    frozen = sum(p.numel() for p in plain.parameters())
    assert f"{trained:,} parameters are trained, {frozen:,} are frozen" in line
    assert LoRA().describe(plain) == []
