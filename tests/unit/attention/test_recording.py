"""Every backend tells which keys a query sees: attention that is written out with these keys is what the
backend computes. The statistics are those of a small example."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples.sliding_window import SlidingWindow
from titanlite.attention import flex
from titanlite.attention.base import Attention, AttentionKind, AttentionNeeds
from titanlite.attention.flex import Flex, WindowedFlex
from titanlite.attention.kv_cache import KVCache
from titanlite.attention.recording import RecordingAttention, attention_statistics
from titanlite.attention.sdpa import CAUSAL, SDPA, SDPAttention
from titanlite.attention.varlen import Varlen

T = 12
QUERIES = torch.tensor([3, 5, 11])
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(12)], [0, *range(10), 0]])


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.randn(3, T, heads, 8, generator=generator) for heads in (4, 2, 2)]


def written_out(attention: Attention) -> torch.Tensor:
    """Outputs [B, Q, H, E] of some queries, from the keys that `attention` names."""
    q, k, v = tensors()
    visible_keys = attention.visible_keys(k, QUERIES)
    assert visible_keys is not None
    keys, visible_BQS = visible_keys
    k, v = (x.repeat_interleave(2, 2) for x in (keys, v))
    scores = torch.einsum("bqhe,bshe->bhqs", q[:, QUERIES], k) / math.sqrt(8)
    scores = scores.masked_fill(~visible_BQS[:, None], -math.inf)
    return torch.einsum("bhqs,bshe->bqhe", scores.softmax(-1), v)


def visible(attention: Attention) -> torch.Tensor:
    """Which keys each query sees, bool [B, T, T]."""
    visible_keys = attention.visible_keys(tensors()[1], torch.arange(T))
    assert visible_keys is not None
    return visible_keys[1]


MASKS: dict[str, Attention] = {
    "causal": CAUSAL,
    "documents": SDPA().for_documents(POSITIONS, 5),
    "sliding window": SlidingWindow(window=3).for_sequences(POSITIONS),
    "documents, sliding window": SlidingWindow(window=3).for_documents(POSITIONS, 5),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_named_keys_are_those_that_attention_uses(name: str) -> None:
    actual = MASKS[name].attend(*tensors())[:, QUERIES]
    assert torch.allclose(actual, written_out(MASKS[name]), atol=1e-5)
    others = [written_out(mask) for other, mask in MASKS.items() if other != name]
    assert not any(torch.allclose(actual, other, atol=1e-2) for other in others)  # control


def test_the_kernels_for_cuda_name_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves do not run on a CPU; tests/gpu/test_probe.py runs them."""
    monkeypatch.setattr(flex, "_flex_attention", print)
    monkeypatch.setattr(flex, "_create_block_mask", create_block_mask)
    monkeypatch.setattr("titanlite.attention.varlen._varlen_attention", print)
    wanted = MASKS["documents"].visible_keys(tensors()[1], QUERIES)
    assert wanted is not None
    gathered = torch.tensor([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5])
    for backend in (Flex(), Varlen()):
        actual = backend.for_documents(POSITIONS, 5).visible_keys(tensors()[1], QUERIES)
        assert actual is not None
        assert torch.equal(actual[1], wanted[1])
    positions = torch.arange(T)
    for documents in (None, (POSITIONS == 0).cumsum(1)):
        dense = SDPA().masked(positions, gathered, documents).visible_keys(tensors()[1], QUERIES)
        block = Flex().masked(positions, gathered, documents).visible_keys(tensors()[1], QUERIES)
        assert dense is not None
        assert block is not None
        assert torch.equal(dense[1].expand(3, -1, -1), block[1])


@pytest.mark.parametrize("window", [1, 3, T, 99])
def test_a_window_hides_the_same_keys_from_every_kernel(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Over whole sequences, in documents, and with context parallel on the second of two ranks."""
    monkeypatch.setattr(flex, "_flex_attention", print)
    monkeypatch.setattr(flex, "_create_block_mask", create_block_mask)
    monkeypatch.setattr("titanlite.attention.varlen._varlen_attention", print)
    q, k, v = tensors()
    indices = torch.arange(T)
    distance = indices[:, None] - indices
    near = ((distance >= 0) & (distance < window)).expand(3, -1, -1)
    documents = (POSITIONS == 0).cumsum(1)
    same = documents[:, :, None] == documents[:, None]
    for backend in (SDPA(), Flex(), Varlen()):
        for attention, wanted in (
            (backend.for_sequences(POSITIONS), near),
            (backend.for_documents(POSITIONS, 5), near & same),
        ):
            seen = attention.of_kind(AttentionKind(window), POSITIONS).visible_keys(k, indices)
            assert seen is not None
            assert torch.equal(seen[1].expand(3, -1, -1), wanted)
            if type(backend) is SDPA:
                out = attention.of_kind(AttentionKind(window), POSITIONS).attend(q, k, v)
                assert torch.allclose(out, SDPAttention(wanted[:, None]).attend(q, k, v), atol=1e-6)
    queries, gathered = torch.tensor([3, 4, 5, 6, 7, 8]), torch.cat((indices[:3], indices[9:], indices[3:9]))
    local = POSITIONS[:, queries]
    for numbers, wanted in ((None, near), (documents, near & same)):
        for backend in (SDPA(), Flex()):
            attention = backend.masked(queries, gathered, numbers).of_kind(AttentionKind(window), local)
            seen = attention.visible_keys(k, torch.arange(6))
            assert seen is not None
            assert torch.equal(seen[1].expand(3, -1, -1), wanted[:, queries][:, :, gathered])


@pytest.mark.parametrize("window", [0, 3, T, 63, 64])
def test_flex_makes_one_block_mask_per_micro_batch(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Before the blocks run. Sequences are shorter than the longest of the run, 64 tokens."""
    num_made = 0

    def counted(*arguments: Any, **options: Any) -> BlockMask:
        nonlocal num_made
        num_made += 1
        return create_block_mask(*arguments, **options)

    monkeypatch.setattr(flex, "_flex_attention", print)
    monkeypatch.setattr(flex, "_create_block_mask", counted)
    needs = AttentionNeeds(
        device=torch.device("cuda"), dtype=torch.bfloat16, seq_len=64, n_heads=4, n_kv_heads=2, head_dim=16,
        masks_documents=True, kinds=(AttentionKind(window),),
    )  # fmt: skip
    backend = Flex().build(needs)
    assert backend.name == "flex"
    attention, dense = backend.for_documents(POSITIONS, 5), MASKS["documents"]
    if window:
        attention, dense = (
            attention.of_kind(AttentionKind(window), POSITIONS),
            dense.of_kind(AttentionKind(window), POSITIONS),
        )
    assert num_made == 1
    assert torch.equal(visible(attention), visible(dense))
    assert num_made == 1


def test_flex_also_attends_without_the_window_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model with a window in some layers only, the other layers call `attend` without it."""
    monkeypatch.setattr(flex, "_flex_attention", print)
    monkeypatch.setattr(flex, "_create_block_mask", create_block_mask)
    attention = WindowedFlex().for_documents(POSITIONS, 5)
    assert not torch.equal(
        visible(attention.of_kind(AttentionKind(3), POSITIONS)), visible(MASKS["documents"])
    )
    assert torch.equal(visible(attention), visible(MASKS["documents"]))


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("documents", [False, True])
def test_a_dense_window_needs_one_byte_per_pair_of_tokens(documents: bool) -> None:
    tokens = torch.arange(256).repeat(2, 1)
    attention = SDPA().for_documents(tokens, 2) if documents else SDPA().for_sequences(tokens)
    with LargestTensor() as largest:
        attention.of_kind(AttentionKind(40), tokens)
    assert largest.num_bytes == 256 * 256 * (2 if documents else 1)


def test_a_window_of_a_recorded_attention_is_recorded() -> None:
    records = list[torch.Tensor]()
    recorder = RecordingAttention(CAUSAL, QUERIES, lambda largest, entropy, count: records.append(entropy))
    q, k, v = tensors()
    windowed = CAUSAL.of_kind(AttentionKind(1), POSITIONS)
    assert torch.equal(
        recorder.of_kind(AttentionKind(1), POSITIONS).attend(q, k, v), windowed.attend(q, k, v)
    )
    assert records[0].abs().max() == 0.0, "each token sees itself only"


def test_the_statistics_of_two_heads() -> None:
    """Both heads share a key head: one query sees all four keys alike, the other two keys, unlike."""
    q_BQHE = torch.tensor([[[[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]]]])
    k_BSKE = torch.tensor([[[[math.sqrt(2), 0.0]], [[0.0, 0.0]], [[0.0, 0.0]], [[99.0, 99.0]]]])
    visible = torch.tensor([[[True, True, False, False], [True, True, True, False]]])
    largest, entropy = attention_statistics(q_BQHE, k_BSKE, visible)
    p = 1 / (1 + math.exp(-1))
    unlike = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert largest.tolist() == pytest.approx([0.0, 1.0])
    assert entropy.tolist() == pytest.approx([math.log(2) + math.log(3), unlike + math.log(3)])


def test_a_rank_without_queries_has_neutral_statistics() -> None:
    q, k, _ = tensors()
    largest, entropy = attention_statistics(q[:, :0], k, torch.ones(3, 0, T, dtype=torch.bool))
    assert largest.tolist() == [-math.inf] * 4
    assert entropy.tolist() == [0.0] * 4


def test_recording_changes_no_output() -> None:
    records = list[int]()
    for attention in (MASKS["documents"], KVCache(T)):
        if isinstance(attention, KVCache):
            attention.advance(T, torch.device("cpu"))
        recorder = RecordingAttention(attention, QUERIES, lambda a, b, count: records.append(count))
        wanted = (MASKS["documents"] if attention is MASKS["documents"] else CAUSAL).attend(*tensors())
        assert torch.equal(recorder.attend(*tensors()), wanted)
    assert records == [3 * len(QUERIES)]  # the cache does not tell


def test_a_kernel_that_needs_the_compiler_is_compiled_although_the_blocks_are_not() -> None:
    graphs = list[object]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    class Compiled(Attention):
        def attend(self, *tensors: torch.Tensor) -> torch.Tensor:
            return torch.compile(CAUSAL.attend, backend=backend)(*tensors)

    recorder = RecordingAttention(Compiled(), QUERIES, print)
    with torch.compiler.set_stance("force_eager"):
        Compiled().attend(*tensors())
        assert not graphs
        recorder.attend(*tensors())
        assert len(graphs) == 1
        torch.compile(torch.sin, backend=backend)(torch.ones(3))
    assert len(graphs) == 1
