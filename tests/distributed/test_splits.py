"""Sequences that are split into shorter ones train like whole sequences under a mask that hides the shorter
ones from each other: on every layout, with lengths that change from step to step, and with validations on
whole sequences in between."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.gradients import build
from tests.support.splits import on_rank, sequences_of, trained, whole_batch
from tests.support.tiers import full
from titanlite.attention import varlen
from titanlite.attention.sdpa import CAUSAL, SDPA
from titanlite.data.batch import Batch
from titanlite.models import decoder

LENGTHS_CHANGE = (2, 1, 4, 2, 1, 4)
WINDOW = {"family": "mistral", "shape": {"sliding_window": 6}}  # tokens; the shortest sequences have 4


def largest_error(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a value, by its norm."""
    assert actual.keys() == wanted.keys()
    return max(((actual[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted)


def assert_same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert largest_error(actual, wanted) < 1e-5


@pytest.mark.parametrize(
    ("masked", "model"), [(False, {}), (True, {}), full(False, WINDOW), full(True, WINDOW)], ids=str
)
def test_split_sequences_train_like_masked_ones(masked: bool, model: dict[str, Any]) -> None:
    split, reference, whole = (
        trained(1, 0, num_splits, masked, **model, **options)
        for num_splits, options in (
            (LENGTHS_CHANGE, {}),
            (LENGTHS_CHANGE, {"reference": True, "whole_logits": True}),
            ((1,) * len(LENGTHS_CHANGE), {}),
        )
    )
    num_ranges = (split["losses by position"].view(2, -1)[1] > 0).sum()
    assert num_ranges == 4, "a quarter of the positions"
    for result in (split, reference, whole):
        del result["losses by position"]
    assert_same(split, reference)
    assert largest_error(whole, reference) > 0.1


LAYOUTS = [
    (2, True, {"cp": 2}),
    *(full(*case) for case in [
        (2, True, {}), (2, False, {"pp": 2, "tied": False}),
        (4, False, {"dp_replicate": 2, "reduce": "micro_batch"}),
        (2, False, {"tp": 2}), (2, True, {"tp": 2, "tied": False}),
        (2, False, {"cp": 2}), (2, False, {"cp": 2, "attention": "sdpa"}), (4, True, {"tp": 2, "cp": 2}),
        (4, True, {"pp": 2, "tied": False}), (4, False, {"pp": 2, "tp": 2, "tied": False}),
        (4, False, {"pp": 2, "cp": 2, "tied": False}),
        *((2, True, {"pp": 2, "tied": False, "layers": 4, "schedule": schedule}) for schedule in (
            "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble",
        )),
        (2, False, {"cp": 2, **WINDOW}), (2, False, {"compile": "aot_eager", **WINDOW}),
        (2, True, {"compile": "aot_eager"}), (2, True, {"compile": "aot_eager", "tp": 2}),
        (2, True, {"compile": "aot_eager", "cp": 2}),
        (2, False, {"compile": "aot_eager", "cp": 2, "activation_checkpoint": "full"}),
        (2, True, {"compile": "aot_eager", "tp": 2, "activation_checkpoint": "selective"}),
        (2, True, {"compile": "aot_eager", "pp": 2, "tied": False}),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "masked", "layout"), LAYOUTS, ids=str)
def test_split_sequences_train_alike_on_every_layout(
    run_on, world_size: int, masked: bool, layout: dict[str, Any]
) -> None:
    num_splits = (2, 1, 2, 1) if {"tp", "cp"} <= layout.keys() else LENGTHS_CHANGE  # a rank needs 2 tokens
    by_rank = run_on(world_size, on_rank, world_size, num_splits, masked, layout)
    together = {name: value for of_rank in by_rank for name, value in of_rank.items()}
    alone = {key: layout[key] for key in ("tied", "layers", "family", "shape") if key in layout}
    assert_same(together, trained(1, 0, num_splits, masked, **alone))


def living_stages(schedule: str) -> list[bool]:
    """Whether the pipeline stage that was made for each sequence length still exists after the last one."""
    model = build(2, torch.distributed.get_rank(), pp=2, tied=False, layers=4, schedule=schedule)
    batch, stages = whole_batch(0, masked=False), []
    gc.disable()
    for num_splits in (1, 2, 4):
        parts = [sequences_of(batch, begin, 4).split(num_splits) for begin in (0, 4)]
        model.forward_backward(parts, torch.tensor(batch.num_targets))
        assert model.pipeline is not None
        torchs = model.pipeline._schedule
        stages.append(weakref.ref(torchs._stage if schedule == "1F1B" else torchs._stages[0]))
    return [stage() is not None for stage in stages]


@pytest.mark.parametrize("schedule", ["1F1B", full("ZBVZeroBubble")])
def test_the_buffers_of_another_length_are_freed_without_garbage_collection(run_on, schedule: str) -> None:
    assert run_on(2, living_stages, schedule) == [[False, False, True]] * 2


def varlen_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    window: int = 0,
) -> torch.Tensor:
    """What the kernel behind the varlen backend computes without a window: attention within each document."""
    assert window == 0
    documents = [slice(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist()) if a < b]
    assert max(document.stop - document.start for document in documents) <= max_seqlen
    return torch.cat([CAUSAL.attend(*(x[None, document] for x in (q, k, v)))[0] for document in documents])


SPLIT = Batch.split


def not_restarted(batch: Batch, num_splits: int) -> Batch:
    """Batch.split that leaves the positions as they are."""
    split = SPLIT(batch, num_splits)
    assert batch.positions is not None
    return replace(split, positions=batch.positions.reshape(split.inputs.shape))


def not_counted(batch: Batch, num_splits: int) -> Batch:
    """Batch.split that leaves the number of documents as it is."""
    return replace(SPLIT(batch, num_splits), num_documents=batch.num_documents)


def test_the_varlen_backend_has_the_documents_of_split_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_varlen_attention", varlen_on_cpu)
    wanted = trained(1, 0, LENGTHS_CHANGE, masked=True)
    assert_same(trained(1, 0, LENGTHS_CHANGE, masked=True, attention="varlen"), wanted)
    for control in (not_restarted, not_counted):
        monkeypatch.setattr(Batch, "split", control)
        with pytest.raises(AssertionError, match="<"):
            assert_same(trained(1, 0, LENGTHS_CHANGE, masked=True, attention="varlen"), wanted)


def kept(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which returns its first result for every later call with the same key."""
    results = dict[Any, Any]()
    return lambda *args: results.setdefault(key(*args), function(*args))


STALE = {
    "a mask of earlier documents": (SDPA, "for_documents", lambda backend, positions, count: positions.shape),
    "a mask of another length": (SDPA, "for_documents", lambda *args: None),
    "rotations of another length": (decoder, "rope_tables", lambda *args: None),
}


@pytest.mark.parametrize("name", STALE)
def test_control_stale_masks_and_rotations_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(1, 0, LENGTHS_CHANGE, masked=True)
    where, function, key = STALE[name]
    monkeypatch.setattr(where, function, kept(getattr(where, function), key))
    with pytest.raises((AssertionError, RuntimeError), match=r"<|must match the size"):
        assert_same(trained(1, 0, LENGTHS_CHANGE, masked=True), wanted)
