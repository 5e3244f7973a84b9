"""Pins Muon: against torch.optim.Muon and a plain formula, which parameters have which rule, its options, the
skipped step, and its errors."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.support.optimizer_layouts import gradient
from titanlite.config.component import ConfigError
from titanlite.mesh import ALONE
from titanlite.models.base import Decoder
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.optim import muon_optimizer
from titanlite.optim.base import ParamGroup, guarded_step, make_state, set_lr
from titanlite.optim.muon import Muon
from titanlite.optim.muon_optimizer import MuonOptimizer, batches_of, lr_scale
from titanlite.optim.orthogonalize import coefficients_of

TINY = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
Q, DOWN, HEAD = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "lm_head.weight",
)


def model_of(**overrides: Any) -> Decoder:
    net = Llama3(flavor="debug", overrides=TINY | overrides).build()
    for name, p in net.named_parameters():
        torch.nn.init.normal_(p, std=0.02, generator=torch.Generator().manual_seed(len(name)))
    return net


def train(net: Decoder, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, torch.Tensor]:
    """Take steps with the gradients of `gradient`. Returns the weights."""
    for step in range(steps):
        for name, p in net.named_parameters():
            p.grad = gradient(name, step, p.shape)
        optimizer.step()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def rules_of(net: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    names = {p: name for name, p in net.named_parameters()}
    return {names[p]: group["rule"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_matrices_move_as_with_torchs_muon(adjust: Any) -> None:
    net, theirs = model_of(), model_of()
    config = Muon(lr=0.01, adjust_lr_fn=adjust, ns_coefficients="jordan", ns_dtype="bfloat16")
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    actual = train(net, config.build(net, ALONE), 5)
    rules = rules_of(net, config.build(net, ALONE))
    matrices = [p for name, p in theirs.named_parameters() if rules[name] == "muon"]
    wanted = train(theirs, torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust), 5)
    for name, rule in rules.items():
        moved = (wanted[name] - start[name]).norm()
        if rule == "muon":
            # torch takes the norm in bf16, and its products round otherwise.
            assert (actual[name] - wanted[name]).norm() < 0.03 * moved, name
        else:
            assert moved == 0


def test_the_rest_moves_as_with_torchs_adamw() -> None:
    net, theirs = model_of(), model_of()
    config = Muon(lr=0.01, adamw_lr_multiplier=0.5, beta1=0.8, beta2=0.9, eps=1e-6)
    actual = train(net, config.build(net, ALONE), 4)
    decayed = [theirs.get_parameter(name) for name in (HEAD, "model.embed_tokens.weight")]
    norms = [p for name, p in theirs.named_parameters() if name.endswith("norm.weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    wanted = train(theirs, torch.optim.AdamW(groups, lr=0.005, betas=(0.8, 0.9), eps=1e-6, fused=True), 4)
    for name in (HEAD, "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(actual[name], wanted[name]), name


def test_two_steps_follow_the_formula() -> None:
    net = model_of()
    optimizer = Muon(lr=0.01, momentum=0.9, weight_decay=0.2, adjust_lr_fn="spectral").build(net, ALONE)
    weight, momentum = net.get_parameter(DOWN).detach().clone(), torch.zeros(32, 64)
    for step in range(2):
        g = gradient(DOWN, step, momentum.shape)
        momentum = 0.9 * momentum + 0.1 * g
        update = _orthogonalized(0.1 * g + 0.9 * momentum, coefficients_of("polar_express", 5))
        weight = weight * (1 - 0.01 * 0.2) - 0.01 * math.sqrt(32 / 64) * update
    actual = train(net, optimizer, 2)[DOWN]
    assert torch.allclose(actual, weight, atol=1e-6)
    assert torch.allclose(optimizer.state[net.get_parameter(DOWN)]["momentum_buffer"], momentum, atol=1e-7)


def test_only_matrices_of_the_blocks_have_muons_rule() -> None:
    net = model_of()
    rules = rules_of(net, Muon().build(net, ALONE))
    assert {name for name, rule in rules.items() if rule == "muon"} == {n for n in rules if "_proj." in n}
    groups = [ParamGroup(pattern="*.q_proj.weight", rule="adamw"), ParamGroup(pattern=HEAD, rule="muon")]
    rules = rules_of(net, Muon(param_groups=groups).build(net, ALONE))
    assert (rules[Q], rules[HEAD], rules[DOWN]) == ("adamw", "muon", "muon")


def test_the_matrices_of_experts_are_orthogonalised_one_by_one() -> None:
    """Gate and up, which share a parameter, too. The router is AdamW's."""
    experts = {"n_experts": 3, "n_experts_per_token": 2, "moe_hidden_dim": 24}
    net = Qwen3MoE(flavor="debug", overrides={"dim": 32, "n_layers": 1, **experts}).build()
    start = {name: torch.nn.init.normal_(p, std=0.02).clone() for name, p in net.named_parameters()}
    mlp = "model.layers.0.mlp"
    gate_up, down, router = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj", f"{mlp}.gate.weight"
    optimizer = Muon(lr=1.0, weight_decay=0.0, nesterov=False, adjust_lr_fn="spectral").build(net, ALONE)
    rules = rules_of(net, optimizer)
    assert [rules[name] for name in (gate_up, down, router)] == ["muon", "muon", "adamw"]
    moved = {name: start[name] - p for name, p in train(net, optimizer, 1).items()}
    coefficients = coefficients_of("polar_express", 5)
    for name, shape in ((gate_up, (6, 24, 32)), (down, (3, 32, 24))):
        update = gradient(name, 0, moved[name].shape).view(shape)
        for i in range(len(update)):
            wanted = _orthogonalized(update[i], coefficients) * math.sqrt(shape[1] / shape[2])
            assert torch.allclose(moved[name].view(shape)[i], wanted, atol=1e-3)
    together = _orthogonalized(gradient(gate_up, 0, (3, 48, 32))[0], coefficients) * math.sqrt(48 / 32)
    assert (moved[gate_up][0] - together).norm() > 0.1 * together.norm(), "control"


def _orthogonalized(matrix: torch.Tensor, coefficients: Any) -> torch.Tensor:
    """Newton-Schulz steps in fp64, also for a tall matrix."""
    x = matrix.double() / matrix.double().norm()
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


@pytest.mark.parametrize("split_heads", [False, True], ids=["experts", "heads"])
def test_normalised_rows_keep_the_norm_of_each_matrix_that_is_orthogonalised(split_heads: bool) -> None:
    """A norm for the whole parameter, the control, would move size between an expert's gate and up, or
    between heads."""
    experts = {"n_experts": 3, "n_experts_per_token": 2, "moe_hidden_dim": 24, "n_heads": 4, "head_dim": 8}
    net = Qwen3MoE(flavor="debug", overrides={"dim": 32, "n_layers": 1, **experts}).build()
    name = Q if split_heads else "model.layers.0.mlp.experts.gate_up_proj"
    start = torch.nn.init.normal_(net.get_parameter(name), std=0.02).detach().clone()
    num, m = (4, 8) if split_heads else (6, 24)
    config = Muon(lr=1.0, weight_decay=0.0, adjust_lr_fn="original", normalize="neuron", beta2=0.9)
    config = dataclasses.replace(config, split_heads=split_heads, momentum=0.0)
    optimizer, mean = config.build(net, ALONE), torch.zeros(num, m, 1, dtype=torch.float64)
    separate, joint = torch.zeros_like(start), torch.zeros_like(start)
    for step in range(3):
        matrices = gradient(name, step, start.shape).view(num, m, 32)
        update = torch.stack([_orthogonalized(x, coefficients_of("polar_express", 5)) for x in matrices])
        mean = 0.9 * mean + 0.1 * update.double().square().mean(-1, keepdim=True)
        scaled = update / mean.sqrt()
        separate -= (scaled * (update.norm(dim=(-2, -1)) / scaled.norm(dim=(-2, -1)))[:, None, None]).view_as(
            start
        )
        update, scaled = update.view_as(start), scaled.view_as(start)
        norms = [x.norm(dim=(-2, -1), keepdim=True) for x in (update, scaled)]
        joint -= scaled * norms[0] / norms[1]
    moved = train(net, optimizer, 3)[name] - start
    assert (moved - separate).norm() < 1e-3 * separate.norm()
    assert (moved - joint).norm() > 1e-2 * joint.norm(), "control"


@pytest.mark.parametrize("name", [DOWN, "model.layers.0.mlp.gate_proj.weight"], ids=["wide", "tall"])
def test_rows_are_equalised_before_the_iteration_and_the_norm_is_set_after_it(name: str) -> None:
    """The rows are the parameter's, also of a tall one, whose transpose is orthogonalised."""
    coefficients = coefficients_of("polar_express", 5)
    shape = model_of().get_parameter(name).shape
    grad = (gradient(name, 0, shape) * torch.logspace(-3, 0, shape[0])[:, None]).double()
    rows = grad.norm(dim=1, keepdim=True)
    equal = grad / rows * rows.square().mean().sqrt()
    wanted = {}
    for key, matrix in (("none", grad), ("equalize_rows", equal), ("exact_norm", grad)):
        update = _orthogonalized(matrix.T if shape[0] > shape[1] else matrix, coefficients)
        wanted[key] = update.T if shape[0] > shape[1] else update
    wanted["exact_norm"] = wanted["none"] * math.sqrt(min(shape)) / wanted["none"].norm()
    for key, update in wanted.items():
        net = model_of()
        config = Muon(lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="original")
        config = dataclasses.replace(config, **({} if key == "none" else {key: True}))
        optimizer, before = config.build(net, ALONE), net.get_parameter(name).detach().clone()
        for n, p in net.named_parameters():
            p.grad = grad.float() if n == name else torch.zeros_like(p)
        optimizer.step()
        moved = (before - net.get_parameter(name).detach()) / lr_scale("original", *shape)
        assert (moved - update).norm() < 1e-3 * update.norm()
        if key != "none":
            assert (moved - wanted["none"]).norm() > 0.01 * update.norm(), "control"


def test_rates_follow_rule_and_group() -> None:
    net = model_of()
    config = Muon(
        lr=0.02, adamw_lr_multiplier=0.1, param_groups=[ParamGroup(pattern=HEAD, lr_multiplier=0.5)]
    )
    optimizer = config.build(net, ALONE)
    set_lr(optimizer, 0.5)
    names = {p: name for name, p in net.named_parameters()}
    rates = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert (rates[Q], rates["model.norm.weight"]) == (pytest.approx(0.01), pytest.approx(0.001))
    assert rates[HEAD] == pytest.approx(0.0005)
    lines = config.describe(net)
    assert any(
        line.startswith("muon: 14 tensors of 18,432 parameters, peak learning rate 0.02") for line in lines
    ), lines
    assert any(line.startswith(f"adamw, {HEAD}: 1 tensor ") for line in lines), lines


def test_a_skipped_step_changes_no_bit_even_with_nan() -> None:
    net = model_of()
    optimizer = Muon(lr=0.01, normalize="neuron").build(net, ALONE)
    train(net, optimizer, 2)

    def snapshot() -> list[torch.Tensor]:
        state = [t for s in optimizer.state.values() for t in s.values()]
        return [t.detach().clone() for t in (*net.parameters(), *state)]

    before = snapshot()
    for p in net.parameters():
        p.grad = torch.full_like(p, math.nan)
    guarded_step(optimizer, torch.tensor(False), torch.tensor(2.0))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot()))
    for name, p in net.named_parameters():
        p.grad = gradient(name, 2, p.shape)
    guarded_step(optimizer, torch.tensor(True), torch.tensor(2.0))
    assert not any(torch.equal(a, b) for a, b in zip(before, snapshot()))


def test_gradients_are_divided_for_both_rules() -> None:
    halved, whole = model_of(), model_of()
    for net, factor in ((halved, 2.0), (whole, 1.0)):
        optimizer = Muon(lr=0.01).build(net, ALONE)
        for step in range(2):
            for name, p in net.named_parameters():
                p.grad = factor * gradient(name, step, p.shape)
            guarded_step(optimizer, torch.tensor(True), torch.tensor(factor))
    assert all(torch.equal(a, b) for a, b in zip(halved.parameters(), whole.parameters()))


def test_state_exists_before_the_first_step_and_missing_gradients_are_zeros() -> None:
    net = model_of()
    optimizer = Muon().build(net, ALONE)
    assert optimizer.state[net.get_parameter(Q)].keys() == {"momentum_buffer"}
    before = net.get_parameter(DOWN).detach().clone()
    net.get_parameter(Q).grad = gradient(Q, 0, torch.Size([32, 32]))
    optimizer.step()
    assert torch.equal(net.get_parameter(DOWN), before * (1 - 3e-4 * 0.1))
    make_state(optimizer)
    assert optimizer.state[net.get_parameter(HEAD)].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_heads_are_orthogonalised_separately() -> None:
    net = model_of()
    optimizer = Muon(lr=1.0, weight_decay=0.0, split_heads=True, adjust_lr_fn="original").build(net, ALONE)
    before = net.get_parameter(Q).detach().clone()
    update = before - train(net, optimizer, 1)[Q]
    for head in update.view(4, 8, 32):
        rows = head / lr_scale("original", 8, 32)
        assert torch.allclose(rows @ rows.T, torch.eye(8), atol=0.4)
    together = model_of()
    before = together.get_parameter(Q).detach().clone()
    config = Muon(lr=1.0, weight_decay=0.0, adjust_lr_fn="original")
    assert not torch.allclose(before - train(together, config.build(together, ALONE), 1)[Q], update, atol=0.1)


def test_normalised_rows_have_equal_sizes_and_the_norm_of_the_matrix_stays() -> None:
    updates = {}
    for normalize in ("none", "neuron"):
        net = model_of()
        config = Muon(lr=1.0, weight_decay=0.0, normalize=normalize, adjust_lr_fn="original")
        before = net.get_parameter(DOWN).detach().clone()
        updates[normalize] = before - train(net, config.build(net, ALONE), 1)[DOWN]
    rows = {name: update.norm(dim=-1) for name, update in updates.items()}
    assert rows["neuron"].std() < 1e-3 * rows["neuron"].mean() < rows["none"].std()
    assert updates["neuron"].norm() == pytest.approx(updates["none"].norm().item(), rel=1e-4)


def test_cautious_weights_decay_only_where_the_update_shrinks_them() -> None:
    moved = {}
    for key, decay, cautious in (("none", 0.0, False), ("all", 0.5, False), ("cautious", 0.5, True)):
        net = model_of()
        before = net.get_parameter(DOWN).detach().clone()
        config = Muon(lr=0.1, weight_decay=decay, cautious_weight_decay=cautious)
        moved[key] = train(net, config.build(net, ALONE), 1)[DOWN] - before
    shrinks = moved["none"] * before <= 0
    assert 0.2 < shrinks.float().mean() < 0.8
    assert torch.equal(moved["cautious"][shrinks], moved["all"][shrinks])
    assert torch.equal(moved["cautious"][~shrinks], moved["none"][~shrinks])


def test_batches_have_one_shape_of_one_block() -> None:
    net = model_of()
    optimizer = Muon().build(net, ALONE)
    assert isinstance(optimizer, MuonOptimizer)
    shapes = [
        sorted({tuple(sorted(p)) for p in [optimizer._matrices[i].parameter.shape for i in batch]})
        for batch in batches_of(optimizer._matrices)
    ]
    assert len(shapes) == 6
    assert all(len(one) == 1 for one in shapes)
    assert sorted(i for batch in optimizer.batches for i in batch) == list(range(14))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"momentum": 1.0}, "1.0 is not in"),
        ({"ns_steps": 0}, "0 is below 1"),
        ({"adamw_lr_multiplier": -1.0}, "not a finite number"),
        ({"param_groups": [ParamGroup(pattern="*", rule="adam")]}, "unknown rule 'adam'.*adamw"),
    ],
)
def test_wrong_values_are_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Muon(**keys)


def test_a_vector_cannot_have_muons_rule() -> None:
    config = Muon(param_groups=[ParamGroup(pattern="model.norm.weight", rule="muon")])
    with pytest.raises(ConfigError, match=r"model.norm.weight has the shape \[32\]: the rule muon"):
        config.check(model_of())
    with pytest.raises(ConfigError, match="orthogonalise the matrices on the CPU"):
        Muon().check_cpu_offload()


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_a_state_dict_of_another_optimizer_is_loaded(state_dtype: Any) -> None:
    config = Muon(lr=0.01, state_dtype=state_dtype)
    net, other = model_of(dim=64), model_of(dim=64)
    optimizer = config.build(net, ALONE)
    train(net, optimizer, 2)
    loaded = config.build(other, ALONE)
    other.load_state_dict(net.state_dict())
    set_lr(optimizer, 0.5)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = [
        [(t, t.dtype) for s in one.state_dict()["state"].values() for _, t in sorted(s.items())]
        for one in (optimizer, loaded)
    ]
    assert len(states[0]) == len(states[1]) > 14
    assert all(dtype == wanted and torch.equal(t, u) for (t, dtype), (u, wanted) in zip(*states))
    set_lr(loaded, 0.25)  # of both rules
    set_lr(optimizer, 0.25)
    before = {name: p.clone() for name, p in net.named_parameters()}
    moved, again = train(net, optimizer, 1), train(other, loaded, 1)
    assert all(torch.equal(again[name], p) and not torch.equal(p, before[name]) for name, p in moved.items())


def num_compilations(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of graphs that torch.compile makes for two steps, if it compiles on the CPU as on CUDA."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(function: Any, device: torch.device) -> Any:
        return torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

    torch._dynamo.reset()
    monkeypatch.setattr(muon_optimizer, "_compiled", compiled)
    net = model_of()
    train(net, Muon(lr=0.01).build(net, ALONE), 2)
    return len(graphs)


@pytest.mark.full
def test_each_kernel_is_compiled_once_for_matrices_of_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_compilations(monkeypatch) == 2
    monkeypatch.setattr(muon_optimizer, "_flat", lambda tensor: tensor.view(-1))
    assert num_compilations(monkeypatch) > 2  # a view's base has a shape, which the compiler looks at
