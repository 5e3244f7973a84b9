"""A loss from outside the package: cross-entropy with a z-loss (PaLM, Chowdhery et al. 2022), which keeps the
logits' log-sum-exp near zero. It also works with tensor parallel. The built-in losses have a z-loss of their
own, loss.z_loss_multiplier, which train/loss does not include.

To use it, put this file into the current directory or install it, and write

    [job]
    imports = ["z_loss"]

    [loss]
    name = "z_loss"
    coefficient = 1e-4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from titanlite.losses import IGNORE, WHOLE_VOCABULARY, Loss, LossFunction, VocabularyShard


@dataclass(frozen=True, kw_only=True)
class ZLoss(Loss, name="z_loss"):
    """Cross-entropy plus coefficient * log(sum(exp(logits)))^2, over the full logits, in fp32."""

    coefficient: float = 1e-4
    """Weight of the z-loss."""

    def build(
        self, backend: str | None = None, vocabulary: VocabularyShard = WHOLE_VOCABULARY
    ) -> LossFunction:
        def z_loss(
            hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, targets_BT: torch.Tensor
        ) -> torch.Tensor:
            # Under tensor parallel the weight has this rank's rows of the vocabulary only: `vocabulary`
            # combines the results of all ranks.
            logits_NV = F.linear(hidden_BTD, weight_VD.to(hidden_BTD.dtype)).float().flatten(0, 1)
            targets_N = targets_BT.flatten()
            log_sum_N = vocabulary.log_sum_exp(logits_NV)
            losses_N = log_sum_N - vocabulary.target_logits(logits_NV, targets_N)
            losses_N = losses_N + self.coefficient * log_sum_N.square()
            return torch.where(targets_N == IGNORE, 0.0, losses_N).sum()  # a sum, never a mean

        # The all-reduces of a sharded vocabulary stay outside of compiled graphs.
        if backend is None or not vocabulary.is_whole:
            return z_loss
        return torch.compile(z_loss, fullgraph=True, backend=backend)
