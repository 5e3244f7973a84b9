"""The gated delta net: the chunked rule equals the recurrence and the layer equals transformers', documents
do not see each other, decoding continues where the forward ended, and the FLOPs are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.fla import stand_in_for_fla
from tests.support.tiers import full
from titanlite.attention import gated_delta_rule as module
from titanlite.attention import gated_delta_rule_kernels as kernels
from titanlite.attention.gated_delta_rule import (
    gated_delta_rule,
    l2_normalized,
    recurrent_gated_delta_rule,
    state_flops_per_token,
)
from titanlite.attention.gated_delta_rule_kernels import (
    Documents,
    Rule,
    RuleInputs,
    fla_rule,
    kernel_for,
    torch_rule,
)
from titanlite.attention.linear import CachedLinearAttention, LinearAttention, LinearState
from titanlite.attention.short_convolution import short_convolution
from titanlite.config.component import ConfigError
from titanlite.models.gated_delta_net import GatedDeltaNet

B, K, H, E, V = 2, 2, 4, 8, 6
Tensors = list[torch.Tensor]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(T: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (B, K, H, E, V)) -> Tensors:
    """q, k, v, log decay, beta and an initial state. Some decays forget almost everything."""
    B, K, H, E, V = shape
    shapes = [(B, T, K, E), (B, T, K, E), (B, T, H, V), (B, T, H), (B, T, H), (B, H, E, V)]
    g = generator()
    q, k, v, decay, beta, state = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -decay.exp() * 0.3
    decay[:, ::7] *= 40
    return [x.to(dtype).requires_grad_() for x in (q, k, v, decay, beta.sigmoid(), state)]


def starts_at(T: int, *rows: list[int]) -> torch.Tensor:
    """The first tokens of documents: one list of indices for each sequence."""
    starts = torch.zeros(len(rows), T, dtype=torch.bool)
    for row, indices in zip(starts, rows):
        row[indices] = True
    return starts


def documents_of(starts: torch.Tensor) -> Documents:
    return Documents.of(starts, int(starts.sum()) + len(starts))


def attended(
    layer: GatedDeltaNet, x: torch.Tensor, documents: Documents | None = None, rule: Rule = torch_rule
) -> torch.Tensor:
    """The outputs of the layer for whole sequences or for documents."""
    return layer(x, x, x, LinearAttention(rule, documents))


class Decoding:
    """A layer and its state."""

    def __init__(self, layer: GatedDeltaNet, rule: Rule = torch_rule):
        self.layer, self.cache = layer, CachedLinearAttention()
        self.cache.rule = rule

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.begin_forward()
        return self.layer(x, x, x, self.cache)

    @property
    def state(self) -> LinearState:
        (state,) = self.cache.states
        return state


def results(rule: Callable[..., Any], tensors: Tensors, starts: torch.Tensor | None) -> Tensors:
    """Outputs, final state and the gradients of all inputs."""
    q, k, v, decay, beta, state = tensors
    out, last = rule(q, k, v, decay, beta, state, starts)
    g = generator(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in (out, last))
    return [out, last, *torch.autograd.grad(loss, tensors)]


def largest_error(actual: Tensors, expected: Tensors) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(actual, expected))


CASES = [
    (1, 64, None),
    (50, 16, None),  # no multiple of the chunk
    (48, 16, ([0, 5, 6, 16, 40], [20])),  # starts within chunks, at a chunk, twice in a chunk
    (50, 64, ([], [49])),
    full(200, 64, ([0, 64, 65, 199], [130])),
    full(64, 1, ([3], [0])),
]


@pytest.mark.parametrize(("T", "chunk_size", "documents"), CASES)
def test_chunks_equal_the_recurrence(
    T: int, chunk_size: int, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_SIZE", chunk_size)
    tensors = inputs(T)
    starts = starts_at(T, *documents) if documents else None
    expected = results(recurrent_gated_delta_rule, tensors, starts)
    actual = results(gated_delta_rule, tensors, starts)
    assert largest_error(actual, expected) < 1e-10
    without = [*tensors[:3], tensors[3] * 0.99, *tensors[4:]]
    with torch.no_grad():  # control: slightly less decay
        out, last = gated_delta_rule(*without, starts)
    assert largest_error([out, last], expected[:2]) > 1e-4


def test_the_recurrence_is_the_formula() -> None:
    """The product of matrices of the paper, equation 10, for each token of one head."""
    q, k, v, decay, beta, state = (x.detach() for x in inputs(5, shape=(1, 1, 1, E, V)))
    out, last = recurrent_gated_delta_rule(q, k, v, decay, beta, state)
    S = state[0, 0].T  # the paper's state is [V, E]
    for t in range(5):
        key, value, rate = k[0, t, 0], v[0, t, 0], beta[0, t, 0]
        S = S @ (decay[0, t, 0].exp() * (torch.eye(E) - rate * torch.outer(key, key)))
        S = S + rate * torch.outer(value, key)
        torch.testing.assert_close(out[0, t, 0], S @ q[0, t, 0] / E**0.5, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last[0, 0], S.T, rtol=1e-12, atol=1e-12)


def test_gradients_equal_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_SIZE", 2)
    starts = starts_at(5, [3])

    def normalized_rule(q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> Any:
        return gated_delta_rule(l2_normalized(q), l2_normalized(k), *others, starts)

    assert torch.autograd.gradcheck(normalized_rule, inputs(5, shape=(1, 1, 2, 2, 2)), fast_mode=True)


def test_low_precision_is_computed_in_fp32() -> None:
    """The result of bf16 inputs is the fp32 result of the same values, rounded once."""
    tensors = [x.detach().bfloat16() for x in inputs(40)]
    out, last = gated_delta_rule(*tensors)
    exact, exact_last = gated_delta_rule(*(x.float() for x in tensors))
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, exact.bfloat16())
    assert torch.equal(last, exact_last)


@pytest.mark.parametrize("rule", [gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_bit_of_another_document_reaches_a_token(rule: Callable[..., Any], dtype: torch.dtype) -> None:
    T, document = 150, slice(70, 140)
    starts = starts_at(T, [0, 30, 70, 140], [70, 140])
    outside = torch.ones(T, dtype=torch.bool)
    outside[document] = False

    def of_document(tensors: Tensors, starts: torch.Tensor) -> Tensors:
        q, k, v, decay, beta, state = tensors
        out, _ = rule(q, k, v, decay, beta, state, starts)
        gradients = torch.autograd.grad(out[:, document].square().sum(), tensors)
        assert not any(g[:, outside].any() for g in gradients[:5])
        assert not gradients[5].any()
        return [out[:, document], *(g[:, document] for g in gradients[:5])]

    def changed(tensors: Tensors) -> Tensors:
        """Other values outside of the document."""
        other = [x.detach().clone() for x in tensors]
        for x in other[:5]:
            x[:, outside] = x[:, outside].flip(1) * 0.9
        other[5] *= -3
        return [x.requires_grad_() for x in other]

    tensors = inputs(T, dtype)
    expected = of_document(tensors, starts)
    assert all(torch.equal(a, b) for a, b in zip(of_document(changed(tensors), starts), expected))
    with pytest.raises(AssertionError):  # control: without the start, the state comes through
        of_document(tensors, starts_at(T, [0, 30, 140], [140]))


def convolution_inputs(T: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator()
    return tuple(torch.randn(s, generator=g, dtype=torch.float64) for s in ((2, T, 5), (5, 4)))


def test_the_convolution_equals_torchs_and_stays_within_documents() -> None:
    x, weight = convolution_inputs(12)
    whole = torch.nn.functional.conv1d(x.mT, weight[:, None], padding=3, groups=5)[..., :12].mT
    torch.testing.assert_close(short_convolution(x, weight), torch.nn.functional.silu(whole))
    starts = starts_at(12, [0, 4, 5, 11], [7])
    actual = short_convolution(x, weight, starts)
    for sequence, bounds in enumerate(([0, 4, 5, 11, 12], [0, 7, 12])):
        for begin, end in pairwise(bounds):
            alone = short_convolution(x[sequence, None, begin:end], weight)
            torch.testing.assert_close(actual[sequence, begin:end], alone[0], rtol=1e-13, atol=1e-13)
    assert (actual - short_convolution(x, weight)).abs().max() > 0.1  # control


@pytest.mark.parametrize("sizes", [(5, 7), (1,) * 12, (2, 1, 9)], ids=str)
def test_the_convolution_continues(sizes: tuple[int, ...]) -> None:
    x, weight = convolution_inputs(12)
    cache, outs = CachedLinearAttention(), []
    for part in x.split(sizes, 1):
        cache.begin_forward()
        outs.append(cache.convolve(part, weight))
    whole = short_convolution(x, weight)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-13, atol=1e-13)


def make_layer(dtype: torch.dtype = torch.float32, dim: int = 24) -> GatedDeltaNet:
    layer = GatedDeltaNet(dim, (K, H), (E, V), norm_eps=1e-3)
    g = generator(2)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            mean, std = (0.0, 0.2) if name == "A_log" else (1.0, 0.2)
            if p.ndim > 1:
                mean, std = 0.0, 0.5 if name == "conv1d.weight" else 0.15
            p.copy_(torch.randn(p.shape, generator=g) * std + mean)
    return layer.to(dtype)


def hidden(T: int, dtype: torch.dtype = torch.float32, dim: int = 24) -> torch.Tensor:
    return torch.randn(B, T, dim, generator=generator(3), dtype=torch.float64).to(dtype)


class _DoubleTorch:
    """The module torch, in which float32 means float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def transformers_layer(layer: GatedDeltaNet, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """transformers' layer with the same parameters. It computes in fp32; for a layer in fp64, in fp64."""
    pytest.importorskip("transformers", minversion="5.6")
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    dtype = layer.A_log.dtype
    if dtype == torch.float64:
        monkeypatch.setattr(modeling, "torch", _DoubleTorch())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    config = Qwen3_5TextConfig(
        hidden_size=24, num_hidden_layers=1, linear_num_key_heads=K, linear_num_value_heads=H,
        linear_key_head_dim=E, linear_value_head_dim=V, layer_types=["linear_attention"], rms_norm_eps=1e-3,
    )  # fmt: skip
    theirs = modeling.Qwen3_5GatedDeltaNet(config, 0)
    theirs.load_state_dict(layer.state_dict())
    return theirs.to(dtype)


# In fp32, transformers' gradients and ours each differ from fp64 gradients by 2e-6 to 2e-5 of the largest.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "gradient_tolerance"),
    [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 2e-5)],
    ids=str,
)
def test_outputs_and_gradients_equal_transformers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, gradient_tolerance: float
) -> None:
    ours = make_layer(dtype)
    theirs = transformers_layer(ours, monkeypatch)
    x = hidden(100, dtype)

    def outputs_and_gradients(
        layer: torch.nn.Module, rule: Rule = torch_rule
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        own = x.clone().requires_grad_()
        layer.zero_grad()
        out = attended(layer, own, None, rule) if layer is ours else layer(own)
        (out * torch.randn(out.shape, generator=generator(4), dtype=dtype)).sum().backward()
        assert out.dtype == dtype
        return out.detach(), {"x": own.grad, **{n: p.grad.clone() for n, p in layer.named_parameters()}}

    wanted, wanted_gradients = outputs_and_gradients(theirs)
    actual, gradients = outputs_and_gradients(ours)
    assert wanted.std() > 0.15
    assert (actual - wanted).abs().max() < tolerance
    assert gradients.keys() == wanted_gradients.keys()
    for name, expected in wanted_gradients.items():
        assert (gradients[name] - expected).abs().max() < gradient_tolerance * expected.abs().max(), name

    def without_decay(inputs: RuleInputs, *rest: Any) -> Any:
        return torch_rule(inputs._replace(log_decay_BTH=inputs.log_decay_BTH * 0), *rest)

    def other_key_heads(inputs: RuleInputs, *rest: Any) -> Any:
        q, k, *others = inputs
        return torch_rule(RuleInputs(q.flip(2), k.flip(2), *others), *rest)

    for rule in (without_decay, other_key_heads):  # controls
        control, gradients = outputs_and_gradients(ours, rule)
        assert (control - wanted).abs().max() > 0.01
        expected = wanted_gradients["x"]
        assert (gradients["x"] - expected).abs().max() > 0.01 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=str)
def test_decoding_equals_the_whole_forward(dtype: torch.dtype, tolerance: float) -> None:
    layer, x = make_layer(dtype), hidden(90, dtype)
    expected = attended(layer, x)
    decoding = Decoding(layer)
    outs = [decoding(part) for part in x[:, :-1].split((70, *[1] * 15, 4), dim=1)]
    before = replace(decoding.state)
    outs.append(decoding(x[:, -1:]))
    assert (torch.cat(outs, 1) - expected).abs().max() < tolerance
    for control in (
        replace(before, rule=before.rule.roll(1, 1)),
        replace(before, convolution=before.convolution.roll(1, 1)),
    ):
        decoding.cache.states = [control]
        assert (decoding(x[:, -1:]) - expected[:, -1:]).abs().max() > 1e-3


def test_documents_of_a_packed_sequence_equal_documents_alone() -> None:
    """To the last bit when the other documents change, and up to rounding without the other documents."""
    layer, T = make_layer(), 100
    starts = starts_at(T, [0, 30, 31, 90], [0, 77])
    documents = documents_of(starts)
    x = hidden(T)
    out = attended(layer, x, documents)
    for sequence, bounds in enumerate(([0, 30, 31, 90, T], [0, 77, T])):
        for begin, end in pairwise(bounds):
            inside = torch.zeros(B, T, dtype=torch.bool)
            inside[sequence, begin:end] = True
            changed = torch.where(inside[..., None], x, x.flip(1) + 1)
            assert torch.equal(attended(layer, changed, documents)[inside], out[inside])
            alone = attended(layer, x[sequence, None, begin:end])[0]
            torch.testing.assert_close(out[inside], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(attended(layer, x), out, atol=1e-2)  # control


def test_documents_for_kernels() -> None:
    starts = starts_at(130, [0, 100], [])  # the second sequence continues a document
    documents = Documents.of(starts, 3)
    assert documents.starts is starts
    assert documents.cu_seqlens.tolist() == [0, 100, 130, 260, 260]
    chunks = [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [2, 2]]
    assert documents.chunk_indices.tolist() == [*chunks, [3, 0], [3, 1]]  # of an empty document
    more = Documents.of(starts, 4)
    assert more.cu_seqlens.tolist() == [0, 100, 130, *[260] * 6]
    assert more.chunk_indices.tolist() == [*chunks, *([7, n] for n in range(6))]


@pytest.mark.parametrize("trained", [True, False])
def test_flops_of_the_state(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recurrence computes state_flops_per_token. The chunked form computes the products of the pairs of
    tokens in each chunk, too. Of the triangular systems torch counts one product of the backward only.
    It does not look into our operator, so the loop runs without it."""
    monkeypatch.setattr(module, "chunk_recurrence", module.loop_over_chunks)
    monkeypatch.setattr(module, "CHUNK_SIZE", 16)
    T, C = 32, 16
    tensors = [x.requires_grad_(trained) for x in inputs(T)]
    counted = {}
    for rule in (recurrent_gated_delta_rule, gated_delta_rule):
        with FlopCounterMode(display=False) as counter:
            out, last = rule(*tensors)
            if trained:
                (out.sum() + last.sum()).backward()
        counted[rule] = counter.get_total_flops() / (B * T)
    passes = 3 if trained else 1
    state = passes * 6 * H * E * V
    assert counted[recurrent_gated_delta_rule] == state
    systems = 2 * H * C * (E + V) if trained else 0
    assert counted[gated_delta_rule] == state + passes * 2 * H * C * (2 * E + V) + systems
    assert state_flops_per_token(H, E, V) == 3 * 6 * H * E * V


def test_flops_of_the_layer() -> None:
    layer = make_layer()
    num_parameters = 24 * (2 * K * E + 2 * H * V + 2 * H) + H * V * 24 + 4 * (2 * K * E + H * V) + 2 * H + V
    assert sum(p.numel() for p in layer.parameters()) == num_parameters
    assert layer.state_flops_per_token() == 18 * H * E * V


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the package fla, which computes with torch."""
    return stand_in_for_fla(monkeypatch)


def trained(rule: Rule, packed: bool, compiled: bool = False) -> Tensors:
    """Outputs and gradients."""
    layer = make_layer()
    if compiled:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    starts = starts_at(70, [0, 20, 39], [0, 41])
    x = hidden(70).requires_grad_()
    out = attended(layer, x, documents_of(starts) if packed else None, rule)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_call(calls: list[str], packed: bool) -> None:
    """With the package's functions replaced: outputs and gradients of the layer are those of torch_rule."""
    expected, actual = (trained(rule, packed) for rule in (torch_rule, fla_rule))
    assert largest_error(actual, expected) < 1e-5
    assert calls == ["documents" if packed else "whole", "backward"]  # the forward runs once
    assert largest_error(trained(fla_rule, not packed), expected) > 0.01  # control


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_both_implementations_compile(calls: list[str], packed: bool) -> None:
    def both(*args: Any) -> Any:
        return torch_rule(*args)[0] - 2 * fla_rule(*args)[0], None

    torch._dynamo.reset()
    assert largest_error(trained(both, packed, compiled=True), trained(both, packed)) < 1e-5


def test_the_shapes_that_the_compiler_assumes_are_those_of_the_operator(calls: list[str]) -> None:
    tensors = [x.detach().contiguous().requires_grad_() for x in inputs(30, torch.float32)[:5]]
    torch.library.opcheck(
        torch.ops.titanlite.fla_gated_delta_rule.default,
        (tensors, torch.randn(len(tensors[0]), H, E, V), None, None, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@torch.no_grad()
def test_decoding_with_the_kernels(calls: list[str]) -> None:
    layer, x = make_layer(), hidden(40)
    outs: dict[Any, Tensors] = {}
    for rule in (torch_rule, fla_rule):
        decoding = Decoding(layer, rule)
        outs[rule] = [
            decoding(x),
            decoding(x[:, :7]),
            decoding(x[:, :1]),
            decoding.state.rule,
        ]
    assert largest_error(outs[fla_rule], outs[torch_rule]) < 1e-5
    assert calls == ["whole", "whole"]


@pytest.mark.parametrize("documents", [None, documents_of(starts_at(30, [7, 20], [0, 11]))])
def test_the_gradient_of_the_states(calls: list[str], documents: Documents | None) -> None:
    """The first sequence continues a document, if there are documents, the second does not."""
    tensors = inputs(30, torch.float32)

    def with_state(rule: Rule) -> Callable[..., Any]:
        return lambda q, k, v, g, beta, state, _: rule(RuleInputs(q, k, v, g, beta), state, documents, True)

    expected, actual = (results(with_state(rule), tensors, None) for rule in (torch_rule, fla_rule))
    assert largest_error(actual, expected) < 1e-5
    assert expected[-1][0].any()
    assert expected[-1][1].any() == (documents is None)


def test_the_choice_of_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    installed: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in installed:
            raise kernels.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(kernels, "version", version)
    capability = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability[0], 0))
    assert kernel_for(torch.device("cpu"), bf16) is torch_rule
    assert kernel_for(cuda, torch.float32) is torch_rule

    def refused() -> str:
        with pytest.raises(ConfigError) as error:
            kernel_for(cuda, bf16)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert refused().endswith("needs the package fla-core: pip install 'titanlite[linear-attention]'")
    installed |= {"fla-core": "0.5.2", "triton": "3.6.0"}
    assert "needs fla-core 0.6" in refused()
    installed["fla-core"] = "0.6.0"
    assert "wrong gradients on Hopper GPUs with Triton 3.6.0" in refused()
    capability[0] = 8
    assert kernel_for(cuda, bf16) is fla_rule
    capability[0] = 9
    installed["tilelang"] = "0.1.9"
    assert kernel_for(cuda, bf16) is fla_rule
    del installed["tilelang"]
    installed["triton"] = "3.7.1"
    assert kernel_for(cuda, bf16) is fla_rule
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_for(cuda, bf16) is torch_rule
    finally:
        torch.use_deterministic_algorithms(before)
