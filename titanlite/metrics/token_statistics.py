"""Statistics of the token losses of one step: accuracy, loss by position and by source, the size of the
logits, and the difference between the job's loss and a loss in higher precision.

An additional forward of the head computes them, before the loss and without gradients, so that they work
with every loss and change nothing in the step. Sums and maxima stay on the device until they are read.

Cost: the head's product once more, and a few passes over the logits. Memory: the logits of CHUNK_TOKENS
tokens in their own dtype and in fp32. They are freed before the loss allocates more at the same place: logits
of 4,096 tokens by default, and the gradient of the head's weight in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from titanlite.losses import IGNORE, VocabularyShard, soft_capped

CHUNK_TOKENS = 1024
POSITION_BINS = 16
COMPARED_TOKENS = 512  # per rank and step, compared with logits in fp64
COMPARED_ROWS = 2048  # rows of the head's weight that are in fp64 at once


class Difference(NamedTuple):
    """The loss of a step minus the loss in fp32, in nats per token. `of_loss`: the contribution of
    softmax, logarithm and sum of the job's loss, over all tokens. `of_logits`: the contribution of the
    rounding of the logits, the mean over the compared tokens, with its standard error."""

    of_loss: float
    of_logits: float
    standard_error: float


class TokenStatistics:
    """The statistics of one step on this rank; `observe` adds a micro-batch.

    `sums` and `maxima` are to be reduced over the ranks, with each token on one rank. `difference` and
    `metrics` take the reduced values, on the host. `seq_len`: the longest sequence length of the job, which
    is divided into POSITION_BINS ranges of positions. Shorter sequences only fill the first ranges, so that a
    range has the same positions in every step. `sources`: names of the sources. `is_cross_entropy`: whether
    the job's loss is the cross-entropy, so that it can be compared with the one in fp32."""

    def __init__(
        self,
        *,
        seq_len: int,
        num_micro_batches: int,
        sources: Sequence[str],
        is_cross_entropy: bool,
        device: torch.device,
    ):
        self.seq_len, self.sources, self.is_cross_entropy = seq_len, sources, is_cross_entropy
        self._compared_tokens = max(COMPARED_TOKENS // num_micro_batches, 1)
        self._totals = torch.zeros(7, device=device)
        self._by_position = torch.zeros(2, POSITION_BINS, device=device)
        self._by_source = torch.zeros(2, len(sources), device=device)
        self.maxima = torch.zeros(1, device=device)

    @property
    def sums(self) -> torch.Tensor:
        """All sums over this rank's tokens, fp32 [n]."""
        return torch.cat([self._totals, self._by_position.flatten(), self._by_source.flatten()])

    @torch.no_grad()
    def observe(
        self,
        hidden_BTD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_BT: torch.Tensor,
        positions_T: torch.Tensor,
        source_ids_B: torch.Tensor | None,
        vocabulary: VocabularyShard,
    ) -> None:
        """Add the tokens of a micro-batch. Collective over the ranks that share the vocabulary."""
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        weight_VD = weight_VD.to(hidden_ND.dtype)
        chunks = zip(hidden_ND.split(CHUNK_TOKENS), targets_N.split(CHUNK_TOKENS))
        per_chunk = [_statistics(h_CD, weight_VD, targets_C, vocabulary) for h_CD, targets_C in chunks]
        counts_N, loss_N, hit_N, log_z_N, largest_N = torch.cat(per_chunk, 1)
        self._totals[:4] += torch.stack([counts_N, loss_N, hit_N, log_z_N]).sum(1)
        if self.is_cross_entropy:
            count = min(self._compared_tokens, len(targets_N))
            sample = torch.arange(count, device=targets_N.device) * len(targets_N) // count  # evenly spread
            exact_S = exact_losses(hidden_ND[sample], weight_VD, targets_N[sample], vocabulary)
            difference_S = (loss_N[sample] - exact_S).float()
            self._totals[4:] += torch.stack([counts_N[sample], difference_S, difference_S.square()]).sum(1)
        self.maxima = torch.maximum(self.maxima, largest_N.amax())
        bins_N = (positions_T * POSITION_BINS // self.seq_len).expand_as(targets_BT).flatten()
        self._by_position += _sums_by_group(bins_N, POSITION_BINS, loss_N, counts_N)
        if source_ids_B is not None:
            ids_N = source_ids_B[:, None].expand_as(targets_BT).flatten()
            self._by_source += _sums_by_group(ids_N, len(self.sources), loss_N, counts_N)

    def difference(self, sums: torch.Tensor, loss: float) -> Difference | None:
        """The difference between the step's `loss`, as the job computes it, and the loss in fp32; None if
        they cannot be compared."""
        tokens, losses, _, _, compared, total, squares = sums[:7].tolist()
        if not compared:
            return None
        mean = total / compared
        variance = max(squares / compared - mean * mean, 0.0)
        return Difference(loss - losses / tokens, mean, (variance / compared) ** 0.5)

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor, loss: float) -> dict[str, float]:
        """The metrics of a step with this `loss`; {} if no target counts."""
        sizes = [len(self._totals), self._by_position.numel(), self._by_source.numel()]
        totals, by_position, by_source = sums.split(sizes)
        tokens, _, hits, log_z, *_ = totals.tolist()
        if not tokens:
            return {}
        values = {
            "train/accuracy": hits / tokens,
            "logits/max": maxima.item(),
            "logits/mean_log_z": log_z / tokens,
        }
        if (difference := self.difference(sums, loss)) is not None:
            values["numerics/loss_minus_fp32"] = difference.of_loss + difference.of_logits
        names = [f"loss/position_{i:02}" for i in range(POSITION_BINS)]
        values |= _means(names, by_position)
        if len(self.sources) > 1:  # the mean of a single source is train/loss
            values |= _means([f"loss/source/{name}" for name in self.sources], by_source)
        return values


def exact_losses(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, vocabulary: VocabularyShard
) -> torch.Tensor:
    """The cross-entropy of each token, [N], with logits that are not rounded to the dtype of the hidden
    states. Zero for targets that do not count.

    In fp64, because no setting of torch replaces its products by TF32; in fp32 on MPS, which has no fp64. The
    weight is converted in chunks of rows, so that there is no copy of all of it."""
    dtype = torch.float32 if hidden_ND.device.type == "mps" else torch.float64
    hidden_ND = hidden_ND.to(dtype)
    chunks = [
        soft_capped(F.linear(hidden_ND, rows.to(dtype)), vocabulary.softcap).logsumexp(-1)
        for rows in weight_VD.split(COMPARED_ROWS)
    ]
    log_z_N = vocabulary.log_sum_exp(torch.stack(chunks, 1))
    row_N, is_here_N = vocabulary.rows(targets_N, len(weight_VD))
    target_N = soft_capped((hidden_ND * weight_VD[row_N].to(dtype)).sum(-1), vocabulary.softcap)
    target_N = vocabulary.all_reduce_sum(torch.where(is_here_N, target_N, 0.0))
    return torch.where(targets_N != IGNORE, log_z_N - target_N, 0.0)


def _statistics(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, targets_C: torch.Tensor, vocabulary: VocabularyShard
) -> torch.Tensor:
    """Statistics of each token, fp32 [5, C]: 1, its loss, 1 if no logit exceeds the logit of the target,
    log Z, and the largest magnitude of a logit; zeros if its target does not count. Logits have the dtype of
    the hidden states, and softmax is in fp32, as a loss should compute it."""
    logits_CV = vocabulary.logits(hidden_CD, weight_VD)
    target_C = vocabulary.target_logits(logits_CV, targets_C).float()
    high_C, low_C = logits_CV.amax(-1).float(), logits_CV.amin(-1).float()
    top_C = vocabulary.all_reduce_max(high_C)
    largest_C = vocabulary.all_reduce_max(torch.maximum(high_C, -low_C))
    # In place, which overwrites the logits if they are in fp32: nothing below needs them.
    powers_CV = logits_CV.float().sub_(top_C[:, None]).exp_()
    log_z_C = vocabulary.all_reduce_sum(powers_CV.sum(-1)).log() + top_C
    is_hit_C = (target_C >= top_C).float()
    values_5C = torch.stack([torch.ones_like(top_C), log_z_C - target_C, is_hit_C, log_z_C, largest_C])
    return torch.where(targets_C != IGNORE, values_5C, 0.0)


def _sums_by_group(ids_N: torch.Tensor, num_groups: int, *values_N: torch.Tensor) -> torch.Tensor:
    """The sum of each of the values over the tokens of each group, [values, groups]. Not by index_add, which
    on CUDA adds in no fixed order."""
    is_in_GN = ids_N == torch.arange(num_groups, device=ids_N.device)[:, None]
    return torch.stack([torch.where(is_in_GN, value_N, 0.0).sum(1) for value_N in values_N])


def _means(names: Sequence[str], sums: torch.Tensor) -> dict[str, float]:
    """The mean of each group that has tokens. `sums`: of the losses, then the numbers of tokens."""
    totals, counts = sums.view(2, -1).tolist()
    return {name: total / count for name, total, count in zip(names, totals, counts) if count}
