"""How blocks are divided into stages, whose stages are whose, and how long ranks wait."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from titanlite.mesh import Parallelism
from titanlite.parallel.pipeline_parallel import (
    STAGES_PER_RANK,
    bubble_fraction,
    split_into_stages,
    stages_of_rank,
)


def sizes(layers: int, degree: int, **options: object) -> list[int]:
    parallelism = Parallelism(pipeline_parallel_degree=degree, **options)
    stages = split_into_stages(parallelism, [str(i) for i in range(layers)])
    assert list(itertools.chain(*stages)) == [str(i) for i in range(layers)]
    return [len(stage) for stage in stages]


def test_ends_have_fewer_blocks() -> None:
    assert sizes(32, 4) == [8, 8, 8, 8]  # 34, of which the ends get the two that are over
    assert sizes(30, 4) == [7, 8, 8, 7]
    assert sizes(4, 4) == [1, 1, 1, 1]
    none = {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    assert sizes(33, 4, **none) == [8, 9, 8, 8]
    assert sizes(80, 8, pipeline_parallel_schedule="Interleaved1F1B") == [5] * 16


def test_points_are_where_later_stages_begin() -> None:
    assert sizes(8, 3, pipeline_parallel_split_points=["layers.3", "model.layers.6"]) == [3, 3, 2]


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_every_stage_is_some_ranks(schedule: str) -> None:
    stages = [i for rank in range(4) for i in stages_of_rank(schedule, rank, 4)]
    assert sorted(stages) == list(range(4 * STAGES_PER_RANK[schedule]))


def test_ranks_of_a_zero_bubble_turn_at_the_last_one() -> None:
    assert stages_of_rank("ZBVZeroBubble", 0, 4) == [0, 7]
    assert stages_of_rank("Interleaved1F1B", 0, 4) == [0, 4]


def test_waiting_is_that_of_the_order() -> None:
    """All forwards, then all backwards, is (ranks - 1) / (micro-batches + ranks - 1)."""
    forward, backward = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
    order = {r: [_Action(r, kind, m) for kind in (forward, backward) for m in range(6)] for r in range(3)}
    assert bubble_fraction(order) == pytest.approx(2 / 8)
    apart = [_ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT]
    one = {0: [None, _Action(0, forward, 0), *(_Action(0, kind, 0) for kind in apart)]}
    assert bubble_fraction(one) == 0


def test_an_order_that_waits_for_itself_is_noticed() -> None:
    with pytest.raises(AssertionError, match="waits for itself"):
        bubble_fraction(
            {0: [_Action(0, _ComputationType.FORWARD, 0)], 1: [_Action(1, _ComputationType.FORWARD, 1)]}
        )
