"""gpt-oss equals Hugging Face's model: names, logits and gradients. Its experts equal a computation that is
written out. Its configuration is checked, and a config.json that asks for something else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.attention.base import AttentionKind
from titanlite.attention.kv_cache import KVCache
from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder
from titanlite.models.gpt_oss import FLAVORS, GptOss, GptOssMoE, clamped, clamped_backward
from titanlite.models.hf_config import read_family
from titanlite.models.load_balance import is_load
from titanlite.models.moe import local_dispatch

# Sequences of 64 tokens exceed the window and the original length, and the clamp of the experts is active.
SHAPE: dict[str, Any] = {
    "dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "vocab_size": 100,
    "n_experts": 12, "n_experts_per_token": 3, "moe_hidden_dim": 24, "sliding_window": 20,
    "rope_original_max_position": 16, "rope_theta": 1e4, "max_position": 64, "swiglu_limit": 0.4,
}  # fmt: skip
FAMILY = GptOss(flavor="debug", overrides=SHAPE)
GRADIENTS = 1.5e-6  # of the largest of a parameter, in fp32


def random_model(family: GptOss = FAMILY) -> Decoder:
    net, generator = family.build(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 + name.endswith("norm.weight"))
            if name.endswith((".sinks", "router.bias")):
                p.mul_(6)
    return net


def pair(family: GptOss = FAMILY) -> tuple[Decoder, Any]:
    """The same random model in titanlite and in transformers."""
    transformers = pytest.importorskip("transformers")
    net = random_model(family)
    config = transformers.AutoConfig.for_model(**family.hf_config())
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict({name: t for name, t in net.state_dict().items() if not is_load(name)})
    return net, theirs


def tokens() -> torch.Tensor:
    return torch.randint(2, SHAPE["vocab_size"], (3, 64), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("overrides", [{}, {"layer_pattern": "LLS"}, {"rope_truncate": True}])
def test_logits_and_gradients(overrides: dict[str, Any]) -> None:
    ours, theirs = pair(replace(FAMILY, overrides=SHAPE | overrides))
    shapes = {name: p.shape for name, p in ours.named_parameters()}
    assert shapes == {name: p.shape for name, p in theirs.named_parameters()}
    actual, wanted = ours(tokens()), theirs(tokens()).logits
    assert wanted.std() > 0.5
    assert (actual - wanted).abs().max() < 1e-5
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (actual * weight).sum().backward()
    (wanted * weight).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        assert p.grad.abs().max() > 0, name
        assert (p.grad - gradients[name]).abs().max() < GRADIENTS * gradients[name].abs().max(), name


SINKS = "model.layers.1.self_attn.sinks"


@pytest.mark.parametrize(
    "changed",
    [
        *({"sliding_window": 19}, {"sliding_window": 21}, {"layer_pattern": "LS"}, {"swiglu_limit": 1e9}),
        *({"swiglu_alpha": 1.0}, {"rope_truncate": True}, {"rope_factor": 1.0, "rope_type": "llama3"}),
        *(f"model.layers.1.self_attn.{name}" for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias")),
        *("model.layers.1.self_attn.o_proj.bias", "model.layers.1.mlp.router.bias", SINKS),
        *("model.layers.1.mlp.experts.gate_up_proj_bias", "model.layers.1.mlp.experts.down_proj_bias"),
        "sinks left out",
    ],
    ids=str,
)  # fmt: skip
@torch.no_grad()
def test_control_each_part_counts(changed: dict[str, Any] | str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    wanted = theirs(tokens()).logits
    if isinstance(changed, dict):
        other = replace(FAMILY, overrides=SHAPE | changed).build()
        other.load_state_dict(ours.state_dict())
        ours = other
    elif changed == "sinks left out":
        for block in ours.blocks().values():
            monkeypatch.setattr(block.self_attn, "sinks_of_heads", lambda dtype: ())
    else:
        ours.get_parameter(changed).zero_()
    assert (ours(tokens()) - wanted).abs().max() > 1e-3


@torch.no_grad()
def test_control_gate_and_up_alternate() -> None:
    ours, theirs = pair()
    weight = ours.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    weight.copy_(weight.roll(1, -1))
    assert (ours(tokens()) - theirs(tokens()).logits).abs().max() > 1e-2


@torch.no_grad()
def test_generation_with_a_cache() -> None:
    net, cache, logits = random_model(), KVCache(64), []
    for new in (slice(0, 30), slice(30, 31), slice(31, 64)):
        positions = cache.advance(len(range(64)[new]), torch.device("cpu"))
        logits.append(net(tokens()[:, new], positions, cache))
    assert torch.allclose(torch.cat(logits, 1), net(tokens()), atol=1e-5)


# ---- experts


def layer() -> GptOssMoE:
    torch.manual_seed(0)
    mlp = GptOssMoE(FAMILY.config)
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return mlp


def plainly(mlp: GptOssMoE, h_ND: torch.Tensor) -> torch.Tensor:
    """The layer's output, one token and one expert at a time."""
    experts, outputs = mlp.experts, []
    logits = h_ND @ mlp.router.weight.T + mlp.router.bias
    for h_D, scores_E in zip(h_ND, logits):
        best = scores_E.topk(3)
        out_D = torch.zeros_like(h_D)
        for weight, e in zip(best.values.softmax(-1), best.indices.tolist()):
            gate_up = h_D @ experts.gate_up_proj[e] + experts.gate_up_proj_bias[e]
            gate, up = gate_up[::2].clamp(max=0.4), gate_up[1::2].clamp(-0.4, 0.4)
            hidden = (up + 1) * gate * (1.702 * gate).sigmoid()
            out_D = out_D + weight * (hidden @ experts.down_proj[e] + experts.down_proj_bias[e])
        outputs.append(out_D)
    return torch.stack(outputs)


def test_a_layer_is_the_weighted_sum_of_its_experts() -> None:
    mlp = layer()
    h = torch.randn(1, 40, SHAPE["dim"], requires_grad=True)
    inputs = (h, *mlp.parameters())
    actual, wanted = mlp(h), plainly(mlp, h[0])[None]
    g = torch.randn_like(actual)
    torch.testing.assert_close(actual, wanted)
    ours, theirs = torch.autograd.grad(actual, inputs, g), torch.autograd.grad(wanted, inputs, g)
    for a, b in zip(ours, theirs):
        assert (a - b).abs().max() < 2e-6 * b.abs().max()


def test_the_gradient_of_the_clamp() -> None:
    x = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    gate, up = (torch.meshgrid(x[::40], x[::40], indexing="ij")[i].requires_grad_() for i in (0, 1))
    wanted = torch.autograd.grad(clamped(gate, up, 7.0, 1.702).sum(), (gate, up))
    actual = clamped_backward(torch.ones_like(gate), gate, up, 7.0, 1.702)
    torch.testing.assert_close(actual, wanted)


def test_experts_without_tokens_have_no_gradient() -> None:
    mlp = layer()
    with torch.no_grad():
        mlp.router.bias[:3] += 100.0
    mlp(torch.randn(1, 20, SHAPE["dim"])).sum().backward()
    for p in mlp.experts.parameters():
        assert p.grad.flatten(1)[3:].abs().max() == 0
        assert p.grad.flatten(1)[:3].abs().amax(1).min() > 0


def test_pairs_that_are_left_out_add_nothing() -> None:
    """As with expert parallel, where a rank has some of the experts."""
    mlp, h = layer(), torch.randn(20, SHAPE["dim"])
    routing = mlp.router(h)
    whole = local_dispatch(h, routing, mlp.experts)
    order = routing.experts_NK.flatten().argsort(stable=True)
    parameters = list(mlp.experts.parameters())
    halves = []
    first = int(routing.counts_E[:6].sum())
    for rows, experts in ((slice(0, first), slice(0, 6)), (slice(first, None), slice(6, 12))):
        mine = [p[experts] for p in parameters]
        counts = routing.counts_E[experts]
        halves.append(mlp.experts.product(h, routing.weights_NK, order[rows], counts, *mine))
    torch.testing.assert_close(halves[0] + halves[1], whole)


def test_roles_and_initial_values() -> None:
    net = FAMILY.build_on_meta()
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    roles = {name: net.parameter_role(name) for name, _ in net.named_parameters()}
    assert {n for n, role in roles.items() if role == "expert" and ".1." in n} == {
        f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
    }  # fmt: skip
    assert {n for n, role in roles.items() if role == "router" and ".1." in n} == {f"{mlp}.router.weight"}
    norms = (
        *(f"{attention}.sinks", f"{attention}.o_proj.bias", f"{mlp}.router.bias"),
        f"{mlp}.experts.down_proj_bias",
    )
    assert [roles[name] for name in norms] == ["norm"] * 4
    assert [net.init_normal(name) for name in norms] == [(0.0, 0.02), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert net.init_normal(f"{mlp}.experts.gate_up_proj") == (0.0, 0.02)
    assert net.init_normal(f"{mlp}.experts.down_proj") == (0.0, pytest.approx(0.02 / 6**0.5))
    assert net.num_stacked(f"{mlp}.experts.gate_up_proj") == 1


def test_scales_are_folded_into_weights_and_biases() -> None:
    scales = {"residual_scale": 0.5, "attention_scale": 2.0, "logit_scale": 3.0}
    family = replace(FAMILY, overrides=SHAPE | scales)
    ours, plain = random_model(family), FAMILY.build()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(ours.get_parameter(name) * ours.export_factor(name))
        assert torch.allclose(plain(tokens()), ours(tokens()), atol=1e-4)


# ---- configuration


@pytest.mark.parametrize(
    ("flavor", "parameters", "per_token"),
    [("20B", 20_914_757_184, 3_608_307_264), ("120B", 116_829_156_672, 5_132_849_472)],
)
def test_flavors_have_the_published_sizes(flavor: str, parameters: int, per_token: int) -> None:
    net = GptOss(flavor=flavor).build_on_meta()
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net.num_matmul_parameters() == per_token


PUBLISHED = {  # the relevant keys of openai/gpt-oss-20b's config.json
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_published_configs(tmp_path: Path) -> None:
    assert read_family(write(tmp_path, PUBLISHED)) == GptOss(flavor="20B")
    larger = {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None}
    assert read_family(write(tmp_path, PUBLISHED | larger)) == GptOss(flavor="120B")
    without = {key: value for key, value in PUBLISHED.items() if key not in ("rope_scaling", "rope_theta")}
    assert read_family(write(tmp_path, without)) == GptOss(flavor="20B")
    kinds = GptOss(flavor="20B").attention_kinds
    assert kinds[:2] == [AttentionKind(128, True), AttentionKind(0, True)]


@pytest.mark.parametrize(
    "family", [FAMILY, *(GptOss(flavor=name) for name in FLAVORS)], ids=lambda f: f.title
)
def test_a_config_is_read_as_it_is_written(family: GptOss, tmp_path: Path) -> None:
    assert read_family(write(tmp_path, family.hf_config())).config == family.config
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(**family.hf_config()).save_pretrained(tmp_path)
    assert read_family(tmp_path).hf_config() == family.hf_config()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": False}, "attention_bias = false; only true is supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantized weights"),
        ({"quantization_config": "mxfp4"}, "quantization_config: quantized weights"),
        ({"num_local_experts": None}, "config.json has no num_experts"),
        ({"layer_types": ["full_attention"]}, "layer_types is not a list of 24 layers"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0 is not above 0"),
        ({"rope_scaling": PUBLISHED["rope_scaling"] | {"truncate": 1}}, "expected bool, got 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_unsupported_config_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        read_family(write(tmp_path, PUBLISHED | change))
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_dim": 96}, "gpt-oss has experts only"),
        ({"norm_topk_prob": False}, "norm_topk_prob = false"),
        ({"moe_hidden_dim": 20}, "moe_hidden_dim = 20 is not a multiple of 8"),
    ],
)
def test_an_unsupported_shape_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GptOss(flavor="debug", overrides=overrides)
