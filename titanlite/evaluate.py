"""Validation: the mean loss over fixed held-out rows, token by token -- the same number on every layout.

Rows are cut into the same micro-batches whatever the number of ranks, their sums are added in float64 on the
host, and ranks that run out of rows run padding, so all of them enter every collective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from titanlite.config.component import ConfigError
from titanlite.data.loader import Rows
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.progress import Progress
from titanlite.runtime.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation on data.validation_sources, or on the rows that data.holdout_rows sets aside."""

    enable: bool = False
    """Validate while training and at the end."""
    freq: int = 500
    """Steps between validations."""
    steps: int = -1
    """Batches of global_batch_size rows to validate on; -1: all held-out rows."""

    def __post_init__(self) -> None:
        if self.freq < 1:
            raise ConfigError(f"{self.freq} is below 1", "freq")
        if self.steps < 1 and self.steps != -1:
            raise ConfigError(f"{self.steps} is neither -1 nor at least 1", "steps")

    def num_rows(self, held_out: int, batch_rows: int) -> int:
        """Rows that one validation reads."""
        return held_out if self.steps == -1 else min(held_out, self.steps * batch_rows)


def validate(model: ShardedModel, rows: Rows, num_rows: int, rt: Runtime) -> dict[str, float]:
    """Mean loss a token over held-out rows [0, num_rows). Collective."""
    size, ranks = rt.plan.micro_batch_rows, rt.mesh.dp_size
    loss_sum, num_targets = 0.0, 0
    begins = range(rt.mesh.dp_rank * size, -(-num_rows // (size * ranks)) * size * ranks, size * ranks)
    for begin in Progress(begins, desc="validating", unit="batch", delay=2, leave=False, disable=rt.rank > 0):
        numbers = np.arange(begin, max(min(begin + size, num_rows), begin))
        batch = rows.batch(numbers.tolist(), rows.held_out(numbers), num_rows=size)
        loss_sum += model.loss_sum(batch.to(rt.device)).item()
        num_targets += batch.num_targets if rt.mesh.is_data_leader else 0
    total = rt.sum(
        torch.tensor([loss_sum, num_targets], dtype=torch.float64)
    )  # on the host: MPS has no float64
    loss = (total[0] / total[1]).item()
    return {
        "eval/loss": loss,
        "eval/perplexity": math.inf if loss > 700 else math.exp(loss),
        "eval/tokens": int(total[1]),
    }
