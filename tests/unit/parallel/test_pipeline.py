"""How blocks are partitioned into pipeline stages, and which rank has which stages."""

from __future__ import annotations

import itertools

import pytest

from titanlite.parallel.pipeline_parallel import (
    STAGES_PER_RANK,
    split_into_stages,
    stages_of_rank,
)
from titanlite.parallelism import Parallelism


def sizes(layers: int, degree: int, **options: object) -> list[int]:
    parallelism = Parallelism(pipeline_parallel_degree=degree, **options)
    stages = split_into_stages(parallelism, [str(i) for i in range(layers)])
    assert list(itertools.chain(*stages)) == [str(i) for i in range(layers)]
    return [len(stage) for stage in stages]


def test_the_first_and_the_last_stage_have_fewer_blocks() -> None:
    assert sizes(32, 4) == [
        8,
        8,
        8,
        8,
    ]  # 34 = 4 x 8 + 2: the first and the last stage get the two extra blocks
    assert sizes(30, 4) == [7, 8, 8, 7]
    assert sizes(4, 4) == [1, 1, 1, 1]
    none = {f"pipeline_parallel_{name}_stage_less_layers": 0 for name in ("first", "last")}
    assert sizes(33, 4, **none) == [8, 9, 8, 8]
    assert sizes(80, 8, pipeline_parallel_schedule="Interleaved1F1B") == [5] * 16


def test_split_points_name_the_first_block_of_each_later_stage() -> None:
    assert sizes(8, 3, pipeline_parallel_split_points=["layers.3", "model.layers.6"]) == [3, 3, 2]


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_every_stage_is_on_exactly_one_rank(schedule: str) -> None:
    stages = [i for rank in range(4) for i in stages_of_rank(schedule, rank, 4)]
    assert sorted(stages) == list(range(4 * STAGES_PER_RANK[schedule]))


def test_zbv_assigns_the_second_half_of_the_stages_in_reverse() -> None:
    assert stages_of_rank("ZBVZeroBubble", 0, 4) == [0, 7]
    assert stages_of_rank("Interleaved1F1B", 0, 4) == [0, 4]
