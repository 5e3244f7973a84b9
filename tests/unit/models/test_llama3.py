"""The decoder of Llama 3: positions, masks, the loss, a missing embedding or head, and overrides of flavors.
test_hugging_face.py compares it with Hugging Face's."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from titanlite.config.component import ConfigError
from titanlite.losses import cross_entropy
from titanlite.models.base import Decoder
from titanlite.models.layers import RMSNorm, RopeScaling, rope_tables
from titanlite.models.llama3 import FLAVORS, Llama3

SHAPE = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 16,
    "hidden_dim": 96,
    "vocab_size": 300,
}


def build(**overrides: object) -> tuple[Llama3, Decoder]:
    family = Llama3(flavor="debug", overrides={**SHAPE, **overrides})
    net = family.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + (p.ndim == 1))
    return family, net


def test_rope_scaling_matters() -> None:
    positions = torch.arange(200)
    plain = rope_tables(positions, 16, 1e4, RopeScaling())[0]
    scaled = rope_tables(positions, 16, 1e4, RopeScaling(8.0, 1.0, 4.0, 64))[0]
    assert (plain - scaled).abs().max() > 0.1


def test_positions_shift_the_rotation() -> None:
    _, net = build()
    tokens = torch.randint(0, 300, (1, 10))
    with torch.no_grad():
        assert torch.allclose(net(tokens), net(tokens, positions=torch.arange(10)))
        shifted = net(tokens, positions=torch.arange(10)[None] + 5)  # rotary positions are relative
        stretched = net(tokens, positions=torch.arange(10)[None] * 3)
        assert torch.allclose(net(tokens), shifted, atol=1e-4)
        assert not torch.allclose(net(tokens), stretched, atol=1e-2)


def test_no_token_attends_to_later_tokens() -> None:
    _, net = build()
    tokens = torch.randint(0, 300, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 300
    with torch.no_grad():
        a, b = net(tokens), net(changed)
    assert torch.equal(a[:, :12], b[:, :12])
    assert not torch.allclose(a[:, 12:], b[:, 12:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_in_the_forward_is_fp32_cross_entropy(dtype: torch.dtype) -> None:
    _, net = build()
    net.to(dtype)
    tokens = torch.randint(0, 300, (2, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :7] = -100
    with torch.no_grad():
        loss = net(inputs, head_fn=partial(cross_entropy, targets_BT=targets))
        log_p = torch.log_softmax(net(inputs).double(), dim=-1)
    counted = targets != -100
    wanted = -log_p[counted].gather(-1, targets[counted][:, None]).sum()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_rms_norm_is_computed_in_fp32() -> None:
    x = torch.randn(4, 4096, dtype=torch.float64) * 100
    norm = RMSNorm(4096, 1e-5)
    torch.nn.init.ones_(norm.weight)
    wanted = x.bfloat16().double()
    wanted = wanted * torch.rsqrt(wanted.pow(2).mean(-1, keepdim=True) + 1e-5)
    out = norm.to(torch.bfloat16)(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted.to(torch.bfloat16)) or (out.double() - wanted).abs().max() < 0.02


def test_flavors_are_not_shared_state() -> None:
    Llama3(flavor="debug", overrides={"n_layers": 1})
    assert FLAVORS["debug"].n_layers == 4
    assert Llama3(flavor="debug").config.n_layers == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_layer": 2}, "unknown field 'n_layer'; did you mean 'n_layers'?"),
        ({"n_layers": "2"}, "expected int, got '2'"),
        ({"n_layers": True}, "expected int, got True"),
        ({"n_kv_heads": 3}, "not a multiple"),
        ({"head_dim": 15}, "odd"),
    ],
)
def test_wrong_overrides_are_named(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        Llama3(flavor="debug", overrides=overrides)


def test_a_tokenizer_that_does_not_fit_is_refused() -> None:
    family = Llama3(flavor="debug")
    family.check_vocabulary(8192)
    with pytest.raises(ConfigError, match="has 8193 ids"):
        family.check_vocabulary(8193)


def test_stages_without_embedding_or_head_pass_hidden_states() -> None:
    _, net = build(tie_word_embeddings=False)
    tokens = torch.randint(0, 300, (1, 12))
    with torch.no_grad():
        whole = net(tokens)
        _, first = build(tie_word_embeddings=False)
        _, last = build(tie_word_embeddings=False)
        first.model.norm = first.lm_head = last.model.embed_tokens = None
        del first.model.layers["1"], last.model.layers["0"]
        assert torch.allclose(last(first(tokens)), whole, atol=1e-6)
        assert {n for n, _ in [*first.named_parameters(), *last.named_parameters()]} == dict(
            net.named_parameters()
        ).keys()


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_a_role(tied: bool) -> None:
    _, net = build(tie_word_embeddings=tied)
    by_role: dict[str, set[str]] = {}
    for name, _ in net.named_parameters():
        by_role.setdefault(net.parameter_role(name), set()).add(name.removeprefix("model.layers.0."))
    assert by_role["embedding"] == {"model.embed_tokens.weight"}
    assert by_role.get("head", set()) == (set() if tied else {"lm_head.weight"})
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight"} < by_role["matrix"]
    assert {"input_layernorm.weight", "model.norm.weight"} < by_role["norm"]
    assert by_role.keys() <= {"embedding", "head", "matrix", "norm"}
