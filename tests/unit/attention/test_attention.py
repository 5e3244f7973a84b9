"""Pins document masks: logits and gradients of a document in a packed sequence equal those of the document
alone, and differ without the mask. All backends have the same mask. A kernel that the device lacks is
refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.sliding_window import SlidingWindow
from titanlite.attention.auto import Auto
from titanlite.attention.base import Attention, AttentionBackend, AttentionKind, AttentionNeeds, kernels
from titanlite.attention.flex import Flex
from titanlite.attention.head_tail import HeadTail
from titanlite.attention.sdpa import CAUSAL, SDPA, SDPAttention
from titanlite.attention.varlen import Varlen, VarlenAttention
from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch, make_batch
from titanlite.data.packing import TokenSequence
from titanlite.losses import CrossEntropy
from titanlite.mesh import ALONE
from titanlite.models.base import Decoder
from titanlite.models.llama3 import Llama3
from titanlite.parallel.apply import parallelize
from titanlite.parallel.initialize import fill_normal
from titanlite.parallel.settings import ParallelSettings

SHAPE = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "hidden_dim": 64,
    "vocab_size": 50,
}
SEQ_LEN = 24
DOCUMENT_STARTS = [[0, 5, 11, 12], [0], [0, 23], [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]]


@pytest.fixture(scope="module")
def net() -> Decoder:
    net = Llama3(flavor="debug", overrides=SHAPE).build()
    for name, parameter in net.named_parameters():
        mean, _ = net.init_normal(name)
        fill_normal(parameter, name, mean, 0.3, seed=0)  # large: weak attention would hide a leak
    return net


def packed() -> tuple[Batch, list[np.ndarray]]:
    """A batch of packed sequences, and their documents."""
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(rng.integers(0, 50, SEQ_LEN + 1), np.array(starts)) for starts in DOCUMENT_STARTS
    ]
    documents = [d for s in sequences for d in np.split(s.tokens, s.document_starts[1:])]  # type: ignore[index]
    batch = make_batch(list(range(len(sequences))), sequences, seq_len=SEQ_LEN, with_positions=True)
    return batch, documents


def alone(document: np.ndarray) -> Batch:
    return make_batch([0], [TokenSequence(document)], seq_len=len(document) - 1)


def by_document(batch: Batch, values: torch.Tensor) -> list[torch.Tensor]:
    """`values` [B, T, ...] split at document boundaries."""
    assert batch.positions is not None
    documents = []
    for sequence, positions in zip(values, batch.positions):
        starts = (positions == 0).nonzero().flatten().tolist()
        documents += [sequence[a:b] for a, b in zip(starts, [*starts[1:], None])]
    return documents


def logits(net: Decoder, batch: Batch, masked: bool = True) -> torch.Tensor:
    return net(batch.inputs, batch.positions, within_documents(batch) if masked else CAUSAL)


def within_documents(batch: Batch) -> Attention:
    assert batch.positions is not None
    return SDPA().for_documents(batch.positions, batch.num_documents)


def test_logits_of_a_packed_sequence_are_those_of_its_documents_alone(net: Decoder) -> None:
    batch, documents = packed()
    ours = by_document(batch, logits(net, batch))
    leaking = by_document(batch, logits(net, batch, masked=False))
    wrong = 0.0
    for document, a, b in zip(documents, ours, leaking):
        expected = net(torch.from_numpy(document[: len(a)])[None])[0]
        assert torch.allclose(a, expected, atol=1e-5)
        wrong = max(wrong, (b - expected).abs().max().item())
    assert wrong > 0.1  # the negative control: without a mask, documents see each other


def test_it_is_the_mask_that_keeps_documents_apart(net: Decoder) -> None:
    """Restarting positions do not separate documents, because rotary positions are relative."""
    batch, _ = packed()
    right = logits(net, batch)
    shifted = net(batch.inputs, attention=within_documents(batch))
    assert torch.allclose(shifted, right, atol=1e-4)
    assert not torch.allclose(net(batch.inputs, positions=batch.positions), right, atol=1e-2)


def gradients(net: Decoder, batches: list[Batch]) -> dict[str, torch.Tensor]:
    model = parallelize(net, CrossEntropy(), ALONE, ParallelSettings())
    tokens = torch.tensor(sum(b.num_targets for b in batches))
    for b in batches:
        (model.net(*model.model_inputs(b)) / tokens).backward()
    actual = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    return actual


def test_gradients_of_packed_sequences_are_those_of_their_documents(net: Decoder) -> None:
    batch, documents = packed()
    ours = gradients(net, [batch])
    theirs = gradients(net, [alone(d) for d in documents if len(d) > 1])
    unmasked = gradients(net, [replace(batch, positions=None)])
    for name, gradient in ours.items():
        assert torch.allclose(gradient, theirs[name], atol=1e-5), name
    assert any(not torch.allclose(unmasked[n], theirs[n], atol=1e-3) for n in theirs)


def test_all_backends_have_the_same_document_mask() -> None:
    batch, _ = packed()
    positions = batch.positions
    assert positions is not None
    dense = within_documents(batch)
    varlen = Varlen().for_documents(positions, batch.num_documents)
    assert isinstance(varlen, VarlenAttention)
    assert isinstance(dense, SDPAttention)
    assert dense.mask is not None
    bounds = varlen.cu_seqlens.tolist()
    assert varlen.cu_seqlens.dtype == torch.int32
    assert (bounds[0], bounds[-1]) == (0, positions.numel())
    of_token = torch.bucketize(torch.arange(positions.numel()), varlen.cu_seqlens[1:], right=True)
    same = of_token[:, None] == of_token[None, :]
    causal = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
    for b in range(len(DOCUMENT_STARTS)):
        tokens = slice(b * SEQ_LEN, (b + 1) * SEQ_LEN)
        assert torch.equal(dense.mask[b, 0], same[tokens, tokens] & causal)
    sizes = varlen.cu_seqlens.diff()
    assert 0 <= sizes.min() <= sizes.max() <= varlen.max_seqlen


def test_causal_without_a_mask() -> None:
    q, k, v = (torch.randn(2, 7, n, 8) for n in (4, 2, 2))
    whole = CAUSAL.attend(q, k, v)
    for t in range(7):
        first = CAUSAL.attend(q[:, : t + 1], k[:, : t + 1], v[:, : t + 1])
        assert torch.allclose(first, whole[:, : t + 1], atol=1e-6)


def needs(device: str, dtype: torch.dtype, **options: bool) -> AttentionNeeds:
    return AttentionNeeds(
        device=torch.device(device), dtype=dtype, seq_len=64, n_heads=4, n_kv_heads=2, head_dim=16, **options
    )


@pytest.mark.parametrize("backend", [Flex, Varlen], ids=lambda backend: backend.name)
def test_a_kernel_that_the_device_lacks_is_refused(backend: type[SDPA]) -> None:
    refused = r"does not work on cpu with float32, head_dim 16; working backends: sdpa$"
    with pytest.raises(ConfigError, match=refused) as e:
        backend().build(needs("cpu", torch.float32, masks_documents=True))
    assert e.value.key == "attention.backend"
    assert backend().build(needs("cpu", torch.float32)).kernel(needs("cpu", torch.float32)) == "sdpa on cpu"


@pytest.mark.parametrize(
    ("device", "dtype", "options", "chosen"),
    [
        ("cpu", torch.bfloat16, {"masks_documents": True}, "sdpa"),
        ("cpu", torch.float32, {"context_parallel": True}, "head_tail"),
        ("cpu", torch.float32, {"context_parallel": True, "masks_documents": True}, "sdpa"),
        ("cuda", torch.float32, {"masks_documents": True}, "flex"),
        ("cuda", torch.bfloat16, {"masks_documents": True}, "varlen"),
        ("cuda", torch.bfloat16, {"context_parallel": True, "masks_documents": True}, "flex"),
    ],
)
def test_the_kernel_that_auto_chooses(
    device: str, dtype: torch.dtype, options: dict[str, bool], chosen: str
) -> None:
    assert Auto().build(needs(device, dtype, **options)).name == chosen


def test_flex_takes_no_small_heads() -> None:
    masked = needs("cuda", torch.float32, masks_documents=True)
    assert Flex.works_on(masked)
    assert not Flex.works_on(replace(masked, head_dim=8))
    assert not Flex.works_on(replace(masked, v_head_dim=8))


@pytest.mark.parametrize(
    ("device", "options", "chosen"),
    [
        ("cpu", {}, "sdpa"),
        ("cpu", {"context_parallel": True}, "sdpa"),
        ("cuda", {}, "varlen"),
        ("cuda", {"masks_documents": True}, "varlen"),
        ("cuda", {"context_parallel": True}, "flex"),
    ],
)
def test_the_kernel_that_auto_chooses_for_a_window(
    device: str, options: dict[str, bool], chosen: str
) -> None:
    short, whole = (
        replace(needs(device, torch.bfloat16, **options), kinds=(AttentionKind(size),)) for size in (63, 64)
    )
    assert Auto().build(short).name == chosen
    assert not whole.has_effective_window
    if options.get("context_parallel") and device == "cpu":
        assert Auto().build(whole).name == "head_tail"


@pytest.mark.parametrize("backend", [HeadTail, Flex], ids=lambda backend: backend.name)
def test_a_kernel_without_windows_is_refused(backend: type[SDPA]) -> None:
    run = replace(needs("cpu", torch.float32, context_parallel=True), kinds=(AttentionKind(16),))
    message = (
        f"'{backend.name}' does not work on cpu with float32, head_dim 16 and a sliding window of 16 tokens "
        "under context parallel; working backends: sdpa"
    )
    with pytest.raises(ConfigError) as e:
        backend().build(run)
    assert str(e.value) == message
    assert e.value.key == "attention.backend"


def test_a_backend_from_outside_has_to_say_that_it_supports_windows() -> None:
    class Outside(SlidingWindow):
        name = "outside"

    run = replace(needs("cpu", torch.float32), kinds=(AttentionKind(16),))
    with pytest.raises(ConfigError, match="'outside' does not support the model's sliding window of 16") as e:
        Outside().build(run)
    assert e.value.key == "attention.backend"
    Outside.supports_window = True
    assert Outside().build(run).name == "outside"
    with pytest.raises(ConfigError, match="Attention does not support a sliding window"):
        Attention().of_kind(AttentionKind(16), torch.zeros(1, 64))


def test_auto_does_not_choose_head_tail_for_another_sdpa_kernel() -> None:
    """head_tail always runs cuDNN's kernel."""
    run = needs("cpu", torch.float32, context_parallel=True)
    assert Auto(sdpa_kernel="math").build(run).name == "sdpa"


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({}, "whole sequences"),
        ({"masks_documents": True}, "document masks"),
        ({"context_parallel": True}, "context parallel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_backend_that_lacks_a_needed_feature_is_refused(options: dict[str, bool], feature: str) -> None:
    class Plain(AttentionBackend):
        name = "plain"

    with pytest.raises(ConfigError, match=f"'plain' does not support {feature}") as e:
        Plain().build(needs("cpu", torch.float32, **options))
    assert e.value.key == "attention.backend"


def test_each_kind_has_the_fastest_backend_that_works() -> None:
    """Under context parallel, layers with full attention run chunk by chunk, and layers with a window by
    another kernel. Outputs are those of the backends."""
    kinds = (AttentionKind(), AttentionKind(16))
    run = replace(needs("cpu", torch.float32, context_parallel=True), kinds=kinds)
    backend = Auto().build(run)
    assert backend.kernel(run) == "head_tail, sdpa on cpu"
    assert kernels(backend, run, [*kinds, kinds[1]]) == (
        "head_tail (full, 1 layer), sdpa on cpu (window 16, 2 layers)"
    )
    assert backend.kept_ops == ("titanlite.head_tail_attention",)
    sharding: Any = SimpleNamespace(
        size=2,
        rank=0,
        own_chunks=(0, 3),
        local_positions=lambda length, device: torch.arange(length // 2),
        gathered_positions=lambda length, device: torch.arange(length),
    )
    tokens = torch.zeros(1, 64)
    attention = backend.for_context_parallel(sharding, tokens, None, 0)
    own = [type(attention.of_kind(kind, tokens[:, :32])).__name__ for kind in kinds]
    assert own == ["HeadTailAttention", "ChunkAttention"]
    assert Auto().build(replace(run, kinds=kinds[:1])).name == "head_tail"
    assert Auto().build(replace(run, kinds=kinds[1:])).name == "sdpa"
