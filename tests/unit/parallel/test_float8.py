"""Emulated float8: which layers are converted, which settings are refused, and that the precision is that of
8 bits."""

from __future__ import annotations

import logging
import math
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torchao.float8.float8_linear import Float8Linear

from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.losses import cross_entropy
from titanlite.models.base import Decoder
from titanlite.models.gpt_oss import GptOss
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.parallel.compile import Compile, apply_compile
from titanlite.parallel.float8 import Float8, apply_float8, grouped_mm_by_rows

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 64}
SHAPE |= {"vocab_size": 99}
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def build(**changes: int) -> Decoder:
    net = Llama3(flavor="debug", overrides={**SHAPE, **changes}).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return net


def gradients(net: Decoder) -> torch.Tensor:
    """The gradients of the blocks' matrices as one vector."""
    tokens = torch.arange(32).reshape(2, 16)
    net(tokens, head_fn=partial(cross_entropy, targets_BT=tokens)).backward()
    return torch.cat([p.grad.flatten() for name, p in net.named_parameters() if "_proj" in name])


def swapped(net: Decoder) -> set[str]:
    return {name for name, module in net.named_modules() if isinstance(module, Float8Linear)}


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *((recipe, None) for recipe in RECIPES),
        full("tensorwise", "aot_eager"),
        full("tensorwise", "inductor"),
    ],
)
def test_gradients_are_those_of_the_model_up_to_8_bits(recipe: str, backend: str | None) -> None:
    exact = gradients(build())
    torch.compiler.reset()
    net = build()
    names = [name for name, _ in net.named_parameters()]
    apply_float8(net, Float8(enable=True, recipe=recipe, emulate=True), sharded=False)
    apply_compile(net, Compile(enable=backend is not None, backend=backend or "inductor"))
    assert [name for name, _ in net.named_parameters()] == names
    error = (gradients(net) - exact).norm() / exact.norm()
    assert 0.01 < error < 0.2, "8 bits are not exact: a smaller error would say that they are not used"


def test_the_recipes_differ_in_precision() -> None:
    exact, errors = gradients(build()), {}
    for recipe in RECIPES:
        net = build()
        apply_float8(net, Float8(enable=True, recipe=recipe, emulate=True), sharded=False)
        errors[recipe] = (gradients(net) - exact).norm().item()
    assert errors["rowwise_with_gw_hp"] < errors["rowwise"] < errors["tensorwise"]


def test_all_layers_of_the_blocks_and_nothing_else() -> None:
    net = build(tie_word_embeddings=False)
    apply_float8(net, Float8(enable=True, emulate=True), sharded=False)
    linear = {name for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    assert swapped(net) == linear - {"lm_head"}
    assert len(swapped(net)) == 14


def test_off_is_off() -> None:
    net = build()
    apply_float8(net, Float8(), sharded=False)
    assert not swapped(net)


def test_layers_are_left_out_by_name_and_by_size_and_named(caplog: pytest.LogCaptureFixture) -> None:
    net = build()
    config = Float8(enable=True, emulate=True, filter_fqns=["layers.0.mlp"], min_elements=1024)
    with caplog.at_level(logging.INFO, logger="titanlite"):
        apply_float8(net, config, sharded=False)
    left = {f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "kv"}  # 16 x 32
    left |= {f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")}
    assert not swapped(net) & left
    assert len(swapped(net)) == 14 - len(left)
    assert caplog.messages[-1] == (
        "float8 tensorwise: 7 layers; not converted: 1 x mlp.down_proj, 1 x mlp.gate_proj, 1 x mlp.up_proj, "
        "2 x self_attn.k_proj, 2 x self_attn.v_proj and the head"
    )


def test_a_filter_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'wq' is in no layer's name; the layers are .* 2 x self_attn\.q_proj"
    ) as e:
        apply_float8(build(), Float8(enable=True, emulate=True, filter_fqns=["wq"]), sharded=False)
    assert e.value.key == "float8.filter_fqns"


def test_dims_that_the_hardware_cannot_take_are_refused_unless_left_out() -> None:
    said = (
        r"layers\.0\.mlp\.gate_proj is 72 x \d+, not multiples of 16; exclude all such layers: "
        r"\[\"down_proj\", \"gate_proj\", \"up_proj\"\]"
    )
    with pytest.raises(ConfigError, match=said) as e:
        apply_float8(build(hidden_dim=72), Float8(enable=True, emulate=True), sharded=False)
    assert e.value.key == "float8.filter_fqns"
    apply_float8(build(hidden_dim=72), Float8(enable=True, emulate=True, filter_fqns=["mlp"]), sharded=False)


def test_a_device_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA device .* 8\.9, this is cpu; float8\.emulate") as e:
        Float8(enable=True).check_device(torch.device("cpu"))
    assert e.value.key == "float8.enable"
    Float8(enable=True, emulate=True).check_device(torch.device("cpu"))
    Float8().check_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    Float8(enable=True).check_device(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"rowwise needs .* 9\.0, this is compute capability 8\.9"):
        Float8(enable=True, recipe="rowwise").check_device(torch.device("cuda"))


def in_float8(values: torch.Tensor) -> torch.Tensor:
    """The values of a row, or of several with a common scale, after rounding to float8, in fp64."""
    scale = 2.0 ** math.floor(math.log2(448 / values.abs().max().item()))
    return (values * scale).to(torch.float8_e4m3fn).double() / scale


def test_products_with_experts_have_a_scale_per_row() -> None:
    """One row is a million times as large as the others. Control: with a common scale they would be lost."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((40, 32), (3, 48, 32)))
    x[5] *= 1e6
    ends = torch.tensor([24, 24, 40], dtype=torch.int32)
    actual = grouped_mm_by_rows(x, weight, ends, emulate=True).double()
    rounded = torch.stack([torch.stack([in_float8(row) for row in matrix]) for matrix in weight])
    groups = [(slice(0, 24), 0), (slice(24, 40), 2)]
    for rows, n in groups:
        wanted = torch.stack([in_float8(row) for row in x[rows]]) @ rounded[n].T
        torch.testing.assert_close(actual[rows], wanted, rtol=5e-3, atol=1e-2)
        exact = x[rows].double() @ weight[n].double().T
        assert ((actual[rows] - exact).norm(dim=1) < 0.06 * exact.norm(dim=1)).all()
    small = torch.arange(24) != 5
    assert (in_float8(x[:24]) - x[:24]).double()[small].norm() > 0.9 * x[:24].double()[small].norm()


@pytest.mark.parametrize("family", [Qwen3MoE, GptOss])
def test_gradients_of_experts_are_those_of_the_model_up_to_8_bits(
    family: type[Qwen3MoE], caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"n_layers": 2, "n_experts": 4, "moe_hidden_dim": 48}

    def results(**keys: bool) -> torch.Tensor:
        torch.manual_seed(0)
        net = family(flavor="debug", overrides=shape).build().to_empty(device="cpu")
        for p in net.parameters():
            nn.init.normal_(p, std=0.1)
        for b in net.buffers():
            b.zero_()
        net.bfloat16()
        apply_float8(net, Float8(emulate=True, filter_fqns=["q_proj"], **keys), sharded=False)
        tokens = torch.arange(32).reshape(2, 16)
        net(tokens, head_fn=partial(cross_entropy, targets_BT=tokens)).backward()
        return torch.cat([p.grad.flatten() for name, p in net.named_parameters() if ".experts." in name])

    others, all_layers = results(enable=True), results(enable=True, experts=True)
    assert "experts, routers, 2 x self_attn.q_proj and the head" in caplog.messages[0]
    assert "6 layers and the experts of 2 blocks; not converted: routers, 2 x" in caplog.messages[1]
    error = ((all_layers - others).norm() / others.norm()).item()
    assert 0.01 < error < 0.3


def test_shapes_and_devices_that_float8_of_experts_lacks_and_models_without_experts_are_refused() -> None:
    config = Float8(enable=True, emulate=True, experts=True)
    with pytest.raises(ConfigError, match="the model has no experts") as e:
        apply_float8(build(), config, sharded=False)
    assert e.value.key == "float8.experts"
    net = Qwen3MoE(flavor="debug", overrides={"moe_hidden_dim": 24}).build()
    with pytest.raises(ConfigError, match="of an expert are 48 x 128 and 128 x 24, not"):
        apply_float8(net, config, sharded=False)
    with pytest.raises(ConfigError, match=r"experts = true needs a CUDA device .* 9\.0, this is cpu") as e:
        Float8(enable=True, experts=True).check_device(torch.device("cpu"))
    assert e.value.key == "float8.experts"


def test_without_torchao_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"pip install 'titanlite\[float8\]'"):
        apply_float8(build(), Float8(enable=True, emulate=True), sharded=False)
