"""Pipeline parallel has the gradients, losses and logits of one process, with every schedule and combined
with other kinds of parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from tests.support.gradients import build, gradients, on_rank, uneven_sequences
from tests.support.tiers import full, sampled
from titanlite import torch_compat
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.reader import load_tensors
from titanlite.data.batch import Batch
from titanlite.parallel import pipeline_parallel
from titanlite.parallel.fsdp import add_up_gradients
from titanlite.parallel.pipeline_parallel import STAGES_PER_RANK, ZERO_BUBBLE
from titanlite.ranks import Ranks

UNTIED = {"tied": False, "layers": 8}


def union(by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The gradients of all ranks' stages as one dict."""
    return {name: value for gradients in by_rank for name, value in gradients.items()}


def assert_same(actual: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.allclose(actual[name], value, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(
    ("degree", "schedule"),
    [
        (4, "ZBVZeroBubble"),
        *(full(4, schedule) for schedule in ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble")),
        *(full(2, schedule) for schedule in STAGES_PER_RANK),
    ],
)
def test_gradient_is_the_same_in_a_pipeline(run_on, schedule: str, degree: int) -> None:
    """With pp 2 x dp_shard 2, and with pp 4."""
    by_rank = run_on(4, on_rank, 4, 4, {"pp": degree, "schedule": schedule, **UNTIED})
    assert not set(by_rank[0]) >= set(by_rank[-1]), "each rank has only its stages"
    assert_same(union(by_rank), gradients(1, 0, 1, **UNTIED))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        full({"dp_replicate": 2}),
        full({"tp": 2}),
        full({"cp": 2}),
        {"tp": 2, "schedule": "ZBVZeroBubble"},
        {"cp": 2, "schedule": "InterleavedZeroBubble"},
        full({"activation_checkpoint": "full", "schedule": "Interleaved1F1B"}),
        full({"compile": "aot_eager", "schedule": "Interleaved1F1B"}),
        full({"tp": 2, "z_loss": 0.01}),
        full({"z_loss": 0.01, "schedule": "ZBVZeroBubble"}),
    ],
    ids=str,
)
def test_gradient_is_the_same_with_other_transforms(run_on, layout: dict[str, Any]) -> None:
    layout = {"layers": 4, "tied": False, **layout}
    by_rank = run_on(4, on_rank, 4, 2, {"pp": 2, **layout})
    z_loss = layout.get("z_loss", 0.0)
    assert_same(union(by_rank), gradients(1, 0, 1, tied=False, layers=4, z_loss=z_loss))


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_in_a_pipeline(run_on, recipe: str) -> None:
    layout = {"layers": 4, "tied": False, "float8": recipe}
    by_rank = run_on(2, on_rank, 2, 4, {"pp": 2, **layout})
    assert_same(union(by_rank), gradients(1, 0, 4, **layout))


@pytest.mark.parametrize("schedule", sampled(["1F1B", *ZERO_BUBBLE], {"ZBVZeroBubble"}))
def test_micro_batches_add_up_in_fp32(run_on, schedule: str) -> None:
    """With pipeline parallel, bf16 is as close to fp32 as in a single process."""
    exact = gradients(1, 0, 1, **UNTIED)
    alone = gradients(1, 0, 8, dtype=torch.bfloat16, **UNTIED)
    piped = union(
        run_on(2, on_rank, 2, 8, {"pp": 2, "schedule": schedule, "dtype": torch.bfloat16, **UNTIED})
    )

    def distance(actual: dict[str, torch.Tensor]) -> float:
        names = [name for name in exact if name.startswith(("model", "lm_head"))]
        return sum(((actual[n] - exact[n]).norm() / exact[n].norm()).item() for n in names) / len(names)

    assert distance(piped) < 1.1 * distance(alone)


def left_in_bf16(world_size: int, layout: dict[str, Any]) -> list[tuple[int, int]]:
    """The numbers of gradients that are still in bf16 before and after each call of add_up_gradients. The
    next micro-batch would be added to them in bf16."""
    counts = []

    def watched(stage: Any) -> None:
        states = [m._get_fsdp_state() for m in stage.modules() if isinstance(m, FSDPModule)]
        groups = [
            group
            for state in states
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            if group
        ]

        def num_bf16() -> int:
            return sum(p.unsharded_param.grad is not None for group in groups for p in group.fsdp_params)

        before = num_bf16()
        add_up_gradients(stage)
        counts.append((before, num_bf16()))

    pipeline_parallel.add_up_gradients = watched
    try:
        on_rank(world_size, 8, layout)
    finally:
        pipeline_parallel.add_up_gradients = add_up_gradients
    return counts


@pytest.mark.full
@pytest.mark.parametrize("schedule", sampled(ZERO_BUBBLE, {"ZBVZeroBubble"}))
def test_nothing_is_left_in_bf16_between_backwards_of_weights(run_on, schedule: str) -> None:
    layout = {"pp": 2, "schedule": schedule, "dtype": torch.bfloat16, **UNTIED}
    counts = [pair for pairs in run_on(2, left_in_bf16, 2, layout) for pair in pairs]
    assert any(before for before, _ in counts)
    assert not any(after for _, after in counts)


def with_documents(world_size: int, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of one step over sequences with masked documents. Documents have other lengths in each
    sequence."""
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    model, batch = build(world_size, rank, **layout), uneven_sequences()
    num_sequences, length = batch.inputs.shape
    positions = torch.stack([torch.arange(length) % (i + 3) for i in range(num_sequences)])
    batches = [
        Batch(batch.inputs[b], batch.targets[b], 0, 0, positions[b], int((positions[b] == 0).sum()))
        for b in (slice(a, a + 2) for a in range(0, num_sequences, 2))
    ]
    model.forward_backward(batches, torch.tensor(batch.num_targets))
    whole = lambda g: g.full_tensor() if isinstance(g, DTensor) else g  # noqa: E731
    return {name: whole(p.grad) for name, p in model.net.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("schedule", [full("1F1B"), "Interleaved1F1B"])
def test_a_micro_batch_keeps_its_mask(run_on, schedule: str) -> None:
    by_rank = run_on(2, with_documents, 2, {"pp": 2, "schedule": schedule, **UNTIED})
    assert_same(union(by_rank), with_documents(1, UNTIED))
    assert not torch.allclose(
        union(by_rank)["lm_head.weight"], gradients(1, 0, 4, **UNTIED)["lm_head.weight"]
    )


def forwards(world_size: int, layout: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of all uneven sequences, the loss of three of them, and the logits of a prompt."""
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    model, batch = build(world_size, rank, **layout), uneven_sequences()
    three = replace(batch, inputs=batch.inputs[:3], targets=batch.targets[:3])
    losses = [model.loss_sum(batch), model.loss_sum(three)]
    if world_size > 1:
        for loss in losses:
            torch.distributed.all_reduce(loss)
    return losses[0], losses[1], model.logits(batch.inputs[:1, :7])


@pytest.mark.full
@pytest.mark.parametrize("schedule", sampled(STAGES_PER_RANK, {"ZBVZeroBubble"}))
def test_losses_and_logits_are_the_same(run_on, schedule: str) -> None:
    whole = forwards(1, UNTIED)
    for actual in run_on(4, forwards, 4, {"pp": 4, "schedule": schedule, **UNTIED}):
        for ours, theirs in zip(actual, whole):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def load_into_other_tensors(folder: Any) -> str:
    """Load another tensor on each rank. The checkpoint has only the tensor of rank 0."""
    ranks = Ranks(folder)
    name = "there" if ranks.rank == 0 else "not there"
    try:
        load_tensors(folder, {"model": {name: torch.zeros(2)}}, ranks)
    except CheckpointError as e:
        return str(e)
    return ""


def test_a_tensor_that_one_rank_misses_is_an_error_on_all_ranks(run_on, tmp_path) -> None:
    torch.distributed.checkpoint.save(
        {"model": {"there": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True
    )
    first, second = run_on(2, load_into_other_tensors, tmp_path)
    assert first == second
    assert "model.not there is missing" in first


def warm_up_peers() -> tuple[list[int], list[int]]:
    """The ranks to which the second of four ZBVZeroBubble stages opens connections before the first step:
    with torch's method, and after skip_p2p_to_own_rank."""
    x = torch.empty(1, 1)
    stage = PipelineStage(torch.nn.Identity(), 1, 4, torch.device("cpu"), input_args=(x,), output_args=(x,))
    stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}
    torchs = [op.peer for op in stage._get_init_p2p_neighbors_ops()]
    torch_compat.skip_p2p_to_own_rank(stage)
    return torchs, [op.peer for op in stage._get_init_p2p_neighbors_ops()]


def test_no_rank_sends_to_itself_before_the_first_step(run_on: Any) -> None:
    torchs, ours = run_on(2, warm_up_peers)[1]
    assert 1 in torchs, "the reason for skip_p2p_to_own_rank is gone"
    assert ours == [peer for peer in torchs if peer != 1] != []
