"""FlashAttention 4: outputs and gradients against dense attention in fp32, and training with every feature
that compiles, repeats or records the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu import trained
from tests.support.jobs import make_job, metrics_of
from tests.support.runs import FOUR_MICRO_BATCHES, weights
from titanlite.attention.base import AttentionBackend, AttentionKind, AttentionNeeds
from titanlite.attention.flash_attention_4 import FlashAttention4, is_installed
from titanlite.attention.head_tail import head_tail_attention
from titanlite.attention.sdpa import SDPA
from titanlite.config.component import ConfigError
from titanlite.torch_compat import flash_attention_4_can_be_deterministic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_installed(), reason="needs the package flash-attn-4"),
]
T = 384
BACKEND = "--attention.backend=flash_attention_4"
NOT_DETERMINISTIC = ["--training.deterministic=false"]
HEADS = ["--model.overrides.dim=256", "--model.overrides.n_heads=4", "--model.overrides.head_dim=64"]


@pytest.fixture
def switches() -> Iterator[None]:
    """Restores the kernels that the tests exchange."""
    yield
    torch.nn.attention.restore_flash_attention_impl()
    for enable in ("flash", "cudnn", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(True)


def needs(**fields: Any) -> AttentionNeeds:
    shape = {"seq_len": T, "n_heads": 8, "n_kv_heads": 2, "head_dim": 64} | fields
    return AttentionNeeds(device=torch.device("cuda", 0), dtype=torch.bfloat16, **shape)


Results = list[torch.Tensor]


def results(backend: AttentionBackend, heads: list[torch.Tensor], documents: bool, window: int) -> Results:
    """Output and gradients in fp32."""
    q, k, v = (h.detach().requires_grad_() for h in heads)
    positions = torch.arange(T, device="cuda").repeat(3, 1)
    positions[1, 90:] = torch.arange(T - 90, device="cuda")
    attention = backend.for_documents(positions, 4) if documents else backend.for_sequences(positions)
    if window:
        attention = attention.of_kind(AttentionKind(window), positions)
    out = attention.attend(q, k, v)
    generator = torch.Generator().manual_seed(1)
    (out.float() * torch.randn(out.shape, generator=generator).cuda()).sum().backward()
    return [x.detach().float() for x in (out, q.grad, k.grad, v.grad)]


def random_heads(head_dim: int, kv_heads: int) -> list[torch.Tensor]:
    """Queries, keys and values in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, T, h, head_dim) for h in (8, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes]


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("documents", "window"), [(False, 0), (True, 0), (False, 50)])
def test_outputs_and_gradients_equal_dense_attention(
    documents: bool, window: int, head_dim: int, kv_heads: int
) -> None:
    shape = needs(
        n_kv_heads=kv_heads, head_dim=head_dim, masks_documents=documents, kinds=(AttentionKind(window),)
    )
    if (documents or window) and torch.__version__ < "2.13":
        with pytest.raises(ConfigError, match="does not run with these packages, model and masks: FA4"):
            FlashAttention4().build(shape)
        assert torch.nn.attention.current_flash_attention_impl() is None
        return
    heads = random_heads(head_dim, kv_heads)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = results(SDPA(), [h.float() for h in heads], documents, window)
        other = results(SDPA(), [h.float() for h in heads], not documents, window)
    backend = FlashAttention4().build(shape)
    assert backend.kernel(shape) == "flash_attention_4"
    for ours, theirs, control in zip(results(backend, heads, documents, window), expected, other):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()
        assert (control - theirs).norm() > 1e-2 * theirs.norm()


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_chunks_of_context_parallel(head_dim: int) -> None:
    """The queries of chunks 1 and 2 of four, over all keys; the control has the heads in another order."""
    shape = needs(head_dim=head_dim, context_parallel=True)
    FlashAttention4().build(shape)
    heads = random_heads(head_dim, 2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        whole, *_ = results(SDPA(), [h.float() for h in heads], False, 0)
    q, k, v = (h.transpose(1, 2).detach().requires_grad_() for h in heads)
    middle = slice(T // 4, 3 * T // 4)
    out = {flash: head_tail_attention(q[:, :, middle], k, v, 1, 2, flash)[0] for flash in (True, False)}
    expected = whole[:, middle].transpose(1, 2)
    assert all((x.float() - expected).norm() <= 1e-2 * expected.norm() for x in out.values())
    weight = torch.randn_like(expected)
    ours, cudnn = (torch.autograd.grad((x.float() * weight).sum(), (q, k, v)) for x in out.values())
    for a, b in zip(ours, cudnn):
        assert (a - b).norm() <= 1e-2 * b.norm()
        assert (a - b.flip(1)).norm() > 0.1 * b.norm()  # control


SETTINGS = {
    "eager": [],
    "compiled": ["--compile.enable"],
    "op": ["--compile.enable", "--activation_checkpoint.mode=selective"],
    "full": ["--compile.enable", "--activation_checkpoint.mode=full"],
    "graphs": ["--compile.enable", "--compile.cuda_graphs"],
    "samples": [
        "--compile.enable",
        "--generation.prompts=['a']",
        "--generation.freq=3",
        "--validation.enable",
        "--validation.freq=3",
    ],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_runs_train_as_with_another_kernel(tmp_path: Path, corpus: Path, settings: list[str]) -> None:
    keys = [*HEADS, "--training.steps=6", "--training.seq_len=64", *NOT_DETERMINISTIC, *settings]
    losses = {}
    for name, more in (("flash_attention_4", []), ("sdpa", []), ("control", ["--optimizer.lr=1e-5"])):
        backend = "sdpa" if name == "control" else name
        log = trained(tmp_path, corpus, *keys, *more, f"--attention.backend={backend}", name=name)
        assert ("attention by flash_attention_4" in log) == (name == "flash_attention_4")
        metrics = metrics_of(make_job(tmp_path, corpus, FOUR_MICRO_BATCHES, *keys, *more, name=name))
        losses[name] = torch.tensor([m["train/loss"] for m in metrics])
    ours, other, control = losses.values()
    assert torch.allclose(ours, other, rtol=5e-3)  # bf16 rounding
    assert not torch.allclose(ours, control, rtol=5e-3)


def test_cuda_graphs_have_the_bits_of_a_run_without(tmp_path: Path, corpus: Path) -> None:
    keys = [*HEADS, BACKEND, "--training.steps=6", "--training.seq_len=64", "--compile.enable"]
    keys += ["--metrics.detail_freq=0", "--data.holdout_sequences=0"]
    if not flash_attention_4_can_be_deterministic():
        assert "is not deterministic with torch" in trained(tmp_path, corpus, *keys, code=2)
        return
    saved = {}
    for name, more in {
        "without": ["--no-compile.cuda_graphs"],
        "graphs": ["--compile.cuda_graphs"],
        "seed": ["--no-compile.cuda_graphs", "--training.seed=1"],
    }.items():
        trained(tmp_path, corpus, *keys, *more, name=name)
        saved[name] = weights(make_job(tmp_path, corpus, FOUR_MICRO_BATCHES, *keys, *more, name=name), 6)
    assert all(torch.equal(saved["graphs"][key], saved["without"][key]) for key in saved["without"])
    assert not all(torch.equal(saved["seed"][key], saved["without"][key]) for key in saved["without"])
