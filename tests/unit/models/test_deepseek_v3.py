"""DeepSeek-V3 equals transformers' model: names, logits, gradients and config.json; its router's bias chooses
and never weighs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiers import full, sampled
from titanlite.config.component import ConfigError
from titanlite.generate import CachedLogits, uncached_logits
from titanlite.models import deepseek_v3
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.deepseek_v3 import DeepSeekV3, GroupRouter
from titanlite.models.hf_config import read_family
from titanlite.models.lora import LoRA

transformers = pytest.importorskip("transformers")

SHAPE = {
    "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "head_dim": 24, "rope_head_dim": 8,
    "v_head_dim": 16, "q_lora_rank": 20, "kv_lora_rank": 24, "hidden_dim": 96, "vocab_size": 300,
    "n_experts": 8, "n_experts_per_token": 2, "moe_hidden_dim": 40, "tie_word_embeddings": False,
}  # fmt: skip
ONE_GROUP = {"n_expert_groups": 1, "n_expert_groups_per_token": 1}
# The sequences of 128 tokens exceed the original length.
YARN = {
    "rope_type": "yarn", "rope_factor": 4.0, "rope_original_max_position": 32, "rope_attention_factor": 1.0,
    "rope_mscale_all_dim": 1.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ranks and groups": {},
    "no query rank, YaRN": {"q_lora_rank": 0, **YARN},
    "one group, two shared experts": {**ONE_GROUP, "n_shared_experts": 2, "norm_topk_prob": False},
    "two dense blocks, tied": {"n_dense_layers": 2, "tie_word_embeddings": True},
    "no dense block, YaRN without mscale": {
        "n_dense_layers": 0, **YARN, "rope_mscale_all_dim": 0.0, "rope_attention_factor": 0.0,
    },
}  # fmt: skip
DEFAULT_TIER = list(CASES)[:3]


def family_of(case: str = "ranks and groups", **overrides: Any) -> ModelFamily:
    return DeepSeekV3(flavor="debug", overrides={**SHAPE, **CASES[case], **overrides})


def random_net(family: ModelFamily) -> Decoder:
    """A model with large weights and a bias that changes choices."""
    net, generator = family.build(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 + name.endswith("norm.weight"))
        for layer in net.moe_layers().values():
            bias = layer.gate.e_score_correction_bias
            bias.copy_(torch.randn(bias.shape, generator=generator) * 0.2)
    return net


def pair(family: ModelFamily) -> tuple[Decoder, Any]:
    """The same random model in titanlite and in transformers."""
    net = random_net(family)
    config = transformers.AutoConfig.for_model(**family.hf_config())
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    state = {name: t for name, t in net.state_dict().items() if ".gate.load." not in name}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if family.config.tie_word_embeddings else [])
    return net, theirs


def tokens() -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (2, 128), generator=torch.Generator().manual_seed(1))


def loss(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).sum()


@pytest.mark.parametrize("case", sampled(CASES, DEFAULT_TIER))
def test_logits_and_gradients_equal_transformers(case: str) -> None:
    ours, theirs = pair(family_of(case))
    actual, wanted = ours(tokens()), theirs(tokens()).logits
    assert (actual - wanted).abs().max() < 1e-4
    loss(actual).backward()
    loss(wanted).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    for name, p in ours.named_parameters():
        assert (p.grad - gradients[name]).abs().max() < 1e-5 * gradients[name].abs().max(), name


@torch.no_grad()
def test_control_each_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits differ from transformers' with a bias that weighs, without the bias, with all groups, with
    rotary pairs e and e + E/2, without the score scale of YaRN, and without shared experts."""
    family = family_of("no query rank, YaRN", n_expert_groups_per_token=2)
    ours, theirs = pair(family)
    wanted = theirs(tokens()).logits
    layers = list(ours.moe_layers().values())

    def difference(net: Decoder = ours) -> float:
        return (net(tokens()) - wanted).abs().max().item()

    def weighed(router: GroupRouter, logits_NE: torch.Tensor) -> torch.Tensor:
        return logits_NE.sigmoid() + router.e_score_correction_bias

    def same_choice(router: GroupRouter, scores_NE: torch.Tensor) -> torch.Tensor:
        return choose(router, scores_NE - router.e_score_correction_bias)

    choose = GroupRouter.choose
    with monkeypatch.context() as patch:
        patch.setattr(GroupRouter, "choose", same_choice)
        patch.setattr(GroupRouter, "scores", weighed)
        assert difference() > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(deepseek_v3, "halves", lambda x: x)
        assert difference() > 1e-2
    for changed in ({"rope_mscale_all_dim": 0.0}, {"n_expert_groups_per_token": 4}):
        other = replace(family, overrides=family.overrides | changed).build()
        other.load_state_dict(ours.state_dict())
        assert difference(other) > 1e-2
    assert difference() < 1e-4
    biases = [layer.gate.e_score_correction_bias.clone() for layer in layers]
    for layer in layers:
        layer.gate.e_score_correction_bias.zero_()
    assert difference() > 1e-2
    for layer, bias in zip(layers, biases):
        layer.gate.e_score_correction_bias.copy_(bias)
    layers[0].shared_experts.down_proj.weight.zero_()
    assert difference() > 1e-2


@torch.no_grad()
def test_the_cache_of_generation_changes_no_logit() -> None:
    net = random_net(family_of("no query rank, YaRN"))
    ids, device = tokens()[0, :40].tolist(), torch.device("cpu")
    cached, whole = CachedLogits(net, 50, device), uncached_logits(net, 50, 0, device)
    for _ in range(5):
        ours, wanted = cached(ids), whole(ids)
        assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-4)
        ids.append(int(wanted.argmax()))


# ---- the router


def router(**overrides: Any) -> GroupRouter:
    net = random_net(family_of(**overrides))
    gate = next(iter(net.moe_layers().values())).gate
    assert isinstance(gate, GroupRouter)
    return gate


def test_experts_are_chosen_in_the_best_groups() -> None:
    """By hand: four groups of two experts. The best expert is in a group that is not among the two best."""
    gate = router()
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.6, 0.4, 0.4, 0.5, 0.45]])
    gate.e_score_correction_bias.zero_()
    assert gate.choose(scores).tolist() == [[3, 2]]
    gate.e_score_correction_bias[6:] = 0.3  # the last group becomes the best one
    assert gate.choose(scores).tolist() == [[6, 7]]
    assert router(**ONE_GROUP).num_groups == 1


def test_the_bias_is_state_and_gets_no_gradient() -> None:
    net = random_net(family_of())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert name in net.state_dict()
    bias = net.get_buffer(name)
    assert (bias.dtype, bias.requires_grad) == (torch.float32, False)
    net.fill_buffers()
    assert bias.count_nonzero() == 0
    assert not any("layers.0.mlp.gate." in other for other in net.state_dict())  # a dense block


def test_weights_sum_to_the_scaling_factor() -> None:
    gate = router()
    weights = gate(torch.randn(5, SHAPE["dim"])).weights_NK
    assert torch.allclose(weights.sum(-1), torch.tensor(2.5))


# ---- roles, FLOPs, adapters, limits


def test_roles_and_heads() -> None:
    net = random_net(family_of())
    prefix = "model.layers.1."
    assert net.parameter_role(f"{prefix}mlp.gate.weight") == "router"
    assert net.parameter_role(f"{prefix}mlp.experts.down_proj") == "expert"
    assert net.parameter_role(f"{prefix}mlp.shared_experts.down_proj.weight") == "matrix"
    assert net.parameter_role(f"{prefix}self_attn.kv_a_layernorm.weight") == "norm"
    assert [net.num_heads(f"{prefix}self_attn.{name}.weight") for name in ("q_b_proj", "kv_b_proj")] == [4, 4]
    assert net.num_heads(f"{prefix}self_attn.kv_a_proj_with_mqa.weight") == 1


def test_flops_count_the_dims_of_keys_and_of_values() -> None:
    net = family_of().build_on_meta()
    per_key = net.flops_per_token(11) - net.flops_per_token(10)
    assert per_key == 6 * 3 * 4 * (24 + 16)
    idle = 2 * 6 * 3 * 40 * 64  # in two layers, 6 of 8 experts
    total = sum(p.numel() for p in net.parameters())
    assert net.flops_per_token(0) == 6 * (total - idle - 300 * 64)


@torch.no_grad()
def test_the_attention_scale_folds_into_the_queries() -> None:
    for case, name in (("ranks and groups", "q_b_proj"), ("no query rank, YaRN", "q_proj")):
        scaled = random_net(family_of(case, attention_scale=0.5))
        plain = random_net(family_of(case))
        wanted = scaled(tokens())
        assert (plain(tokens()) - wanted).abs().max() > 1e-2
        for parameter, p in plain.named_parameters():
            p.mul_(scaled.export_factor(parameter))
            assert (scaled.export_factor(parameter) != 1.0) == parameter.endswith(f".{name}.weight")
        assert (plain(tokens()) - wanted).abs().max() < 1e-4


def test_adapters_take_all_linear_layers_but_the_router() -> None:
    net = family_of().build_on_meta()
    LoRA(enable=True, rank=4).apply(net)
    adapted = {name for name, p in net.named_parameters() if p.requires_grad}
    prefix = "model.layers.1.self_attn.kv_a_proj_with_mqa."
    assert {f"{prefix}lora_A.weight", f"{prefix}lora_B.weight"} <= adapted
    assert not any(".gate." in name or ".experts." in name for name in adapted)


def test_tensor_parallel_shares_the_hidden_units_of_shared_experts() -> None:
    sizes = {"vocab_size": 300, "hidden_dim": 36, "moe_hidden_dim": 8, "n_heads": 12, "n_kv_heads": 12}
    family_of(**sizes).check_tensor_parallel(2)
    with pytest.raises(ConfigError, match="n_shared_experts x moe_hidden_dim = 8, the hidden units") as e:
        family_of(n_shared_experts=1, **sizes).check_tensor_parallel(3)
    assert e.value.key == "parallelism.tensor_parallel_degree"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_kv_heads": 2}, "n_kv_heads = 2 is not n_heads = 4: latent attention has keys and values for"),
        ({"rope_head_dim": 24}, "rope_head_dim = 24 is not even or not below head_dim = 24"),
        ({"rope_head_dim": 7}, "rope_head_dim = 7 is not even"),
        ({"n_dense_layers": 3}, "n_dense_layers = 3 is not below n_layers = 3: no block would have experts"),
        ({"n_expert_groups": 3}, "n_experts = 8 cannot be divided into n_expert_groups = 3 equal groups of"),
        ({"n_expert_groups": 8}, "n_experts = 8 cannot be divided into n_expert_groups = 8 equal groups of"),
        ({"n_expert_groups_per_token": 5}, "n_expert_groups_per_token = 5 is above n_expert_groups = 4"),
        (
            {"n_experts_per_token": 5},
            "n_experts_per_token = 5 is above the 4 experts of n_expert_groups_per_",
        ),
        ({"n_shared_experts": 0}, "n_shared_experts = 0 is not above 0"),
        (
            {"rope_mscale_all_dim": 1.0},
            "rope_mscale_all_dim = 1.0 needs rope_type = 'yarn' and rope_attention",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_fields_that_do_not_fit_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        family_of(**overrides)
    assert str(e.value).startswith(message)


# ---- config.json


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_config_is_read_as_it_and_as_transformers_writes_it(case: str, tmp_path: Path) -> None:
    family = family_of(case)
    assert read_family(write(tmp_path, family.hf_config())).config == family.config
    config = transformers.AutoConfig.for_model(**family.hf_config())
    assert config.head_dim == family.config.rope_head_dim
    config.save_pretrained(tmp_path)
    assert read_family(tmp_path).config == family.config


# The relevant keys of the config.json of DeepSeek-V3 (in bf16) and of Moonlight-16B-A3B.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
MOONLIGHT = V3 | {
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
    "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip


@pytest.mark.parametrize(("flavor", "config"), [("671B", V3), ("16B", MOONLIGHT)])
def test_published_configs(flavor: str, config: dict[str, Any], tmp_path: Path) -> None:
    assert read_family(write(tmp_path, config)).config == DeepSeekV3(flavor=flavor).config
    family = read_family(write(tmp_path, config | {"num_nextn_predict_layers": 1}))
    assert family.config == replace(DeepSeekV3(flavor=flavor).config, n_mtp_layers=1)
    assert family.hf_config()["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scoring_func", "softmax", 'scoring_func = "softmax"; only "sigmoid" is supported'),
        ("topk_method", "greedy", 'topk_method = "greedy"; only "noaux_tc" is supported'),
        ("moe_layer_freq", 2, "moe_layer_freq = 2; only 1 is supported"),
        ("rope_interleave", False, "rope_interleave = false; only true is supported"),
        ("num_nextn_predict_layers", -1, "n_mtp_layers = -1 is below 0"),
        ("num_nextn_predict_layers", "1", "expected int, got '1'"),
        ("attention_bias", True, "attention_bias = true; only false is supported"),
        ("quantization_config", {"fmt": "e4m3"}, "quantization_config: quantized weights are not supported"),
        ("num_key_value_heads", 8, "n_kv_heads = 8 is not n_heads = 128"),
        ("qk_nope_head_dim", None, "config.json has no qk_nope_head_dim"),
        ("n_group", None, "config.json has no n_group"),
        ("rope_scaling", V3["rope_scaling"] | {"mscale": 0.5}, "mscale_all_dim = 1.0; only an equal mscale"),
        (
            "rope_scaling",
            {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0},
            "only an equal mscale is s",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_config_has_beyond_is_refused_by_name(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as e:
        read_family(write(tmp_path, V3 | {key: value}))
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("flavor", "parameters", "active"),
    [("16B", 15_960_108_544, 2.24e9), full("671B", 671_026_404_352, 35.7e9)],
)
def test_flavors_have_the_published_sizes(flavor: str, parameters: int, active: float) -> None:
    """`active`: parameters of a token without embedding and head."""
    family = DeepSeekV3(flavor=flavor)
    net, config = family.build_on_meta(), family.config
    assert sum(p.numel() for p in net.parameters()) == parameters
    head = config.vocab_size * config.dim
    assert net.num_matmul_parameters() - head == pytest.approx(active, rel=3e-3)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**family.hf_config())
        )
    assert {n: p.shape for n, p in net.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }


def test_the_scale_of_scores_is_yarns() -> None:
    config = DeepSeekV3(flavor="671B").config
    assert math.isclose(config.score_scale, (0.1 * math.log(40) + 1) ** 2)
    assert config.rope_scaling.magnitude == 1.0
    assert DeepSeekV3(flavor="16B").config.score_scale == 1.0
