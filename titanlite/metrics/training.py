"""The metrics of every report: loss, learning rate and progress of the training, the model's own metrics, and
compilations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from titanlite.checkpoint.state import TrainState
from titanlite.metrics.guard import StepGuard
from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.parallel.compile import Compilations
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.ranks import Ranks


class TrainingMetrics(OpenMetric):
    """Loss, learning rate and progress.

    Metrics:
        train/loss (nats per token): mean loss over all targets that count; NaN if there is none
            ([data.md](data.md#chat))
        train/targets (tokens): targets that count
        train/perplexity: exp(`train/loss`)
        train/grad_norm: total norm of the gradient before clipping
        train/learning_rate: `optimizer.lr` times the schedule's factor, without the multipliers of parameter
            groups
        train/skipped_steps (steps): steps of the run whose update was skipped: not finite or, with
            `guard.skip_sigma`, outliers
        progress/total_tokens (tokens): targets that the run has trained on or skipped (`train/skipped_steps`)
        progress/remaining_tokens (tokens): seq_len tokens for each sequence that the run has left
        progress/sequences (sequences): sequences that the run has trained on or skipped: the number of the
            next one
        data/skipped_sequences (sequences): sequences skipped for good that the run has passed
            ([data.md](data.md#order)); absent if it skips none
        data/batch_sha: hash of the step's sequences, 16 hexadecimal digits: equal on every layout
    """

    def __init__(
        self,
        state: TrainState,
        guard: StepGuard,
        ranks: Ranks,
        learning_rate: Callable[[int, int], float],
        remaining_tokens: Callable[[], int],
    ):
        """`learning_rate`: of a step and its first sequence."""
        self._state, self._guard, self._ranks = state, guard, ranks
        self._learning_rate, self._remaining_tokens = learning_rate, remaining_tokens

    def measure(self, step: StepResult) -> dict[str, Any]:
        """The metrics. Waits for the device. Collective."""
        state, num_targets = self._state, int(step.num_targets)
        loss = step.loss.item() if num_targets else math.nan
        values: dict[str, Any] = {
            "train/loss": loss,
            "train/targets": num_targets,
            "train/perplexity": perplexity(loss),
            "train/grad_norm": step.grad_norms.total.item(),
            "train/skipped_steps": self._guard.skipped_steps(),
            "train/learning_rate": self._learning_rate(step.step, step.first_sequence),
            "progress/total_tokens": int(state.tokens),
            "progress/sequences": state.num_sequences,
            "progress/remaining_tokens": self._remaining_tokens(),
            "data/batch_sha": self._ranks.sum_u64(sum(batch.hash for batch in step.micro_batches)),
        }
        if state.skipped:
            values["data/skipped_sequences"] = state.skipped.below(state.num_sequences).count()
        return values


def perplexity(loss: float) -> float:
    """exp(loss); infinity where a float would overflow."""
    return math.inf if loss >= 700 else math.exp(loss)


class ModelMetrics(OpenMetric):
    """Auxiliary losses and statistics of the model.

    Metrics:
        train/z_loss (nats per token): mean z-loss, with its multiplier (`loss.z_loss_multiplier`); not part
            of `train/loss`
        train/mtp_loss (nats per token): mean loss of multi-token prediction, with its factor
            (`mtp_loss_factor`); not part of `train/loss`
        train/NAME (nats per token): auxiliary loss NAME of the model or of a loss from outside the package;
            not part of `train/loss`
        model/NAME: statistic NAME of the model, the mean over ranks
    """

    def __init__(self, model: ShardedModel, ranks: Ranks):
        self._model, self._ranks = model, ranks

    def measure(self, step: StepResult) -> dict[str, float]:
        """The metrics. Waits for the device. Collective."""
        shares = {f"train/{name}": value for name, value in self._model.auxiliary_losses.items()}
        for name, value in self._model.net.statistics().items():
            shares[f"model/{name}"] = value / self._ranks.size
        sums = self._ranks.sum_scalars(*shares.values()) if shares else ()
        return {key: value.item() for key, value in zip(shares, sums)}


class CompileMetrics(OpenMetric):
    """Compilations since the previous report.

    Metrics:
        compile/graphs (graphs): graphs compiled since the previous report; after the first report a
            recompilation, whose reason is logged. Each sequence length is compiled once
        compile/seconds (s): time of these compilations
    """

    def __init__(self) -> None:
        self._compilations = Compilations()

    def measure(self, step: StepResult) -> dict[str, float]:
        """The metrics; {} without a compilation."""
        return self._compilations.since_last()
