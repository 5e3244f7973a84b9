"""A GPU with little memory, made up for runs on a CPU: [job] imports names this module.

The made-up GPU has CARD_GIB. A micro-batch takes GIB_PER_SEQUENCE per sequence, and EXTRA_GIB more on all
ranks but rank 0. A forward that needs more than the GPU has runs out of memory, as torch reports it. With
SMALL_GPU_FAILS in the environment it fails otherwise; SMALL_GPU_SEQUENCE_GIB sets GIB_PER_SEQUENCE."""

from __future__ import annotations

import os
from typing import Any

import torch

from titanlite.lab import find_batch
from titanlite.lab.cards import Card
from titanlite.metrics import meter
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.runtime.environment import place

CARD_GIB, EXTRA_GIB = 1.0, 0.2
GIB_PER_SEQUENCE = float(os.environ.get("SMALL_GPU_SEQUENCE_GIB", 0.13))
_model_inputs = ShardedModel.model_inputs
_peak_gib = 0.0


def model_inputs(model: Any, batch: Any, *rest: Any) -> Any:
    global _peak_gib
    if os.environ.get("SMALL_GPU_FAILS"):
        raise ValueError("a planted fault")
    _peak_gib = GIB_PER_SEQUENCE * len(batch.inputs) + EXTRA_GIB * (place().rank > 0)
    if _peak_gib > CARD_GIB:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    return _model_inputs(model, batch, *rest)


def peak_memory(device: torch.device) -> dict[str, float]:
    return {"memory/peak_allocated_gib": 0.9 * _peak_gib, "memory/peak_reserved_gib": _peak_gib}


setattr(ShardedModel, "model_inputs", model_inputs)  # noqa: B010 -- for mypy
setattr(meter, "peak_memory", peak_memory)  # noqa: B010
setattr(find_batch, "gpu", lambda: Card("small GPU", CARD_GIB, 0.0, 0.0))  # noqa: B010
