"""A metric from outside the package: how much of a step's text repeats the text shortly before. To use it,
put this file into the current directory or install it, and write

    [job]
    imports = ["repeated_tokens"]

    [[metrics.extra]]
    name = "repeated_tokens"
    distance = 8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titanlite.config.component import check_at_least
from titanlite.metrics.metric import MeasuredRun, Metric, OpenMetric, StepResult
from titanlite.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class RepeatedTokens(Metric, name="repeated_tokens"):
    """Repetition in the text that a step trains on.

    Metrics:
        text/repeated_tokens (share): tokens that are among the `distance` tokens before them
    """

    distance: int = 1
    """Number of tokens before a token in which it is looked for."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "distance")

    def build(self, run: MeasuredRun) -> OpenMetric:
        return OpenRepeatedTokens(run.rt.ranks, self.distance)


class OpenRepeatedTokens(OpenMetric):
    """Counts on each rank, and adds up over the data-parallel ranks."""

    def __init__(self, ranks: Ranks, distance: int):
        self.ranks, self.distance = ranks, distance

    def measure(self, step: StepResult) -> dict[str, float]:
        repeated = tokens = 0
        for batch in step.micro_batches:
            is_repeated = torch.zeros_like(batch.inputs, dtype=torch.bool)
            for shift in range(1, self.distance + 1):
                is_repeated[:, shift:] |= batch.inputs[:, shift:] == batch.inputs[:, :-shift]
            repeated += int(is_repeated.sum())
            tokens += batch.inputs.numel()
        return {"text/repeated_tokens": self.ranks.count(repeated).item() / self.ranks.count(tokens).item()}
