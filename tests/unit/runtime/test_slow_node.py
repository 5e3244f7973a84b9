"""What a launcher learns from its ranks about slow ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from titanlite.runtime.slow_node import SlowNode, note_slow, read_slow_node

NODES = {number: [2 * number, 2 * number + 1] for number in range(4)}  # four nodes of two ranks


@pytest.mark.parametrize(
    ("slow", "num_slower"),
    [
        ({}, {}),
        ({5: 1.5}, {2: 0}),
        ({4: 1.4, 5: 1.5, 7: 1.6}, {2: 1, 3: 0}),
        ({2: 1.5, 5: 1.5}, {1: 1, 2: 0}),  # equally slow: they do not both leave for each other
        ({0: 1.9, 3: 1.5}, {0: 0, 1: 1}),
    ],
)
def test_slow_nodes_and_how_many_are_slower(
    tmp_path: Path, slow: Mapping[int, float], num_slower: Mapping[int, int]
) -> None:
    for rank in range(8):
        note_slow(str(tmp_path), rank, slow, 1.0)
    found = {number: read_slow_node(tmp_path, ranks) for number, ranks in NODES.items()}
    assert {number: node.num_slower for number, node in found.items() if node} == num_slower
    if 5 in slow:
        assert found[2] == SlowNode(5, 1.5, 1.0, num_slower[2])


def test_a_rank_that_has_recovered(tmp_path: Path) -> None:
    note_slow(str(tmp_path), 1, {1: 2.0}, 1.0)
    note_slow(str(tmp_path), 1, {0: 2.0}, 1.0)
    assert read_slow_node(tmp_path, [1]) is None
    assert not list(tmp_path.iterdir())
    note_slow(None, 1, {1: 2.0}, 1.0)  # without a launcher
