"""Probes, on any layout, of a small model with a planted dead MLP unit and a planted head whose attention
logits are large."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.support.gradients import build
from titanlite.data.batch import Batch
from titanlite.parallel.probe import BlockStatistics
from titanlite.parallel.sharded_model import ShardedModel

LENGTH = 96  # more than the 64 queries that are measured
NUM_SEQUENCES = 4
BLOCK, HEAD, UNIT = (
    "model.layers.1",
    2,
    37,
)  # where the faults are; on the second of two tensor-parallel ranks
HEAD_DIM = 8


def batch(with_documents: bool = True, rank: int = 0, ranks: int = 1) -> Batch:
    """A data-parallel rank's share of four sequences, which have two documents each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 252, (NUM_SEQUENCES, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).repeat(NUM_SEQUENCES, 1)
    for i, start in enumerate((10, 50, 90, 40)):
        positions[i, start:] -= start
    size = NUM_SEQUENCES // ranks
    inputs, targets, positions = (x[rank * size :][:size] for x in (tokens[:, :-1], tokens[:, 1:], positions))
    if with_documents:
        return Batch(inputs, targets, inputs.numel(), 0, positions, num_documents=2 * size)
    return Batch(inputs, targets, inputs.numel(), 0)


def model(world_size: int = 1, **layout: Any) -> ShardedModel:
    """The model with the two faults. Its weights are large, because weak attention would hide mistakes."""
    model = build(world_size, dist.get_rank() if world_size > 1 else 0, tied=False, **layout)
    with torch.no_grad():
        for name, parameter in model.net.named_parameters():
            sharded = parameter if isinstance(parameter, DTensor) else None
            whole = parameter.clone() if sharded is None else sharded.full_tensor()
            whole *= 10 if whole.ndim > 1 else 1
            if name == f"{BLOCK}.self_attn.q_proj.weight":
                whole[HEAD_DIM * HEAD : HEAD_DIM * (HEAD + 1)] *= 30
            if name == f"{BLOCK}.mlp.up_proj.weight":
                whole[UNIT] = 0
            if sharded is not None:
                whole = distribute_tensor(whole, sharded.device_mesh, sharded.placements)
            parameter.copy_(whole)
    return model


def probed(world_size: int, with_documents: bool, layout: dict[str, Any]) -> list[BlockStatistics]:
    """The statistics that this rank of the layout gets."""
    sharded = model(world_size, **layout)
    return sharded.probe(batch(with_documents, sharded.mesh.dp_rank, sharded.mesh.dp_size))


def same(actual: list[BlockStatistics], wanted: list[BlockStatistics]) -> bool:
    """Whether names and numbers are equal, within rounding."""
    ours, theirs = _numbers(actual), _numbers(wanted)
    return ours.keys() == theirs.keys() and all(
        len(values) == len(theirs[block]) and torch.allclose(values, theirs[block], rtol=1e-4)
        for block, values in ours.items()
    )


def _numbers(blocks: list[BlockStatistics]) -> dict[str, torch.Tensor]:
    return {
        b.block: torch.tensor(
            [b.residual_rms, b.residual_max, *b.attention_logit_max, *b.attention_entropy, b.dead_units_pct]
        )
        for b in blocks
    }
