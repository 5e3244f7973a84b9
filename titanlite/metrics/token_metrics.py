"""The metrics of a step's token losses, and a warning about a loss in too low precision."""

from __future__ import annotations

import torch

from titanlite.log import logger
from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.metrics.token_statistics import Difference
from titanlite.runtime.runtime import Runtime

# Differences to the loss in fp32 without a warning, in nats per token. Two losses with softmax, logarithm and
# sum in fp32 are within 1e-6 of each other. bf16 rounds a logit between 16 and 32 by up to 1/16: the mean of
# 512 tokens has a standard error of 1/16 / sqrt(3 * 512) = 1.6e-3.
MAX_DIFFERENCE_OF_LOSS = 5e-4
MAX_DIFFERENCE_OF_LOGITS = 5e-3


class TokenMetrics(OpenMetric):
    """Accuracy, losses by position and by source, and the size of the logits, in detailed reports.

    Metrics:
        train/accuracy (share): targets that are the likeliest token; a tie counts as a hit
        loss/position_NN (nats per token): mean loss by position, in 16 equal ranges of `training.seq_len`, NN
            from 00 to 15; steps of shorter sequences have the first of them
        loss/source/NAME (nats per token): with several sources: mean loss of each
        logits/max: largest magnitude of a logit
        logits/mean_log_z: mean of log Z, with Z the sum of exp(logits)
        numerics/loss_minus_fp32 (nats per token): `train/loss` minus the cross-entropy in fp32
    """

    def __init__(self, rt: Runtime):
        self._rt = rt
        self._num_imprecise = 0  # reports with a difference that rounding does not explain

    def measure(self, step: StepResult) -> dict[str, float]:
        """The metrics. Warns if the loss is computed in too low precision. Waits for the device.
        Collective."""
        if (statistics := step.token_statistics) is None:
            return {}
        # All ranks along `tp` have the same tokens, which count once.
        sums = statistics.sums if self._rt.mesh.is_tp_leader else torch.zeros_like(statistics.sums)
        sums, maxima = self._rt.ranks.sum(sums).cpu().double(), self._rt.ranks.max(statistics.maxima).cpu()
        loss = step.loss.item()
        difference = statistics.difference(sums, loss)
        if difference is not None and self._rt.rank == 0:
            self.check(step.step, difference)
        return statistics.metrics(sums, maxima, loss)

    def check(self, step: int, difference: Difference) -> None:
        """Warn if `difference`, of this step, is larger than rounding explains: at the first report that
        shows it, and at every tenth from then on."""
        if abs(difference.of_loss) > MAX_DIFFERENCE_OF_LOSS:
            size, advice = difference.of_loss, "compute its softmax, logarithm and sum in fp32"
        elif abs(difference.of_logits) > MAX_DIFFERENCE_OF_LOGITS + 3 * difference.standard_error:
            size, advice = difference.of_logits, "the logits may be too large for their dtype (logits/max)"
        else:
            return
        if self._num_imprecise % 10 == 0:
            logger.warning(
                f"step {step}: the loss is computed in too low precision: it is {size:+.2g} nats per token "
                f"off the cross-entropy in fp32 (numerics/loss_minus_fp32); {advice}"
            )
        self._num_imprecise += 1
