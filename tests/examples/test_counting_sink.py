"""The example of a sink: it counts the samples and events of runs on one rank and on two, and each step has
one line after runs that train steps again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import train_on_rank
from tests.support.tiers import full

SINK = [
    "--job.imports=['tests.examples.counting_sink']",
    "--metrics.sinks=[{ name = 'counting', file = 'numbers.jsonl' }]",
    "--generation.prompts=['a', 'b']",
    "--generation.max_new_tokens=1",
]


@pytest.mark.parametrize("world_size", [1, full(2)])
def test_it_counts(tmp_path: Path, corpus: Path, run_on: Any, world_size: int) -> None:
    def counts(*keys: str) -> list[dict[str, Any]]:
        run_on(world_size, train_on_rank, tmp_path, corpus, [*SINK, *keys], "run", world_size)
        lines = [json.loads(line) for line in (tmp_path / "run/numbers.jsonl").read_text().splitlines()]
        assert [line.pop("step") for line in lines] == list(range(1, len(lines) + 1))
        assert all(line.pop("loss") > 0 for line in lines)
        assert all(line.pop("saved", 1) == 1 for line in lines)  # a save may take some steps
        return lines

    first = [{}, {}, {}, {}, {"samples": 2}]
    assert counts("--training.steps=5") == first
    second = [*first, {"resumed": 1}, {}, {"samples": 2}]
    assert counts("--training.steps=8") == second
    assert counts("--training.steps=8", "--checkpoint.load_step=5") == second
