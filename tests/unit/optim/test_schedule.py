"""Pins what the base class asks of every learning-rate schedule: factors are finite numbers of at least 0, at
the check of a job and in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.jobs import make_job, metrics_of
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.optim.schedule import LRScheduler
from titanlite.train import train

JobWith = Callable[..., Job]


@pytest.fixture
def job_with(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> JobWith:
    """`job_with(factor, steps)`: a job whose schedule has this function of the step."""
    monkeypatch.setattr(LRScheduler, "choices", dict(LRScheduler.choices))

    def job_with(factor: Callable[[int], Any], steps: int) -> Job:
        LRScheduler.choices.pop("own", None)

        @dataclass(frozen=True, kw_only=True)
        class Own(LRScheduler, name="own"):
            """A schedule."""

            warmup_steps: int
            """A key of the base job."""
            total_steps: int
            """A key of the base job."""

            def factor(self, step: int, training_steps: int) -> float:
                return factor(step)

        return make_job(tmp_path, corpus, "--lr_scheduler.name=own", f"--training.steps={steps}")

    return job_with


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (lambda step: -0.5 if step == 4 else 1.0, "at step 4 is -0.5; it must be finite and at least 0"),
        (
            lambda step: 1.0 if step < 8 else float("nan"),
            "at step 8 is nan; it must be finite and at least 0",
        ),
        (lambda step: float("inf"), "at step 1 is inf; it must be finite and at least 0"),
        (lambda step: 1 / abs(step - 5), f"at step 5 failed: {__file__}:"),
        (lambda step: None, "at step 1 failed: TypeError: float() argument must be"),
    ],
    ids=["negative", "nan", "infinite", "raises", "none"],
)
def test_a_wrong_factor_is_a_configuration_error(
    job_with: JobWith, factor: Callable[[int], Any], said: str
) -> None:
    with pytest.raises(ConfigError) as e:
        job_with(factor, steps=8)
    assert f"lr_scheduler.name: the factor of 'own' {said}" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", [np.float32, torch.tensor, float], ids=["numpy", "tensor", "float"])
def test_numbers_of_other_types_train_and_a_wrong_factor_ends_the_run(job_with: JobWith, kind: Any) -> None:
    """A job of 400 steps checks a sample of its steps; step 2 is not among them."""
    job = job_with(lambda step: kind(0.5 if step != 2 else -1.0), steps=400)
    with pytest.raises(ConfigError, match="the factor of 'own' at step 2 is -1"):
        train(job)
    assert [(line["step"], line["train/learning_rate"]) for line in metrics_of(job)] == [(1, 1.5e-3)]
