"""Validation: loss per token and bits per byte over fixed held-out sequences, in total and by source, and
scores of tasks, equal on every parallel layout.

A micro-batch has sequences of one source, so its loss sum counts for that source. Micro-batches have
the same sequences for any number of ranks, and their sums are added in float64 on the host. A rank that has
no sequences of a source left runs padding, so that all ranks enter every collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from titanlite.config.amount import Interval
from titanlite.config.component import ConfigError, check_at_least
from titanlite.data.held_out import ValidationSequences
from titanlite.losses import IGNORE
from titanlite.metrics.training import perplexity
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.progress import Progress
from titanlite.runtime.runtime import Runtime
from titanlite.tasks.requests import OpenTask, batched, make_rows, make_task_batch, open_task
from titanlite.tasks.task import Task
from titanlite.tokenizers.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation on data.validation_sources, or on the sequences of data.holdout_sequences, and on tasks."""

    enable: bool = False
    """Validate during training and after the last step."""
    freq: Interval = 500
    """Steps between validations."""
    steps: int = -1
    """Batches of global_batch_size sequences; -1: all held-out sequences. Sources share them by weight if
    weights differ, else by size."""
    tasks: list[Task] = field(default_factory=list)
    """Tasks to score in each validation, one `[[validation.tasks]]` table each."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "freq")
        names = [task.name for task in self.tasks]
        if both := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two tasks have the name {both[0]!r}", "tasks")
        if self.steps < 1 and self.steps != -1:
            raise ConfigError(f"{self.steps} is neither -1 nor at least 1", "steps")

    def check(self, has_sequences: bool) -> None:
        """Raises ConfigError if validation is enabled without sequences of [data] and without tasks."""
        if self.enable and not has_sequences and not self.tasks:
            raise ConfigError(
                "there are no sequences to validate on: set data.holdout_sequences, for example to 256, or "
                "give [[data.validation_sources]] or [[validation.tasks]]",
                "validation.enable",
            )

    def open_tasks(self, tokenizer: Tokenizer, seq_len: int) -> list[OpenTask]:
        """Read and tokenise the tasks, if validation is enabled. Raises ConfigError, which names the file and
        the line."""
        return [open_task(task, tokenizer, seq_len) for task in self.tasks if self.enable]

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` has a validation."""
        return self.enable and (step == last_step or step % self.freq == 0)

    def num_sequences(self, held_out: int, batch_size: int) -> int:
        """Number of sequences of one validation. `held_out`: number of held-out sequences."""
        return held_out if self.steps == -1 else min(held_out, self.steps * batch_size)


def validate(
    model: ShardedModel,
    sequences: ValidationSequences,
    num_sequences: int,
    rt: Runtime,
    bytes_per_token: np.ndarray | None = None,
) -> dict[str, float]:
    """The metrics of a validation on `num_sequences` held-out sequences. `bytes_per_token`: of the tokenizer;
    None: no bits per byte. Collective.

    Metrics:
        eval/loss (nats per token): mean loss over the held-out sequences; if weights of validation sources
            differ, the mean of the sources' losses by weight
        eval/perplexity: exp(`eval/loss`)
        eval/bits_per_byte (bits per byte): the loss per byte of text ([below](#validation-by-source)), by
            weight in the same way
        eval/NAME/loss, eval/NAME/perplexity, eval/NAME/bits_per_byte: with several sources: the same of each
            ([below](#validation-by-source))
        eval/ema_loss, eval/ema_perplexity: with `[ema]`: the same of the [average of the
            weights](optimizers.md#averages-of-weights)
        eval/tokens (tokens): targets of the validation that count
        eval/sequences (sequences): sequences of the validation
    """
    held_out = sequences.for_validation
    ranges = held_out.ranges(num_sequences)
    size = rt.batch.micro_batch_size
    stride = size * rt.mesh.dp_size  # sequences that the data-parallel ranks read together
    batches = []
    for k, own in enumerate(ranges):  # each source is padded, so that all ranks run as many batches
        first, padded = own.start + rt.mesh.dp_rank * size, -(-len(own) // stride) * stride
        batches += [(k, begin) for begin in range(first, own.start + padded, stride)]
    # These sums are on the host, because MPS has no float64.
    sums = torch.zeros(3, len(ranges), dtype=torch.float64)  # of losses, targets and bytes by source
    for k, begin in Progress(
        batches, desc="validating", unit="batch", delay=2, leave=False, disable=rt.rank > 0
    ):
        numbers = np.arange(begin, max(min(begin + size, ranges[k].stop), begin))
        batch = sequences.batch(numbers.tolist(), sequences.held_out(numbers), num_sequences=size)
        sums[0, k] += model.loss_sum(batch.to(rt.device)).item()
        if rt.mesh.is_data_leader:
            sums[1, k] += batch.num_targets
            sums[2, k] += 0 if bytes_per_token is None else num_bytes(batch.targets, bytes_per_token)
    metrics = validation_metrics(rt.ranks.sum(sums), held_out.names, held_out.weights)
    return metrics | {"eval/sequences": sum(map(len, ranges))}


def num_bytes(targets: torch.Tensor, bytes_per_token: np.ndarray) -> int:
    """The bytes of text that the targets that count stand for. `targets`: int64, on the host."""
    return int(bytes_per_token[targets[targets != IGNORE].numpy()].sum())


def validation_metrics(
    sums: torch.Tensor, names: Sequence[str], weights: Sequence[float] | None
) -> dict[str, float]:
    """The metrics of a validation. `sums`: of losses, targets and bytes by source, float64 [3, sources].
    `weights`: of the sources' values in the total; None: the total is the mean over all targets, or bytes.
    A source without targets has no metrics and no weight."""
    by_source = {k: _means(*column) for k, column in enumerate(sums.T.tolist()) if column[1]}
    loss, bits = _means(*(sum(row) for row in sums.tolist()))
    if weights is not None:
        shares = [weights[k] / sum(weights[k] for k in by_source) for k in by_source]
        loss = sum(share * loss_k for share, (loss_k, _) in zip(shares, by_source.values()))
        all_bits = [bits_k for _, bits_k in by_source.values() if bits_k is not None]
        is_known = len(all_bits) == len(by_source)
        bits = sum(share * bits_k for share, bits_k in zip(shares, all_bits)) if is_known else None
    metrics = _named("eval", loss, bits) | {"eval/tokens": int(sums[1].sum())}
    for k, means in by_source.items() if len(names) > 1 else ():  # the mean of a single source is eval/loss
        metrics |= _named(f"eval/{names[k]}", *means)
    return metrics


def _means(loss: float, num_targets: float, num_bytes: float) -> tuple[float, float | None]:
    """The loss per target, and bits per byte: None if there are no bytes."""
    bits = loss / num_bytes / math.log(2) if num_bytes else None
    return loss / num_targets if num_targets else math.nan, bits


def _named(prefix: str, loss: float, bits_per_byte: float | None) -> dict[str, float]:
    metrics = {f"{prefix}/loss": loss, f"{prefix}/perplexity": perplexity(loss)}
    return metrics if bits_per_byte is None else metrics | {f"{prefix}/bits_per_byte": bits_per_byte}


def score_tasks(
    model: ShardedModel, tasks: Sequence[OpenTask], vocab_size: int, batch_tokens: int, rt: Runtime
) -> list[np.ndarray]:
    """The scores of each task's requests, for OpenTask.metrics. `vocab_size`: the tokenizer's.
    `batch_tokens`: maximum number of tokens of a batch. Collective."""
    requests = [request for task in tasks for request in task.requests]
    sizes = [question.num_options for task in tasks for question in task.questions]
    rows = make_rows(requests, sizes if model.can_share_prefixes else [1] * len(requests), batch_tokens)
    batches, stride = batched(rows, batch_tokens), rt.mesh.dp_size
    padded = -(-len(batches) // stride) * stride  # so that all ranks run the same number of batches
    scores = torch.zeros(len(requests), 2, dtype=torch.float64)
    turns = range(rt.mesh.dp_rank, padded, stride)
    for turn in Progress(turns, desc="tasks", unit="batch", delay=2, leave=False, disable=rt.rank > 0):
        own = batches[turn] if turn < len(batches) else []
        batch, segments, num_segments = make_task_batch(own)
        result = model.score(batch.to(rt.device), vocab_size, segments.to(rt.device), num_segments)
        for row, values in zip(own, result.cpu().double()):
            scores[row.numbers] = values[: len(row.numbers)]
    by_task = rt.ranks.sum(scores).split([len(task.requests) for task in tasks])
    return [scores.numpy() for scores in by_task]
