"""Losses: functions of hidden states, the head's weight and targets that return the sum of the token losses
in fp32.

Losses are sums, never means: the training step divides by the number of targets that count, over all ranks
and micro-batches.
Shape suffixes: B batch, T tokens, D model dim, V vocabulary, N = B * T, C tokens of a chunk.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from titanlite.config.component import Component, ConfigError, check_at_least
from titanlite.torch_compat import deterministic_options, loss_compile_options

IGNORE = -100  # a target that does not count; torch's default of ignore_index


# hidden [B, T, D], head weight [V, D], targets int64 [B, T] -> sum over the targets that count, fp32 scalar
# (a vector if the loss has auxiliary losses)
LossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's shard of the vocabulary under tensor parallel: the ids of its rows of the head's weight,
    and the all-reduces that combine the shards of all ranks.

    A loss has the hidden states of all tokens and this rank's rows of the weight. Every rank computes the
    same loss, and the gradient of its rows. `first_id`: the id of the first row. `is_whole`: nothing is
    sharded, and the all-reduces return their argument. `softcap`: of the model's logits
    (Decoder.logit_softcap)."""

    first_id: int = 0
    all_reduce_max: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    """Elementwise maximum over ranks, without gradient."""
    all_reduce_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    """Elementwise sum over ranks. The gradient of this rank's summand is the gradient of the sum."""
    is_whole: bool = False
    softcap: float = 0.0

    def logits(self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """The logits of this rank's rows, [N, V], in the hidden states' dtype; capped logits in fp32."""
        logits_NV = F.linear(hidden_ND, weight_VD.to(hidden_ND.dtype))
        return soft_capped(logits_NV.float(), self.softcap) if self.softcap else logits_NV

    def log_sum_exp(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """log(sum(exp(logits))) over the whole vocabulary, [N]; differentiable."""
        top_N = self.all_reduce_max(logits_NV.detach().amax(-1))
        return self.all_reduce_sum((logits_NV - top_N[:, None]).exp().sum(-1)).log() + top_N

    def target_logits(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """The logit of each target, [N]; zero for targets of -100. Differentiable."""
        row_N, is_here_N = self.rows(targets_N, logits_NV.shape[1])
        logits_N = logits_NV.gather(1, row_N[:, None]).squeeze(1)
        return self.all_reduce_sum(torch.where(is_here_N, logits_N, 0.0))

    def rows(self, targets_N: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of each target in this rank's `num_rows` rows of the head's weight, [N], and whether the
        target counts and is one of them, bool [N]; otherwise the row is 0."""
        row_N = targets_N - self.first_id
        is_here_N = (targets_N != IGNORE) & (row_N >= 0) & (row_N < num_rows)
        return torch.where(is_here_N, row_N, 0), is_here_N


WHOLE_VOCABULARY = VocabularyShard(is_whole=True)


def soft_capped(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(x / softcap) (Gemma 2); `x` for 0."""
    return softcap * torch.tanh(x / softcap) if softcap else x


@dataclass(frozen=True, kw_only=True)
class Loss(Component, makes=(Callable,)):  # type: ignore[arg-type]
    """Base of losses: `[loss] name = "..."` selects a subclass by its name."""

    supports_softcap: ClassVar[bool] = False
    """Whether the loss caps its logits by VocabularyShard.softcap. A model with such logits needs it."""

    @abstractmethod
    def build(
        self, backend: str | None = None, vocabulary: VocabularyShard = WHOLE_VOCABULARY
    ) -> LossFunction:
        """A function of hidden [B, T, D], head weight [V, D] and targets int64 [B, T] that returns the sum of
        the losses over the targets that count: fp32 scalar (with `auxiliary_losses`, a vector).

        Logits have the dtype of the hidden states; the weight's gradient has the dtype of the weight.
        `backend`: the torch.compile backend that compiles the loss; None: run eagerly. `vocabulary`: this
        rank's shard of the vocabulary.
        """

    def num_chunks(self, tokens: int) -> int:
        """The number of chunks of `tokens` tokens whose gradients the forward computes, one chunk's logits at
        a time. 0, the default: the logits of all tokens are kept for the backward."""
        return 0

    def check_softcap(self, softcap: float) -> None:
        """Raises ConfigError if the model caps its logits (Decoder.logit_softcap) and the loss does not."""
        if softcap and not self.supports_softcap:
            raise ConfigError(
                f"the model caps its logits, which {self.name} does not support (supports_softcap); use "
                "another loss or, for a new model of the family gpt, model.overrides.logit_softcap = 0.0",
                "loss.name",
            )

    @property
    def auxiliary_losses(self) -> tuple[str, ...]:
        """Names of losses that are minimised together with the token losses but reported beside them, as
        `train/NAME`; train/loss and validation do not include them. Default: none.

        With auxiliary losses the function returns a vector: the sum of the token losses, then the sum of each
        auxiliary loss over the targets that count. The value of the first entry is the sum of the token
        losses alone, its gradient the gradient of the sum of all entries; the gradients of the other entries
        are not used."""
        return ()

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the token losses are the cross-entropy of the targets. Detailed reports then compare them
        with the cross-entropy in fp32 (numerics/loss_minus_fp32). Default: no."""
        return False

    @property
    def objective(self) -> dict[str, Any]:
        """The mathematical function that is minimised, without keys that only change how it is computed. A
        resumed run must have the same objective."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss, name="cross_entropy"):
    """Cross-entropy over the full logits, in fp32. Targets of -100 do not count."""

    supports_softcap: ClassVar[bool] = True

    z_loss_multiplier: float = 0.0
    """Weight of the z-loss, the mean of log(sum(exp(logits)))^2 (PaLM: 1e-4): minimised, and logged as
    train/z_loss, but not part of train/loss and validation."""

    def __post_init__(self) -> None:
        if not 0 <= self.z_loss_multiplier < math.inf:
            raise ConfigError(
                f"{self.z_loss_multiplier} is not a finite number of at least 0", "z_loss_multiplier"
            )

    def build(
        self, backend: str | None = None, vocabulary: VocabularyShard = WHOLE_VOCABULARY
    ) -> LossFunction:
        if not vocabulary.is_whole:
            return gradient_in_forward(backend, vocabulary, lambda tokens: 1, self.z_loss_multiplier)

        def loss(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
            return cross_entropy(
                hidden_BTD, weight_VD, targets_BT, self.z_loss_multiplier, vocabulary.softcap
            )

        if not backend:
            return loss
        options = deterministic_options(backend)
        return torch.compile(loss, fullgraph=True, dynamic=False, backend=backend, options=options)

    @property
    def is_cross_entropy(self) -> bool:
        return True

    @property
    def auxiliary_losses(self) -> tuple[str, ...]:
        return ("z_loss",) if self.z_loss_multiplier else ()


@dataclass(frozen=True, kw_only=True)
class ChunkedCrossEntropy(CrossEntropy, name="chunked_cross_entropy"):
    """Cross-entropy in chunks of tokens, with cross_entropy's value and gradient in less memory. Targets of
    -100 do not count."""

    chunk_tokens: int = 4096
    """Tokens whose logits are in memory at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "chunk_tokens")

    def build(
        self, backend: str | None = None, vocabulary: VocabularyShard = WHOLE_VOCABULARY
    ) -> LossFunction:
        return gradient_in_forward(backend, vocabulary, self.num_chunks, self.z_loss_multiplier)

    @property
    def objective(self) -> dict[str, Any]:
        objective = super().objective
        del objective["chunk_tokens"]
        return {**objective, "name": CrossEntropy.name}

    def num_chunks(self, tokens: int) -> int:
        """The number of chunks for `tokens` tokens. Chunks have equal sizes if possible, so that one compiled
        graph serves them all."""
        least = -(-tokens // self.chunk_tokens)
        return next((chunks for chunks in range(least, 2 * least) if tokens % chunks == 0), least)


def cross_entropy(
    hidden_BTD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_BT: torch.Tensor,
    z_loss_multiplier: float = 0.0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Sum of -log p(target): fp32 scalar, zero (not NaN) if no target counts. With a z-loss, fp32 [2] as
    Loss.auxiliary_losses describes. The B dim is optional."""
    logits_NV = F.linear(hidden_BTD, weight_VD.to(hidden_BTD.dtype)).float().flatten(0, -2)
    logits_NV = soft_capped(logits_NV, softcap)
    targets_N = targets_BT.flatten()
    loss = F.cross_entropy(logits_NV, targets_N, reduction="sum")
    if not z_loss_multiplier:
        return loss
    z_loss = z_loss_multiplier * _sum_of_squares(logits_NV.logsumexp(-1), targets_N != IGNORE)
    return torch.stack([loss + (z_loss - z_loss.detach()), z_loss.detach()])


def gradient_in_forward(
    backend: str | None,
    vocabulary: VocabularyShard,
    num_chunks: Callable[[int], int],
    z_loss_multiplier: float = 0.0,
) -> LossFunction:
    """Cross-entropy that also computes its gradients in the forward, in `num_chunks(tokens)` chunks."""

    def torch_loss(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
        if backend or not vocabulary.is_whole:
            return loss_and_gradient_(logits_CV, targets_C, vocabulary, z_loss_multiplier)
        return eager_loss_and_gradient_(logits_CV, targets_C, z_loss_multiplier, vocabulary.softcap)

    if backend:
        options = loss_compile_options(backend)
        torch_loss = torch.compile(torch_loss, fullgraph=True, backend=backend, options=options)

    def chunk_loss(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
        if backend == "inductor" and vocabulary.is_whole and logits_CV.device.type == "cuda":
            from titanlite.cross_entropy_kernel import fused_loss_and_gradient_  # needs Triton

            return fused_loss_and_gradient_(logits_CV, targets_C, z_loss_multiplier, vocabulary.softcap)
        return torch_loss(logits_CV, targets_C)

    def chunked_cross_entropy(
        hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, targets_BT: torch.Tensor
    ) -> torch.Tensor:
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        chunks = num_chunks(len(targets_N))
        if torch.is_grad_enabled():
            total, d_weight_VD = _Chunked.apply(hidden_ND, weight_VD.detach(), targets_N, chunks, chunk_loss)
            return total + _KnownGradient.apply(weight_VD, d_weight_VD)
        weight_VD = weight_VD.to(hidden_ND.dtype)
        pairs = zip(hidden_ND.chunk(chunks), targets_N.chunk(chunks))
        return torch.stack([chunk_loss(F.linear(h_CD, weight_VD), t_C) for h_CD, t_C in pairs]).sum(0)

    return chunked_cross_entropy


def loss_and_gradient_(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    vocabulary: VocabularyShard = WHOLE_VOCABULARY,
    z_loss_multiplier: float = 0.0,
) -> torch.Tensor:
    """Sum of -log p(target), fp32 scalar; with a z-loss, fp32 [2]: this sum and the sum of the z-loss c
    (log Z)^2, Z = sum(exp(logits)). Overwrites the logits, which belong to this rank's shard of the
    vocabulary, with the gradient of both: p (1 + 2 c log Z), minus 1 at the target. Logits of a token
    that does not count become an arbitrary finite number. The logits are not yet capped by
    `vocabulary.softcap`, and the gradient is of the uncapped logits.

    Written so that the compiler makes two kernels: one for maximum and sum, one for the gradient. Values per
    token are computed outside the second kernel, which works per element.
    """
    x_CV = soft_capped(logits_CV.float(), vocabulary.softcap)
    top_C1 = vocabulary.all_reduce_max(x_CV.amax(-1, keepdim=True))
    powers_CV = (x_CV - top_C1).exp()
    sum_C1 = vocabulary.all_reduce_sum(powers_CV.sum(-1, keepdim=True))
    counts_C1 = (targets_C != IGNORE)[:, None]
    row_C1 = (targets_C - vocabulary.first_id)[:, None]
    here_C1 = counts_C1 & (row_C1 >= 0) & (row_C1 < x_CV.shape[1])
    row_C1 = torch.where(here_C1, row_C1, 0)
    target_C1 = vocabulary.all_reduce_sum(torch.where(here_C1, x_CV.gather(1, row_C1), 0.0))
    losses_C1 = torch.where(counts_C1, top_C1 - target_C1 + sum_C1.log(), 0.0)
    share_C1, one_C1 = sum_C1.reciprocal(), here_C1.float()
    is_target_CV = torch.arange(x_CV.shape[1], device=x_CV.device, dtype=torch.int32) == row_C1.int()
    total = losses_C1.sum()
    if z_loss_multiplier:
        log_z_C1 = top_C1 + sum_C1.log()
        share_C1 = share_C1 * (1 + 2 * z_loss_multiplier * log_z_C1)
        total = torch.stack([total, z_loss_multiplier * _sum_of_squares(log_z_C1, counts_C1)])
    d_x_CV = powers_CV * share_C1 - torch.where(is_target_CV, one_C1, 0.0)
    if vocabulary.softcap:
        d_x_CV = d_x_CV * (1 - (x_CV / vocabulary.softcap).square())
    logits_CV.copy_(d_x_CV)
    return total


def eager_loss_and_gradient_(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, z_loss_multiplier: float = 0.0, softcap: float = 0.0
) -> torch.Tensor:
    """loss_and_gradient_ for the whole vocabulary without compilation, in the fewest passes over the logits:
    torch's fused log-softmax and an exponential."""
    if softcap:

        def capped() -> torch.Tensor:  # with a single fp32 copy in memory
            return logits_CV.to(torch.float32, copy=True).div_(softcap).tanh_().mul_(softcap)

        d_capped_CV = capped()
        total = eager_loss_and_gradient_(d_capped_CV, targets_C, z_loss_multiplier)
        slope_CV = capped().div_(softcap).square_().neg_().add_(1)
        torch.mul(d_capped_CV, slope_CV, out=logits_CV)
        return total
    counts_C1 = (targets_C != IGNORE)[:, None]
    target_C1 = torch.where(counts_C1, targets_C[:, None], 0)
    log_p_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    target_log_p_C1 = log_p_CV.gather(1, target_C1)
    total = torch.where(counts_C1, -target_log_p_C1, 0.0).sum()
    if z_loss_multiplier:
        log_z_C1 = logits_CV.gather(1, target_C1).float() - target_log_p_C1
        total = torch.stack([total, z_loss_multiplier * _sum_of_squares(log_z_C1, counts_C1)])
        factor_C1 = 1 + 2 * z_loss_multiplier * log_z_C1
        torch.mul(log_p_CV.exp_(), factor_C1, out=logits_CV)
        d_target_C1 = target_log_p_C1.exp() * factor_C1 - 1
    else:
        torch.exp(log_p_CV, out=logits_CV)
        d_target_C1 = target_log_p_C1.exp() - 1
    logits_CV.scatter_(1, target_C1, d_target_C1.to(logits_CV.dtype))
    return total


def score_targets(
    hidden_BTD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_BT: torch.Tensor,
    vocab_size: int,
    vocabulary: VocabularyShard = WHOLE_VOCABULARY,
    chunk_tokens: int = 4096,
) -> torch.Tensor:
    """fp32 [B, T, 2]: log p of each target, and 1 if the target is not the most likely token, which is the
    first one if several are equally likely; 0 for targets that do not count. `vocab_size`: ids from here on
    have p = 0. `chunk_tokens`: maximum number of tokens whose logits are in memory at once."""
    weight_VD, scores = weight_VD.to(hidden_BTD.dtype), []
    for hidden_CD, targets_C in zip(
        hidden_BTD.flatten(0, 1).split(chunk_tokens), targets_BT.flatten().split(chunk_tokens)
    ):
        logits_CV = vocabulary.logits(hidden_CD, weight_VD).float()
        logits_CV[:, max(vocab_size - vocabulary.first_id, 0) :] = -math.inf
        log_p_C = vocabulary.target_logits(logits_CV, targets_C) - vocabulary.log_sum_exp(logits_CV)
        top_C, row_C = logits_CV.max(-1)
        is_top_C = top_C == vocabulary.all_reduce_max(top_C)
        first_C = torch.where(is_top_C, -(row_C + vocabulary.first_id), torch.iinfo(row_C.dtype).min)
        is_miss_C = -vocabulary.all_reduce_max(first_C) != targets_C
        counts_C = targets_C != IGNORE
        scores.append(torch.stack([log_p_C, is_miss_C.float()], -1) * counts_C[:, None])
    return torch.cat(scores).unflatten(0, targets_BT.shape)


def _sum_of_squares(log_z_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor:
    """The sum of (log Z)^2 over the tokens that count."""
    return torch.where(counts_N, log_z_N.square(), 0.0).sum()


class _Chunked(torch.autograd.Function):
    """The loss and the weight's gradient, in fp32. The forward already computes the gradients, chunk by
    chunk, so that logits are freed after their chunk and never computed twice. The backward only scales the
    gradient of the hidden states (as in Liger-Kernel, Hsu et al. 2024)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        num_chunks: int,
        chunk: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        d_hidden_ND = torch.empty_like(hidden_ND)
        d_weight_VD = torch.empty_like(weight_VD, dtype=torch.float32)
        weight_VD = weight_VD.to(hidden_ND.dtype)
        total = torch.zeros((), device=hidden_ND.device)
        chunks = zip(*(x.chunk(num_chunks) for x in (hidden_ND, targets_N, d_hidden_ND)))
        for i, (h_CD, targets_C, d_h_CD) in enumerate(chunks):
            counts_C1 = (targets_C != IGNORE)[:, None]
            h_CD = torch.where(counts_C1, h_CD, 0.0)  # tokens that do not count add nothing to d_weight
            logits_CV = F.linear(h_CD, weight_VD)
            total = total + chunk(logits_CV, targets_C)  # not in place: `chunk` may return a vector
            d_logits_CV = logits_CV  # `chunk` has overwritten the logits with their gradient
            torch.mm(d_logits_CV, weight_VD, out=d_h_CD)
            d_h_CD.masked_fill_(~counts_C1, 0.0)
            _add_product_(d_weight_VD, d_logits_CV.T, h_CD, beta=0 if i == 0 else 1)  # 0: uninitialised
            del logits_CV, d_logits_CV  # frees them before the next chunk's logits are allocated
        ctx.save_for_backward(d_hidden_ND)
        ctx.mark_non_differentiable(d_weight_VD)
        return total, d_weight_VD

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_hidden_ND,) = ctx.saved_tensors
        scale = scales[0].flatten()[0]  # of the first entry, whose gradient is the gradient of all losses
        d_hidden_ND.data.mul_(scale)  # .data, because autograd refuses in-place changes of saved tensors
        return d_hidden_ND, None, None, None, None


class _KnownGradient(torch.autograd.Function):
    """Returns zero, with a precomputed gradient of the weight. Separate from `_Chunked`, so that zero-bubble
    pipeline schedules can compute the gradients of weights later."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if ctx.dtype == gradient.dtype:
            return gradient.data.mul_(scales[0]), None
        out = torch.empty_like(gradient, dtype=ctx.dtype)
        return torch.mul(gradient, scales[0], out=out), None


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int) -> None:
    """total = beta * total + a @ b in fp32, for factors of any dtype. With beta 0, `total` may be
    uninitialised."""
    if a.dtype == torch.float32:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float(), beta=beta)
