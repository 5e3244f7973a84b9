"""The scales of the decoder: each multiplies what it is named after, in Hugging Face's form they are folded
into the weights, and with 1 they run no kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import SHAPE, family, hugging_face, random_net, row
from titanlite.attention.base import Attention
from titanlite.attention.sdpa import CAUSAL
from titanlite.generate import CachedLogits
from titanlite.models.base import Decoder

SCALES = {"residual_scale": 0.3, "attention_scale": 1.7, "logit_scale": 0.6}
FAMILIES = [
    ("llama3", True),
    ("llama3", False),
    ("qwen3", True),
    ("qwen3", False),
    ("qwen2", True),
    ("gemma3", True),
    ("olmo3", False),
]


def net_of(name: str = "llama3", tied: bool = True, **overrides: Any) -> Decoder:
    """A random model in fp64."""
    return random_net(family(name, tie_word_embeddings=tied, **overrides)).double()


class Recorded(Attention):
    """Causal attention that keeps the queries, and multiplies the scores by `scale`."""

    def __init__(self, scale: float = 1.0):
        self.scale, self.queries = scale, list[torch.Tensor]()

    def attend(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor) -> torch.Tensor:
        self.queries.append(q_BTHE)
        return CAUSAL.attend(q_BTHE * self.scale, k_BTKE, v_BTKE)


@torch.no_grad()
def test_logit_scale_multiplies_the_logits() -> None:
    for tied in (True, False):
        plain, scaled = net_of(tied=tied)(row()), net_of(tied=tied, logit_scale=0.25)(row())
        assert torch.equal(scaled, plain * 0.25), "a power of two is exact"


@torch.no_grad()
def test_attention_scale_multiplies_the_scores() -> None:
    for name in ("llama3", "qwen3"):
        wanted = net_of(name)(row(), attention=Recorded(1.7))
        actual = net_of(name, attention_scale=1.7)(row())
        assert torch.allclose(actual, wanted, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(actual, net_of(name)(row()), rtol=1e-3)


@torch.no_grad()
def test_residual_scale_multiplies_what_attention_and_mlp_add() -> None:
    block = net_of(residual_scale=0.3).blocks()["0"]
    x = torch.randn(1, 5, SHAPE["dim"], dtype=torch.float64)
    cos = sin = torch.ones(5, SHAPE["head_dim"])
    attended = x + 0.3 * block.self_attn(block.input_layernorm(x), cos, sin, CAUSAL)
    wanted = attended + 0.3 * block.mlp(block.post_attention_layernorm(attended))
    assert torch.allclose(block(x, cos, sin, CAUSAL), wanted, rtol=1e-12)


@pytest.mark.parametrize(("name", "tied"), FAMILIES)
@torch.no_grad()
def test_folded_scales_make_a_plain_model(name: str, tied: bool) -> None:
    scaled, plain = net_of(name, tied, **SCALES), net_of(name, tied)
    for key, weight in plain.named_parameters():
        weight.mul_(scaled.export_factor(key)).add_(scaled.export_offset(key))
        assert (plain.export_factor(key), plain.export_offset(key)) == (1.0, 0.0)
    assert torch.allclose(plain(row()), scaled(row()), rtol=1e-4, atol=1e-6)
    for left_out in SCALES:
        other = net_of(name, tied, **{**SCALES, left_out: 1.0})
        assert not torch.allclose(other(row()), scaled(row()), rtol=1e-2), left_out


@pytest.mark.parametrize(("name", "tied"), FAMILIES)
@torch.no_grad()
def test_transformers_computes_the_same_logits(name: str, tied: bool) -> None:
    pytest.importorskip("transformers")
    component = family(name, tie_word_embeddings=tied, **SCALES)
    net, theirs = random_net(component), hugging_face(component)
    for key, weight in theirs.named_parameters():
        weight.mul_(net.export_factor(key)).add_(net.export_offset(key))
    assert (net(row()) - theirs(row()).logits).abs().max() < 1e-4


class CountKernels(TorchDispatchMode):
    """Counts the operators that run."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_scales_of_1_run_no_kernel() -> None:
    def num_kernels(**scales: float) -> int:
        with CountKernels() as counter:
            random_net(family(**scales))(row())
        return counter.num

    plain, layers = num_kernels(), SHAPE["n_layers"]
    assert num_kernels(residual_scale=0.5) == plain, "the addition multiplies"
    assert num_kernels(attention_scale=0.5) == plain + 2 * layers, "two rotary tables per block"
    assert num_kernels(logit_scale=0.5) == plain + 1, "the weight of the final norm"


@torch.no_grad()
def test_the_cache_of_generation_has_the_scales() -> None:
    net, ids = random_net(family(**SCALES)), row(12)[0].tolist()
    next_logits = CachedLogits(net, len(ids), torch.device("cpu"))
    for length in (7, 8, 12):
        wanted = net(torch.tensor([ids[:length]]))[0, -1]
        assert torch.allclose(next_logits(ids[:length]), wanted, atol=1e-5)


def test_initial_standard_deviations() -> None:
    layers = math.sqrt(2 * SHAPE["n_layers"])
    for overrides, matrix, residual in (
        ({}, 0.02, 0.02 / layers),
        ({"matrix_init_std": 0.01}, 0.01, 0.01 / layers),
        ({"matrix_init_std": 0.01, "depth_scaled_init": False}, 0.01, 0.01),
    ):
        net = family(tie_word_embeddings=False, **overrides).build()
        stds = {name: net.init_normal(name) for name, _ in net.named_parameters()}
        assert stds["model.embed_tokens.weight"] == stds["lm_head.weight"] == (0.0, 0.02)
        assert stds["model.layers.1.self_attn.q_proj.weight"] == (0.0, matrix)
        assert stds["model.layers.1.mlp.up_proj.weight"] == (0.0, matrix)
        assert stds["model.layers.1.self_attn.o_proj.weight"] == (0.0, residual)
        assert stds["model.layers.1.mlp.down_proj.weight"] == (0.0, residual)
        assert stds["model.norm.weight"] == (1.0, 0.0)
