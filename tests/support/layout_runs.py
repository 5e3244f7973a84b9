"""Runs of the tiny job on layouts, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.jobs import make_job, metrics_of
from tests.support.layouts import Part
from tests.support.runs import FOUR_MICRO_BATCHES, weights
from titanlite.job import Job
from titanlite.train import train

BASE = [
    "--model.overrides.tie_word_embeddings=false",  # for pipeline parallel
    "--model.overrides.head_dim=16",  # float8 needs multiples of 16 on each rank
    "--metrics.log_freq=1",
    FOUR_MICRO_BATCHES,
]
STEPS = 3
# Keys that change the numbers.
NUMERIC = ("--float8", "--data", "--model", "--moe", "--optimizer", "--stages")


def job_of(folder: Path, corpus: Path, part: Part, name: str, steps: int = STEPS) -> Job:
    keys = [*BASE, f"--training.steps={steps}", *part.keys]
    return make_job(folder, corpus, *keys, name=name, world_size=part.ranks)


def train_on_rank(folder: Path, corpus: Path, part: Part, name: str, steps: int) -> None:
    train(job_of(folder, corpus, part, name, steps))


class Runs:
    """Runs of combinations on several ranks, and reference runs in one process. Each reference runs once.
    `program` trains: by default as the job says."""

    def __init__(self, folder: Path, corpus: Path, program: Callable[..., None] = train_on_rank):
        self.folder, self.corpus, self.program = folder, corpus, program
        self._alone: dict[tuple[tuple[str, ...], int], Job] = {}

    def alone(self, part: Part, steps: int) -> Job:
        """The reference run in one process, with the keys of `part` that change the numbers."""
        keys = tuple(k for k in part.keys if k.startswith(NUMERIC))
        if (keys, steps) not in self._alone:
            part, name = Part(1, list(keys)), f"alone-{len(self._alone)}"
            self.program(self.folder, self.corpus, part, name, steps)
            self._alone[keys, steps] = job_of(self.folder, self.corpus, part, name, steps)
        return self._alone[keys, steps]

    def assert_equal(
        self, name: str, part: Part, steps: int = STEPS, program: Callable[..., None] | None = None
    ) -> None:
        """Train with `part` on its ranks, by `program` if it is given, and compare the run with its
        reference."""
        ranks.run(part.ranks, program or self.program, self.folder, self.corpus, part, name, steps)
        self.compare(name, part, steps)

    def compare(self, name: str, part: Part, steps: int) -> None:
        """Compare a run with its reference."""
        job, alone = job_of(self.folder, self.corpus, part, name, steps), self.alone(part, steps)
        # With context parallel each rank scales its own tokens: the error is as large as that of float8
        # itself.
        noisy = any(key.endswith("tensorwise") for key in part.keys) and "cp" in name
        loss, norm, weight = (5e-4, 1e-2, 0.1) if noisy else (1e-4, 1e-3, 2e-3)
        for ours, theirs in zip(metrics_of(job), metrics_of(alone), strict=True):
            for key in ("step", "data/batch_sha", "progress/total_tokens"):
                assert ours[key] == theirs[key], key
            assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=loss)
            assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=norm)
            for key in theirs:  # those of a detailed report, of which a group may have few tokens
                if key.startswith(("loss/", "logits/", "train/accuracy")):
                    assert ours[key] == pytest.approx(theirs[key], rel=10 * loss, abs=1e-2), key
        actual, wanted = weights(job, steps), weights(alone, steps)
        for key, value in wanted.items():
            error = ((actual[key] - value).norm() / value.norm()).item()
            assert error < weight, f"the relative error of {key} is {error:.1e}"
