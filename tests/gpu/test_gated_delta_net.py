"""The gated delta net on CUDA: the kernels of flash-linear-attention against the reference in fp32, for whole
sequences and documents, in the eager and the compiled layer, and decoding from their state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.gpu import QWEN3_5, column, reference, run
from titanlite.attention.gated_delta_rule import gated_delta_rule, l2_normalized
from titanlite.attention.gated_delta_rule_kernels import (
    Documents,
    Rule,
    RuleInputs,
    fla_rule,
    kernel_for,
    obstacle,
    torch_rule,
)
from titanlite.attention.linear import CachedLinearAttention, LinearAttention
from titanlite.config.component import ConfigError
from titanlite.models.gated_delta_net import GatedDeltaNet


def reason() -> str:
    """Why the kernels cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    return obstacle(torch.cuda.get_device_capability()[0])


pytestmark = pytest.mark.gpu
needs_kernels = pytest.mark.skipif(bool(reason()), reason=reason())
CUDA = torch.device("cuda")
T = 500  # no multiple of the chunk
HEADS = [(2, 4, 64, 64), (4, 8, 128, 64)]


@pytest.fixture(autouse=True)
def first_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel takes the first of its block sizes: to time all of them takes minutes in each process."""
    if reason():
        return
    from triton.runtime.autotuner import Autotuner

    tuned = Autotuner.run

    def run_first(self: Autotuner, *args: object, **kwargs: object) -> object:
        configs, self.configs = self.configs, self.configs[:1]
        try:
            return tuned(self, *args, **kwargs)
        finally:
            self.configs = configs

    monkeypatch.setattr(Autotuner, "run", run_first)


def inputs(heads: tuple[int, ...], dtype: torch.dtype) -> RuleInputs:
    """q, k, v, log decay and beta."""
    K, H, E, V = heads
    g = torch.Generator().manual_seed(0)
    shapes = [(3, T, K, E), (3, T, K, E), (3, T, H, V), (3, T, H), (3, T, H)]
    q, k, v, decay, beta = (torch.randn(s, generator=g) for s in shapes)
    decay = -torch.nn.functional.softplus(decay - 2)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return trainable(q, k, v, decay, beta.sigmoid())


def trainable(*tensors: torch.Tensor) -> RuleInputs:
    """Leaves on the GPU."""
    return RuleInputs(*(x.detach().cuda().requires_grad_() for x in tensors))


def packed() -> Documents:
    """Documents that begin within chunks, at a chunk, and one token long; the last sequence has one."""
    starts = torch.zeros(3, T, dtype=torch.bool)
    starts[:, 0] = True
    for sequence, begins in enumerate(([64, 65, 200], [130, 499])):
        starts[sequence, begins] = True
    return Documents.of(starts.cuda(), int(starts.sum()))


def results(rule: Rule, tensors: RuleInputs, documents: Documents | None) -> list[torch.Tensor]:
    """Outputs, states and gradients in fp32. The loss weights the outputs and the states."""
    out, state = rule(tensors, None, documents, True)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g).cuda() for x in (out, state)]
    loss = (out.float() * weights[0]).sum() + (state * weights[1]).sum()
    gradients = torch.autograd.grad(loss, tensors)
    return [x.detach().float() for x in (out, state, *gradients)]


@needs_kernels
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_kernels_equal_the_reference(heads: tuple[int, ...], documents: bool) -> None:
    tensors = inputs(heads, torch.bfloat16)
    exact = trainable(*(x.float() for x in tensors))
    expected = results(torch_rule, exact, packed() if documents else None)
    control = results(torch_rule, exact, None if documents else packed())
    actual = results(fla_rule, tensors, packed() if documents else None)
    names = ("out", "state", "q", "k", "v", "decay", "beta")
    for name, ours, theirs, other in zip(names, actual, expected, control):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm(), name
        assert (other - theirs).norm() > 2e-2 * theirs.norm(), name


@needs_kernels
def test_the_state_goes_into_the_kernels() -> None:
    """Two halves of a sequence are the whole, with the gradient that flows through the state."""
    tensors = inputs((2, 4, 64, 64), torch.bfloat16)
    whole, _ = fla_rule(tensors, None, None, False)
    head, tail = (RuleInputs(*(x[:, part] for x in tensors)) for part in (slice(320), slice(320, None)))
    first, state = fla_rule(head, None, None, True)
    second, _ = fla_rule(tail, state, None, False)
    halves = torch.cat((first, second), 1)
    assert (halves - whole).float().norm() <= 1e-2 * whole.float().norm()
    expected, actual, cut = (
        torch.autograd.grad(x.float().square().sum(), tensors, retain_graph=True)
        for x in (whole, halves, first)
    )
    for a, b, c in zip(actual, expected, cut):
        assert (a - b).float().norm() <= 2e-2 * b.float().norm()
        assert (c - b).float().norm() > 2e-2 * b.float().norm()  # control


@needs_kernels
def test_documents_continue_a_state() -> None:
    """With empty documents at the end, whose number is an upper bound: equal to the reference in fp32."""
    tensors = inputs((2, 4, 64, 64), torch.bfloat16)
    starts = packed().starts.clone()
    starts[1:, 0] = False
    documents = Documents.of(starts, 40)
    state = torch.randn(3, 4, 64, 64, generator=torch.Generator().manual_seed(4)).cuda().requires_grad_()
    found = []
    for rule, given in ((fla_rule, tensors), (torch_rule, trainable(*(x.float() for x in tensors)))):
        out, last = rule(given, state, documents, True)
        loss = out.float().square().sum() + last.square().sum()
        found.append([out, last, *torch.autograd.grad(loss, (*given, state))])
    for ours, exact in zip(*found):  # the gradient of the loss is rounded to bf16, too
        assert (ours.float() - exact).norm() <= 3e-2 * exact.norm()
    assert not found[0][-1][0].any()
    assert found[0][-1][1].any()  # control: the second sequence continues a document


@needs_kernels
def test_no_bit_of_another_document_reaches_a_token() -> None:
    tensors = inputs((2, 4, 64, 64), torch.bfloat16)
    documents, inside = packed(), slice(65, 200)
    changed = trainable(*(x.flip(1) for x in tensors))
    with torch.no_grad():
        for x, original in zip(changed, tensors):
            x[0, inside] = original[0, inside]
    outs = [fla_rule(x, None, documents, False)[0][0, inside] for x in (tensors, changed)]
    assert torch.equal(*outs)
    whole = [fla_rule(x, None, None, False)[0][0, inside] for x in (tensors, changed)]
    assert not torch.equal(*whole)  # control


def layer() -> GatedDeltaNet:
    net = GatedDeltaNet(256, (2, 4), (64, 64), norm_eps=1e-6).cuda()
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in net.named_parameters():
            mean, std = (0.0, 0.05 if p.ndim == 2 else 0.5) if p.ndim > 1 else (float(name != "A_log"), 0.2)
            p.copy_(torch.randn(p.shape, generator=g) * std + mean)
    return net


@needs_kernels
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_the_layer_trains_as_in_fp32(documents: bool, compiled: bool) -> None:
    x = torch.randn(3, T, 256, generator=torch.Generator().manual_seed(3)).cuda()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        net, own = layer(), x.detach().to(dtype).requires_grad_()
        rule = kernel_for(CUDA, dtype)
        assert rule is (torch_rule if dtype == torch.float32 else fla_rule)
        if compiled and dtype == torch.bfloat16:
            net.compile(fullgraph=True, dynamic=False)
        out = net(own, own, own, LinearAttention(rule, packed() if documents else None))
        out.float().square().sum().backward()
        found.append([y.detach().float() for y in (out, own.grad, *(p.grad for p in net.parameters()))])
    for name, exact, ours in zip(("out", "x", *dict(layer().named_parameters())), *found):
        assert (ours - exact).norm() <= 5e-2 * exact.norm(), name


@needs_kernels
@torch.no_grad()
def test_decoding_continues_from_the_kernels() -> None:
    net = layer().bfloat16()
    x = torch.randn(3, 150, 256, generator=torch.Generator().manual_seed(3)).cuda().bfloat16()
    decoding, outs = CachedLinearAttention(), []
    decoding.rule = fla_rule
    for part in x.split((140, *[1] * 10), dim=1):
        decoding.begin_forward()
        outs.append(net(part, part, part, decoding))
    whole = net(x, x, x, LinearAttention(fla_rule))
    assert (torch.cat(outs, 1) - whole).float().norm() <= 2e-2 * whole.float().norm()
    forgetful = torch.cat([net(part, part, part, LinearAttention()) for part in x.split(1, dim=1)], 1)
    assert (forgetful - whole).float().norm() > 0.1 * whole.float().norm()  # control


@needs_kernels
@pytest.mark.parametrize("masks", [False, True], ids=["causal", "masked"])
def test_a_compiled_run_in_bf16_trains_as_in_fp32(tmp_path: Path, corpus: Path, masks: bool) -> None:
    keys = [
        *QWEN3_5,
        "--training.seq_len=256",
        "--data.packing=best_fit",
        f"--data.mask_documents={masks}".lower(),
    ]
    exact = reference(corpus, *keys, "--training.mixed_precision_param=float32")
    fast = run(tmp_path, corpus, *keys, "--compile.enable")
    assert column(fast, "train/loss") == pytest.approx(column(exact, "train/loss"), rel=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_same_on_cuda_and_cpu(dtype: torch.dtype) -> None:
    q, k, v, decay, beta = (x.detach() for x in inputs((2, 4, 64, 64), dtype))
    tensors = (l2_normalized(q), l2_normalized(k), v, decay, beta)
    documents = packed()
    out, state = gated_delta_rule(*tensors, None, documents.starts)
    on_cpu = [x.cpu() for x in (*tensors, documents.starts)]
    expected, expected_state = gated_delta_rule(*on_cpu[:5], starts=on_cpu[5])
    assert (out.cpu() - expected).float().norm() <= 1e-2 * expected.float().norm()
    assert (state.cpu() - expected_state).norm() <= 1e-4 * expected_state.norm()
    whole, _ = gated_delta_rule(*tensors)
    assert (whole - out).float().norm() > 5e-2 * out.float().norm()  # control


def test_deterministic_runs_take_the_reference() -> None:
    """Its results have the same bits in two calls. A process of its own: cuBLAS reads its setting once."""
    code = """if True:
        import torch
        from tests.gpu.test_gated_delta_net import CUDA, inputs, kernel_for, packed, results, torch_rule
        from titanlite.runtime.process import determinism
        with determinism(True):
            assert kernel_for(CUDA, torch.bfloat16) is torch_rule
            tensors = inputs((2, 4, 64, 64), torch.bfloat16)
            first, second = (results(torch_rule, tensors, packed()) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second))
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.skipif(not reason().startswith(("needs the package", "has wrong")), reason="the kernels can run")
def test_a_missing_package_is_one_line() -> None:
    with pytest.raises(ConfigError, match="the gated delta rule on CUDA "):
        kernel_for(CUDA, torch.bfloat16)
