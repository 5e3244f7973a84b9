"""Families with experts equal Hugging Face's models: names, logits and gradients. Their configurations are
checked, and a config.json that asks for something else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.load_balance import is_load
from titanlite.models.moe import MoE, Routing, local_dispatch
from titanlite.models.olmoe import Olmoe
from titanlite.models.qwen3_moe import Qwen3MoE

SHAPE = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 100,
    "n_experts": 12, "n_experts_per_token": 3, "moe_hidden_dim": 24, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = (Qwen3MoE, Olmoe)


def family_of(family: type[ModelFamily], **overrides: Any) -> ModelFamily:
    return family(flavor="debug", overrides=SHAPE | overrides)


def random_model(family: ModelFamily) -> Decoder:
    net = family.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 + (p.ndim == 1))
    return net


def pair(family: ModelFamily) -> tuple[Decoder, Any]:
    """The same random model in titanlite and in transformers."""
    transformers = pytest.importorskip("transformers")
    net = random_model(family)
    config = transformers.AutoConfig.for_model(**family.hf_config())
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict({name: t for name, t in net.state_dict().items() if not is_load(name)})
    return net, theirs


def tokens() -> torch.Tensor:
    """Without id 1, whose embedding gets no gradient in transformers' OLMoE: it is its padding."""
    return torch.randint(2, SHAPE["vocab_size"], (3, 64), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_logits_and_gradients(family: type[ModelFamily], norm_topk_prob: bool) -> None:
    ours, theirs = pair(family_of(family, norm_topk_prob=norm_topk_prob))
    actual, wanted = ours(tokens()), theirs(tokens()).logits
    assert wanted.std() > 0.5
    assert (actual - wanted).abs().max() < 2e-5
    actual.logsumexp(-1).sum().backward()
    wanted.logsumexp(-1).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        assert p.grad.abs().max() > 0, name
        assert (p.grad - gradients[name]).abs().max() < 2e-5 * gradients[name].abs().max(), name


@torch.no_grad()
def test_control_the_weights_of_experts_and_the_order_of_gate_and_up_count() -> None:
    ours, theirs = pair(family_of(Qwen3MoE))
    wanted = theirs(tokens()).logits
    mlp = ours.blocks()["1"].mlp
    mlp.gate.norm_topk_prob = False
    assert (ours(tokens()) - wanted).abs().max() > 1e-2
    mlp.gate.norm_topk_prob = True
    mlp.experts.gate_up_proj.copy_(mlp.experts.gate_up_proj.roll(SHAPE["moe_hidden_dim"], 1))
    assert (ours(tokens()) - wanted).abs().max() > 1e-2


@torch.no_grad()
def test_control_olmoes_norm_spans_all_heads() -> None:
    ours, theirs = pair(family_of(Olmoe))
    wanted = theirs(tokens()).logits
    attention = ours.blocks()["0"].self_attn
    attention.q_norm.forward = lambda q: q
    assert (ours(tokens()) - wanted).abs().max() > 1e-2


def layer(**overrides: Any) -> MoE:
    torch.manual_seed(0)
    mlp = MoE(family_of(Qwen3MoE, **overrides).config)
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return mlp


def plainly(mlp: MoE, h_ND: torch.Tensor) -> torch.Tensor:
    """The layer's output, one token and one expert at a time."""
    routing, outputs = mlp.gate(h_ND), []
    for h_D, weights, experts in zip(h_ND, routing.weights_NK, routing.experts_NK.tolist()):
        out_D = torch.zeros_like(h_D)
        for weight, e in zip(weights, experts):
            gate, up = (mlp.experts.gate_up_proj[e] @ h_D).chunk(2)
            out_D = out_D + weight * (mlp.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
        outputs.append(out_D)
    return torch.stack(outputs)


def test_a_layer_is_the_weighted_sum_of_its_experts() -> None:
    mlp = layer()
    h = torch.randn(1, 20, SHAPE["dim"], requires_grad=True)
    inputs = (h, *mlp.parameters())
    actual, wanted = mlp(h), plainly(mlp, h[0])[None]
    g = torch.randn_like(actual)
    torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs, g), torch.autograd.grad(wanted, inputs, g))


def test_experts_without_tokens_and_a_single_token_are_normal() -> None:
    mlp = layer()
    with torch.no_grad():
        mlp.gate.weight[3:] = mlp.gate.weight[:1] - 1.0  # for a positive token: never chosen
    h = torch.rand(1, 1, SHAPE["dim"], requires_grad=True)
    out = mlp(h)
    out.sum().backward()
    torch.testing.assert_close(out, plainly(mlp, h[0])[None])
    assert mlp.experts.down_proj.grad[3:].abs().max() == 0
    assert mlp.experts.down_proj.grad[:3].abs().amin((1, 2)).max() > 0


def test_a_routing_counts_the_tokens_of_each_expert() -> None:
    mlp = layer()
    routing = mlp.gate(torch.randn(50, SHAPE["dim"]))
    assert routing.counts_E.tolist() == routing.experts_NK.flatten().bincount(minlength=12).tolist()
    assert routing.weights_NK.dtype == torch.float32
    torch.testing.assert_close(routing.weights_NK.sum(-1), torch.ones(50))


def test_the_dispatch_may_get_no_rows_and_any_experts() -> None:
    mlp = layer()
    seen = []

    def experts(
        h_ND: torch.Tensor, weights_NK: torch.Tensor, order_P: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        seen.append((order_P, counts_E))
        return h_ND * weights_NK.sum(1, keepdim=True) * 2

    for num in (0, 7):
        h = torch.randn(num, SHAPE["dim"])
        torch.testing.assert_close(local_dispatch(h, mlp.gate(h), experts), 2 * h)
    (_, _), (order_P, counts_E) = seen
    assert len(order_P) == counts_E.sum() == 21


def test_the_parts_of_the_experts_add_up() -> None:
    """As the ranks of expert parallel compute them from the tokens of all ranks."""
    mlp, h_ND = layer(), torch.randn(7, SHAPE["dim"])
    h_ND.requires_grad_()
    routing = mlp.gate(h_ND)
    order_P = routing.experts_NK.flatten().argsort(stable=True)
    inputs = [h_ND, routing.weights_NK]
    whole = mlp.experts(*inputs, order_P, routing.counts_E)
    parts = []
    for first in (True, False):
        is_here_E = (torch.arange(len(routing.counts_E)) < 3) == first
        order_R = order_P[is_here_E[routing.experts_NK.flatten()[order_P]]]
        parts.append(mlp.experts(*inputs, order_R, routing.counts_E * is_here_E))
    g_ND = torch.randn_like(whole)
    gradients = [
        torch.autograd.grad([y], [*inputs, *mlp.experts.parameters()], g_ND, retain_graph=True)
        for y in (whole, *parts)
    ]
    torch.testing.assert_close(sum(parts), whole)
    for of_whole, *of_parts in zip(*gradients):
        assert of_parts[0].any()
        torch.testing.assert_close(sum(of_parts), of_whole)


def test_the_router_computes_in_fp32() -> None:
    mlp = layer()
    h = torch.randn(200, SHAPE["dim"])
    logits = mlp.gate.product(h.bfloat16(), mlp.gate.weight)
    assert logits.dtype == torch.float32
    exact = h.bfloat16().double() @ mlp.gate.weight.bfloat16().double().T
    assert (logits - exact).abs().max() < 1e-5
    assert ((h.bfloat16() @ mlp.gate.weight.bfloat16().T).double() - exact).abs().max() > 1e-3, "control"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_roles_initial_values_and_stacked_matrices(family: type[ModelFamily]) -> None:
    net = family_of(family).build_on_meta()
    mlp = "model.layers.1.mlp"
    gate, gate_up, down = f"{mlp}.gate.weight", f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
    assert [net.parameter_role(name) for name in (gate, gate_up, down)] == ["router", "expert", "expert"]
    assert net.parameter_role("model.layers.1.self_attn.q_proj.weight") == "matrix"
    assert net.parameter_role("lm_head.weight") == "head"
    assert [net.init_normal(name) for name in (gate, gate_up, down)] == [(0, 0.02), (0, 0.02), (0, 0.01)]
    assert [net.num_stacked(name) for name in (gate, gate_up, down)] == [1, 2, 1]
    assert list(net.moe_layers()) == ["model.layers.0.mlp", mlp]


# From the published files' numbers of parameters: 30,532,122,624 and 6,919,161,856.
@pytest.mark.parametrize(
    ("family", "flavor", "num_parameters", "num_active"),
    [
        (Qwen3MoE, "30B-A3B", 30_532_122_624, 3_041_867_776),
        (Qwen3MoE, "235B-A22B", 235_093_634_560, 21_568_433_664),
        (Olmoe, "1B-7B", 6_919_161_856, 1_178_994_688),
    ],
    ids=str,
)
def test_flavors_have_the_published_sizes(
    family: type[ModelFamily], flavor: str, num_parameters: int, num_active: int
) -> None:
    """`num_active`: without the embedding, which is only looked up."""
    net = family(flavor=flavor).build_on_meta()
    assert sum(p.numel() for p in net.parameters()) == num_parameters
    assert net.num_matmul_parameters() == num_active
    config = net.config
    attention = 12 * config.n_layers * config.n_heads * config.head_dim * 4096
    assert net.flops_per_token(4096) == 6 * num_active + attention


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_experts_per_token": 13}, "n_experts_per_token = 13 is above n_experts = 12"),
        ({"moe_hidden_dim": 20}, "moe_hidden_dim = 20 is not a multiple of 8"),
        ({"dim": 36}, "dim = 36 is not a multiple of 8"),
        ({"n_experts": 0}, "n_experts = 0 is not above 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_impossible_shapes_are_refused(
    family: type[ModelFamily], overrides: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        family_of(family, **overrides)


def test_a_dense_hidden_dim_of_olmoe_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_dim = 64: OLMoE has experts only; set moe_hidden_dim"):
        family_of(Olmoe, hidden_dim=64)


def test_tensor_parallel_asks_nothing_of_a_hidden_dim_without_mlp() -> None:
    family_of(Qwen3MoE, n_heads=4, n_kv_heads=2, hidden_dim=63, vocab_size=128).check_tensor_parallel(2)
    with pytest.raises(ConfigError, match="n_kv_heads = 2 is not divisible by 4"):
        family_of(Qwen3MoE, n_heads=4, n_kv_heads=2, vocab_size=128).check_tensor_parallel(4)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_written_config_json_is_read_back(family: type[ModelFamily]) -> None:
    for flavor in family.flavors:
        for norm_topk_prob in (True, False):
            model = family(flavor=flavor, overrides={"norm_topk_prob": norm_topk_prob})
            written = json.loads(json.dumps(model.hf_config()))
            assert family.from_hf_config(written).config == model.config
            written["num_local_experts"] = written.pop("num_experts")  # as transformers 5 writes it
            assert family.from_hf_config(written).config == model.config


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        (Qwen3MoE, {"norm_topk_prob": None}, "config.json has no norm_topk_prob"),
        (Olmoe, {"norm_topk_prob": None}, "config.json has no norm_topk_prob"),
        (Qwen3MoE, {"num_experts": None}, "config.json has no num_experts"),
        (Qwen3MoE, {"num_experts_per_tok": None}, "config.json has no num_experts_per_tok"),
        (Qwen3MoE, {"moe_intermediate_size": None}, "config.json has no moe_intermediate_size"),
        (Qwen3MoE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (Qwen3MoE, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        (Olmoe, {"clip_qkv": 8.0}, "clip_qkv = 8.0; only null is supported"),
        full(Qwen3MoE, {"norm_topk_prob": 1}, "norm_topk_prob = 1 is not true or false"),
        full(Olmoe, {"attention_bias": True}, "attention_bias = true"),
    ],
    ids=str,
)
def test_a_config_json_of_another_model_is_refused(
    family: type[ModelFamily], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        family.from_hf_config(family_of(family).hf_config() | changed)


def test_a_head_dim_that_transformers_olmoe_lacks_is_not_exported() -> None:
    with pytest.raises(ConfigError, match="head_dim = 16: in Hugging Face's OLMoE it is dim / n_heads"):
        family_of(Olmoe, head_dim=16).hf_config()


def saved_by(function: Callable[[], Any]) -> list[torch.Size]:
    shapes: list[torch.Size] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        shapes.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return shapes


@pytest.mark.parametrize("compiled", [False, full(True)])
def test_a_layer_keeps_neither_rows_nor_hidden_units_nor_outputs_of_experts(compiled: bool) -> None:
    mlp = layer()
    h = torch.randn(1, 20, SHAPE["dim"], requires_grad=True)
    if compiled:  # split into forward and backward as inductor does
        mlp.compile(fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    num_pairs, hidden = 20 * 3, SHAPE["moe_hidden_dim"]
    kept = [shape for shape in saved_by(lambda: mlp(h)) if len(shape) > 1 and shape[0] == num_pairs]
    assert kept == [(num_pairs, 2 * hidden)]


@pytest.mark.parametrize("frozen", ["gate", "experts", "gate_up_proj", "down_proj"])
def test_gradients_beside_frozen_weights_are_the_same(frozen: str) -> None:
    mlp = layer()
    h = torch.randn(1, 20, SHAPE["dim"], requires_grad=True)
    mlp(h).square().sum().backward()
    wanted = {"h": h.grad} | {name: p.grad for name, p in mlp.named_parameters()}
    h.grad = None
    mlp.zero_grad()
    for name, p in mlp.named_parameters():
        p.requires_grad_(frozen not in name)
    mlp(h).square().sum().backward()
    actual = {"h": h.grad} | {name: p.grad for name, p in mlp.named_parameters()}
    assert [name for name, g in actual.items() if g is None] == [n for n in actual if frozen in n]
    if frozen != "gate":  # a frozen router changes the gradient of h
        assert all(torch.equal(g, wanted[name]) for name, g in actual.items() if g is not None)


def test_the_gradient_of_the_weights_is_summed_in_fp32() -> None:
    """In bf16, the router's gradient is as near to the exact one as the rounding of its inputs allows."""
    mlp = layer()
    h = torch.randn(64, SHAPE["dim"]).bfloat16()
    experts_NK = torch.rand(64, 12).topk(3).indices
    weights = torch.rand(64, 3, requires_grad=True)
    g = torch.randn(64, SHAPE["dim"]).bfloat16()

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        routing = Routing(weights, experts_NK, experts_NK.flatten().bincount(minlength=12))
        out = local_dispatch(h.to(dtype), routing, mlp.experts)
        return torch.autograd.grad(out, weights, g.to(dtype))[0]

    actual, exact = gradient(torch.bfloat16), gradient(torch.float32)
    assert actual.dtype == torch.float32
    assert 0 < (actual - exact).norm() < 1e-2 * exact.norm()
