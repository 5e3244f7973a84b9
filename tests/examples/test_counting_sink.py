"""The example of a sink: it counts the steps, samples and events of runs on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import train_on_rank

SINK = [
    "--job.imports=['tests.examples.counting_sink']",
    "--metrics.sinks=[{ name = 'counting', file = 'numbers.json' }]",
    "--generation.prompts=['a', 'b']",
    "--generation.max_new_tokens=1",
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_counts(tmp_path: Path, corpus: Path, run_on: Any, world_size: int) -> None:
    def counts(steps: int) -> dict[str, Any]:
        keys = [*SINK, f"--training.steps={steps}"]
        run_on(world_size, train_on_rank, tmp_path, corpus, keys, "run", world_size)
        return json.loads((tmp_path / "run/numbers.json").read_text())

    first, second = counts(5), counts(8)
    assert first.pop("run_id") == second.pop("run_id")
    assert first == {"steps": 5, "saved": 2, "samples": 2}  # checkpoints of steps 4 and 5
    assert second == {"resumed": 1, "steps": 3, "saved": 1, "samples": 2}
