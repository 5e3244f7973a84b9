"""A pipeline has the gradients, losses and logits of one process, whatever its schedule and what else the
mesh divides."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_gradients import gradients, on_rank

UNTIED = {"tied": False, "layers": 6}
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradient_is_the_same_in_a_pipeline(run_on, schedule: str, ranks: int) -> None:
    """Of two ranks; of four, as two times two shards."""
    whole = gradients(1, 0, 1, **UNTIED)
    layout = {"pipeline": 2, "schedule": schedule, **UNTIED}
    parts = run_on(ranks, on_rank, ranks, 4, layout)
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        found |= part
    assert found.keys() == whole.keys()
    assert not set(parts[0]) >= set(whole)
    for name, value in whole.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-7), name
