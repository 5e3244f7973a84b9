"""The family gpt: each of its parts, on and off, equals a plain calculation in fp64; smearing stays within
documents and works token by token; sizes follow from the depth."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from titanlite.attention.sdpa import SDPA
from titanlite.config.component import ConfigError
from titanlite.generate import CachedLogits
from titanlite.models.base import Decoder
from titanlite.models.gpt import FLAVORS, Gpt, GptConfig

SHAPE: dict[str, Any] = {
    "dim": 48, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "hidden_dim": 96,
    "vocab_size": 60, "sliding_window": 4, "layer_pattern": "SSL",
}  # fmt: skip
T = 12
PARTS: dict[str, dict[str, Any]] = {
    "all parts": {},
    "norms of heads": {"norms_heads": False},
    "squared ReLU": {"has_squared_relu": False},
    "residual scalars": {"residual_scalars": False},
    "value embeddings": {"value_embedding_interval": 0},
    "value embeddings in every third block": {"value_embedding_interval": 3, "value_gate_dims": 5},
    "soft cap": {"logit_softcap": 0.0},
    "smear": {"smear": False},
    "backout": {"backout": False},
    "attention scale": {"attention_scale": 1.0},
}


def random_net(**overrides: Any) -> Decoder:
    """A model in fp64 with weights large enough that mistakes show."""
    net, generator = Gpt(flavor="debug", overrides=SHAPE | overrides).build().double(), torch.Generator()
    generator.manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            mean = 0.7 if p.ndim == 1 else 0.0
            p.copy_(mean + 0.4 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return net


def tokens(length: int = T) -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1))


def reference(net: Decoder, ids: list[int]) -> torch.Tensor:
    """The logits [T, V] of one sequence, by the formulas, token by token and head by head."""
    c, w = net.config, {name: p.detach() for name, p in net.named_parameters()}

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + c.norm_eps).sqrt()

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        half = c.head_dim // 2
        angles = position / c.rope_theta ** (torch.arange(half).double() * 2 / c.head_dim)
        turn = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turn.real, turn.imag))

    embedded = [norm(w["model.embed_tokens.weight"][i]) for i in ids]
    if c.smear:
        gates = [w["model.smear.scale"] * torch.sigmoid(x[:24] @ w["model.smear.gate"]) for x in embedded]
        embedded = [embedded[0]] + [embedded[t] + gates[t] * embedded[t - 1] for t in range(1, len(ids))]
    stream, middle = list(embedded), list(embedded)
    for block in range(c.n_layers):
        b = f"model.layers.{block}."
        if c.residual_scalars:
            a, e = w[b + "residual_mix.residual"], w[b + "residual_mix.embedding"]
            stream = [a * x + e * x0 for x, x0 in zip(stream, embedded)]
        inputs = [norm(x) for x in stream]
        projected = {
            name: [(w[f"{b}self_attn.{name}_proj.weight"] @ x).view(-1, c.head_dim) for x in inputs]
            for name in "qkv"
        }
        interval = c.value_embedding_interval
        if interval and (c.n_layers - 1 - block) % interval == 0:
            for t, (x, token) in enumerate(zip(inputs, ids)):
                gate = 3 * torch.sigmoid(w[b + "self_attn.value_gate.weight"] @ x[: c.value_gate_dims])
                table = w[b + "self_attn.value_embedding.weight"][token].view(-1, c.head_dim)
                projected["v"][t] = projected["v"][t] + gate[:, None] * table
        for name in "qk" if c.norms_heads else "":
            projected[name] = [torch.stack([norm(head) for head in x]) for x in projected[name]]
        window = T if "SSL"[block % 3] == "L" else c.sliding_window
        for t in range(len(ids)):
            out = []
            for head in range(c.n_heads):
                seen = range(max(t - window + 1, 0), t + 1)
                group = head * c.n_kv_heads // c.n_heads
                q = rotated(projected["q"][t][head], t)
                scores = torch.stack([q @ rotated(projected["k"][s][group], s) for s in seen])
                share = torch.softmax(c.attention_scale * scores / math.sqrt(c.head_dim), 0)
                out.append(sum(p * projected["v"][s][group] for p, s in zip(share, seen)))
            stream[t] = stream[t] + w[b + "self_attn.o_proj.weight"] @ torch.cat(out)
            x = norm(stream[t])
            up = w[b + "mlp.up_proj.weight"] @ x
            hidden = (
                up.clamp(min=0) ** 2 if c.has_squared_relu else F.silu(w[b + "mlp.gate_proj.weight"] @ x) * up
            )
            stream[t] = stream[t] + w[b + "mlp.down_proj.weight"] @ hidden
        if block == c.n_layers // 2:
            middle = list(stream)
    if c.backout:
        stream = [x - w["model.backout.scale"] * y for x, y in zip(stream, middle)]
    logits = torch.stack([w["lm_head.weight"] @ norm(x) for x in stream])
    return c.logit_softcap * torch.tanh(logits / c.logit_softcap) if c.logit_softcap else logits


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that compute in fp32 compute in fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_its_formula(part: str) -> None:
    net = random_net(**PARTS[part])
    actual = net(tokens(), None, SDPA().for_sequences(tokens()))
    wanted = torch.stack([reference(net, row) for row in tokens().tolist()])
    assert (actual - wanted).abs().max() < 1e-6 * wanted.abs().max()  # rotary tables are in fp32
    if part != "all parts":  # control: the part is in the formula
        whole = random_net()
        shapes = {name: p.shape for name, p in whole.named_parameters()}
        same = {name: p for name, p in net.named_parameters() if p.shape == shapes.get(name)}
        whole.load_state_dict(same, strict=False)
        assert (whole(tokens()) - wanted).abs().max() > 1e-3 * wanted.abs().max()


@pytest.mark.usefixtures("doubles")
def test_smearing_stays_within_documents() -> None:
    net, ids = random_net(), tokens()[:1]
    positions = torch.tensor([[*range(5), *range(T - 5)]])
    packed = net(ids, positions, SDPA().for_documents(positions, 2))
    alone = torch.cat([net(part) for part in ids.split((5, T - 5), 1)], 1)
    assert (packed - alone).abs().max() < 1e-9
    positions = torch.arange(T)[None]
    assert (net(ids, positions)[:, 5] - alone[:, 5]).abs().max() > 1e-3, "control"


def test_a_cache_changes_no_logit() -> None:
    net = random_net().float().requires_grad_(False)
    ids = tokens(20)[0].tolist()
    cached = CachedLogits(net, 20, torch.device("cpu"))
    for length in (7, 8, 9, 13, 20):
        whole = net(torch.tensor([ids[:length]]))[0, -1]
        assert torch.allclose(cached(ids[:length]), whole, atol=1e-5)
    assert whole.abs().max() <= 15.0


def test_sizes_follow_from_the_depth() -> None:
    def sizes(name: str) -> tuple[int, ...]:
        c: GptConfig = FLAVORS[name]
        return c.n_layers, c.dim, c.n_heads, c.head_dim, c.hidden_dim

    assert sizes("d8") == (8, 512, 4, 128, 2048)
    assert sizes("d12") == (12, 768, 6, 128, 3072)
    assert sizes("d26") == (26, 1664, 13, 128, 6656)
    assert FLAVORS["d26"].layer_letters == "SSSL" * 6 + "SL"
    net = Gpt(flavor="d12").build_on_meta()
    # The matrices of the blocks and the head, by which nanochat scales its runs, and 50 other numbers.
    assert net.num_matmul_parameters() == 12 * 12 * 768**2 + 6 * 6 * 12 + 32768 * 768 + 50
    tables = [name for name, _ in net.named_parameters() if name.endswith("value_embedding.weight")]
    assert [name.split(".")[2] for name in tables] == ["1", "3", "5", "7", "9", "11"]
    assert {net.parameter_role(name) for name in tables} == {"embedding"}


def test_initial_values() -> None:
    net = Gpt(flavor="d8").build_on_meta()
    assert net.init_normal("model.layers.0.self_attn.q_proj.weight") == (0.0, 512**-0.5)
    assert net.init_normal("model.layers.3.mlp.up_proj.weight") == (0.0, pytest.approx(0.4 * 512**-0.5))
    assert net.init_normal("model.layers.3.mlp.down_proj.weight") == (0.0, 0.0)
    assert net.init_normal("model.layers.0.residual_mix.residual") == (1.15, 0.0)
    assert net.init_normal("model.layers.7.residual_mix.residual") == (pytest.approx(1.05), 0.0)
    assert net.init_normal("model.layers.7.residual_mix.embedding") == (pytest.approx(0.05), 0.0)
    assert net.init_normal("lm_head.weight") == (0.0, 0.001)
    other = Gpt(flavor="d8", overrides={"zero_init": False}).build_on_meta()
    assert other.init_normal("model.layers.3.mlp.down_proj.weight") == (0.0, 512**-0.5)
    # Where training began does not matter for a checkpoint.
    assert Gpt(flavor="d8").config.architecture_fields() == other.config.architecture_fields()


def test_pipeline_parallel_is_refused_for_parts_that_connect_stages() -> None:
    with pytest.raises(
        ConfigError, match="residual_scalars needs tensors of other pipeline stages; set it off"
    ):
        Gpt(flavor="d8").check_pipeline_parallel(2)
    off = {"residual_scalars": False, "value_embedding_interval": 0, "smear": False, "backout": False}
    Gpt(flavor="d8", overrides=off).check_pipeline_parallel(2)


def test_too_narrow_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="smear reads the first 24 features; dim = 16 is below"):
        Gpt(flavor="debug", overrides={"dim": 16})
