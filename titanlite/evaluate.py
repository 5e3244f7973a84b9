"""Validation: the mean loss per token over fixed held-out sequences, equal on every parallel layout.

Micro-batches have the same sequences for any number of ranks, and their loss sums are added in float64 on the
host. A rank that has no sequences left runs padding, so that all ranks enter every collective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from titanlite.config.component import ConfigError, check_at_least
from titanlite.data.loader import SequenceDataset
from titanlite.metrics.meter import perplexity
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.progress import Progress
from titanlite.runtime.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation on data.validation_sources, or on the sequences that data.holdout_sequences keeps from
    training."""

    enable: bool = False
    """Validate during training and after the last step."""
    freq: int = 500
    """Steps between validations."""
    steps: int = -1
    """Batches of global_batch_size sequences to validate on; -1: all held-out sequences."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "freq")
        if self.steps < 1 and self.steps != -1:
            raise ConfigError(f"{self.steps} is neither -1 nor at least 1", "steps")

    def check(self, has_sequences: bool) -> None:
        """Raises ConfigError if validation is enabled and [data] has no sequences for it."""
        if self.enable and not has_sequences:
            raise ConfigError(
                "there are no sequences to validate on: set data.holdout_sequences, for example to 256, or "
                "give [[data.validation_sources]]",
                "validation.enable",
            )

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` has a validation."""
        return self.enable and (step == last_step or step % self.freq == 0)

    def num_sequences(self, held_out: int, batch_size: int) -> int:
        """Number of sequences of one validation. `held_out`: number of held-out sequences."""
        return held_out if self.steps == -1 else min(held_out, self.steps * batch_size)


def validate(
    model: ShardedModel, sequences: SequenceDataset, num_sequences: int, rt: Runtime
) -> dict[str, float]:
    """The metrics of a validation on held-out sequences [0, num_sequences). Collective."""
    size = rt.batch.micro_batch_size
    stride = size * rt.mesh.dp_size  # sequences that the data-parallel ranks read together
    padded = -(-num_sequences // stride) * stride  # so that all ranks run the same number of batches
    begins = range(rt.mesh.dp_rank * size, padded, stride)
    loss_sum, num_targets = 0.0, 0
    for begin in Progress(begins, desc="validating", unit="batch", delay=2, leave=False, disable=rt.rank > 0):
        numbers = np.arange(begin, max(min(begin + size, num_sequences), begin))
        batch = sequences.batch(numbers.tolist(), sequences.held_out(numbers), num_sequences=size)
        loss_sum += model.loss_sum(batch.to(rt.device)).item()
        num_targets += batch.num_targets if rt.mesh.is_data_leader else 0
    # These sums are on the host, because MPS has no float64.
    total = rt.sum(torch.tensor([loss_sum, num_targets], dtype=torch.float64))
    loss = (total[0] / total[1]).item()
    return {
        "eval/loss": loss,
        "eval/perplexity": perplexity(loss),
        "eval/tokens": int(total[1]),
    }
