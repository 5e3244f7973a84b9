"""The example of a schedule: runs on one rank and on two have its learning rates, also after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.examples.inverse_sqrt import InverseSqrt
from tests.support.runs import train_on_rank
from tests.support.tiers import full
from titanlite.config.component import ConfigError

# The base job's schedule has keys of its own, so the whole table is replaced.
KEYS = ["--job.imports=['tests.examples.inverse_sqrt']", "--optimizer.lr=2e-3"]
TABLE = 'name = "inverse_sqrt"\nwarmup_steps = 4'


def train_with_table(folder: Path, corpus: Path, overrides: list[str], world_size: int) -> None:
    """One rank's part of a run whose file has the example's table."""
    from unittest.mock import patch

    from tests.support import jobs

    text = jobs.BASE.replace("warmup_steps = 2\ntotal_steps = 16", TABLE)
    with patch.object(jobs, "BASE", text):
        train_on_rank(folder, corpus, [*KEYS, *overrides], "run", world_size)


@pytest.mark.parametrize("world_size", [1, full(2)])
def test_a_run_has_its_learning_rates(tmp_path: Path, corpus: Path, run_on: Any, world_size: int) -> None:
    for steps in (5, 8):  # the second run resumes the first
        run_on(world_size, train_with_table, tmp_path, corpus, [f"--training.steps={steps}"], world_size)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    factors = [0.25, 0.5, 0.75, 1.0, *(math.sqrt(4 / step) for step in (5, 6, 7, 8))]
    assert [line["train/learning_rate"] for line in lines] == pytest.approx([2e-3 * f for f in factors])
    text = (tmp_path / "run/job.toml").read_text()
    assert "# learning rate: inverse_sqrt over 8 steps\n" in text


def test_it_checks_its_keys() -> None:
    with pytest.raises(ConfigError, match="0 is below 1"):
        InverseSqrt(warmup_steps=0)
    with pytest.raises(ConfigError, match="100 is above training") as e:
        InverseSqrt(warmup_steps=100).check(50)
    assert e.value.key == "lr_scheduler.warmup_steps"
    InverseSqrt(warmup_steps=50).check(50)
