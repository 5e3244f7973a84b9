"""Losses from outside titanlite with a mistake: the cross-entropy is computed, or only summed, in bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from titanlite.losses import WHOLE_VOCABULARY, Loss, LossFunction, VocabularyShard


@dataclass(frozen=True, kw_only=True)
class SummedInBF16(Loss, name="summed_in_bf16"):
    """Cross-entropy whose token losses are summed in bf16."""

    def build(
        self, backend: str | None = None, vocabulary: VocabularyShard = WHOLE_VOCABULARY
    ) -> LossFunction:
        def loss(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
            logits_NV = F.linear(hidden_BTD, weight_VD.to(hidden_BTD.dtype)).flatten(0, 1)
            losses_N = F.cross_entropy(logits_NV, targets_BT.flatten(), reduction="none")
            return losses_N.bfloat16().sum().float()

        return loss

    @property
    def is_cross_entropy(self) -> bool:
        return True
