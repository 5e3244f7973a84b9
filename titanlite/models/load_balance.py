"""`[moe]`: keeps the experts of a mixture equally loaded, by a loss or by a bias of the router, and counts
the tokens of each expert.

Both happen in the backward of one autograd function on the router's weights. It adds the gradient of the
losses, and the number of tokens per expert becomes the gradient of a small tensor. So tokens are counted
once per micro-batch, also if activation checkpointing repeats the forward, and never in an evaluation.

Shape suffixes: N tokens of a micro-batch, B sequences, T tokens of a sequence, E experts, K experts per
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from titanlite.config.component import ConfigError

COEFFICIENTS = {"none": 0.0, "global": 0.01, "sequence": 0.01, "bias": 0.001}  # by load_balance
MAX_COEFFICIENT = 100  # far above any that trains
CORRECTION_BIAS = "e_score_correction_bias"  # of routers that choose by scores plus bias (DeepSeek-V3)


def is_load(name: str) -> bool:
    """Whether the buffer `name` is the load of a router's experts, which checkpoints have and the files of
    other programs lack."""
    return name.endswith(".load.tokens_per_expert")


@dataclass(frozen=True, kw_only=True)
class LoadBalance:
    """Balance of experts, for families that have experts. No token is ever dropped."""

    load_balance: Literal["none", "global", "sequence", "bias"] = "global"
    """`global`: minimise a loss for equal loads over the global batch. `sequence`: over each sequence.
    `bias`: move the router's correction bias instead, in families that have it. `none`: free routers, which
    may leave most experts without tokens."""
    load_balance_coeff: float | None = None
    """Coefficient of the loss, or step of the bias. Unset: 0.01 for `global` and `sequence`, 0.001 for
    `bias`."""
    sequence_loss_coeff: float = 0.0
    """Coefficient of the loss `sequence` beside another load_balance. DeepSeek-V3 has 0.0001, with `bias`."""
    z_loss_coeff: float = 0.0
    """Coefficient of the routers' z-loss, the mean square of the log-sum-exp of their logits (Zoph et al.
    2022: 0.001)."""
    force_load_balance: bool = False
    """Give experts tokens in turn, to measure speed: the model learns no routing, and cannot be exported."""

    def __post_init__(self) -> None:
        for key in ("load_balance_coeff", "sequence_loss_coeff", "z_loss_coeff"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= MAX_COEFFICIENT:
                raise ConfigError(f"{value} is not from 0 to {MAX_COEFFICIENT}", key)
        if self.load_balance == "none" and self.load_balance_coeff is not None:
            raise ConfigError('has no effect with load_balance = "none"', "load_balance_coeff")
        if self.load_balance == "sequence" and self.sequence_loss_coeff:
            raise ConfigError(
                'with load_balance = "sequence", load_balance_coeff is the coefficient', "sequence_loss_coeff"
            )

    @property
    def coefficient(self) -> float:
        """load_balance_coeff, or its default."""
        given = self.load_balance_coeff
        return COEFFICIENTS[self.load_balance] if given is None else given

    @property
    def sequence_coefficient(self) -> float:
        """The coefficient of the loss `sequence`; 0: there is none."""
        return self.coefficient if self.load_balance == "sequence" else self.sequence_loss_coeff

    def check(self, num_experts: int, trains_adapters: bool) -> None:
        """Raises ConfigError if the settings do not fit a model with `num_experts` experts per layer, or a
        frozen model with adapters."""
        if not num_experts and self != LoadBalance():
            raise ConfigError("the model has no experts: delete the section [moe]", "moe")
        if trains_adapters and self.load_balance == "bias":
            raise ConfigError(
                'does not work with lora.enable: the bias belongs to the frozen base model; set "none"',
                "moe.load_balance",
            )

    def check_export(self) -> None:
        """Raises ConfigError if a model that was trained with these settings is of no use."""
        if self.force_load_balance:
            raise ConfigError(
                "a model trained with moe.force_load_balance has learned no routing, and is not exported",
                "moe.force_load_balance",
            )

    def describe(self, num_experts: int) -> list[str]:
        """Lines for the log on a model with `num_experts` experts per layer; none without experts."""
        if not num_experts:
            return []
        coefficient = f", coefficient {self.coefficient:g}" if self.load_balance != "none" else ""
        others = {"loss of each sequence": self.sequence_loss_coeff, "z-loss": self.z_loss_coeff}
        losses = "".join(f"; {name}, coefficient {value:g}" for name, value in others.items() if value)
        lines = [f"load balance of experts: {self.load_balance}{coefficient}{losses}"]
        if self.force_load_balance:
            lines.append("moe.force_load_balance: experts get tokens in turn; the model learns no routing")
        return lines

    def identity(self) -> dict[str, Any]:
        """The section `moe` of the run identity."""
        return {
            "load_balance": self.load_balance,
            "load_balance_coeff": self.coefficient,
            "sequence_loss_coeff": self.sequence_loss_coeff,
            "z_loss_coeff": self.z_loss_coeff,
            "force_load_balance": self.force_load_balance,
        }


class RouterResults(NamedTuple):
    """The results of a router for the tokens of one micro-batch. `probabilities_NE`: sum to 1 over the
    experts. `counts_E`: the number of tokens that go to each expert."""

    logits_NE: torch.Tensor
    probabilities_NE: torch.Tensor
    experts_NK: torch.Tensor
    counts_E: torch.Tensor


class RouterLoad(nn.Module):
    """The loads of a router's experts, and the losses that balance them. Does nothing before `enable`."""

    tokens_per_expert: torch.Tensor
    statistics: torch.Tensor
    share_gradient: torch.Tensor
    factors: torch.Tensor

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts
        self.settings: LoadBalance | None = None
        self.counts_in_forward = False
        self.sum_over_sequence_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
        # State: the tokens of each expert in the newest applied step; exact up to 2^24 tokens per step.
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts))
        # Its gradient is the sum over micro-batches of tokens per expert, probabilities and z-loss.
        self.register_buffer("statistics", torch.zeros(2 * num_experts + 1), persistent=False)
        # The gradient of the loss `global` with respect to the probabilities of each token.
        self.register_buffer("share_gradient", torch.zeros(num_experts), persistent=False)
        # The factors of the loss `sequence` and of the z-loss. A tensor, because numbers would be constants
        # of a compiled graph.
        self.register_buffer("factors", torch.zeros(2), persistent=False)

    def enable(
        self,
        settings: LoadBalance,
        counts_in_forward: bool,
        sum_over_sequence_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Count and balance from now on. Call it when the buffers are allocated. `counts_in_forward`: count
        in the forward, for a backward that computes gradients of parameters only; no forward may be
        repeated. `sum_over_sequence_ranks`: the sum of a tensor over the ranks that share each sequence; None
        if each sequence is on one rank."""
        self.settings, self.counts_in_forward = settings, counts_in_forward
        self.sum_over_sequence_ranks = sum_over_sequence_ranks
        self.statistics.requires_grad_(not counts_in_forward)

    def begin_step(self) -> None:
        """Forget the statistics of the previous step."""
        if self.counts_in_forward:
            self.statistics.zero_()
        else:
            self.statistics.grad = None

    def step_statistics(self) -> torch.Tensor:
        """This rank's sums over the micro-batches of a step, [2 E + 1]: tokens per expert, probabilities, and
        the squared log-sum-exp of the logits if there is a z-loss."""
        if self.counts_in_forward:
            return self.statistics
        assert self.statistics.grad is not None, "no backward since begin_step"
        return self.statistics.grad

    def chosen(self, experts_NK: torch.Tensor) -> torch.Tensor:
        """The experts of each token: the router's choice, or all experts in turn if that is forced."""
        if self.settings is None or not self.settings.force_load_balance:
            return experts_NK
        pairs = torch.arange(experts_NK.numel(), device=experts_NK.device)
        return (pairs % self.num_experts).view_as(experts_NK)

    def forward(self, weights_NK: torch.Tensor, router: RouterResults, num_sequences: int) -> torch.Tensor:
        """`weights_NK` unchanged; the backward counts, and adds the gradient of the losses. The tokens come
        from `num_sequences` sequences of equal length, one after the other."""
        settings = self.settings
        if settings is None or not torch.is_grad_enabled():
            return weights_NK
        probabilities_NE = router.probabilities_NE
        sums_E = probabilities_NE.sum(0)
        z = sums_E.new_zeros(())
        if settings.z_loss_coeff:
            z = router.logits_NE.logsumexp(-1).square().sum()
        loss = z * self.factors[1]
        if settings.load_balance == "global":
            loss = loss + sums_E @ self.share_gradient
        if settings.sequence_coefficient:
            shares_BE = self._shares(router.experts_NK.reshape(num_sequences, -1))
            means_BE = probabilities_NE.unflatten(0, (num_sequences, -1)).mean(1)
            loss = loss + (shares_BE * means_BE).sum() * self.factors[0]
        statistics = torch.cat((router.counts_E.to(sums_E.dtype), sums_E.detach(), z.detach().reshape(1)))
        if self.counts_in_forward:
            self.statistics += statistics
        return _AddLoss.apply(weights_NK, loss, self.statistics, statistics)

    def _shares(self, chosen_BP: torch.Tensor) -> torch.Tensor:
        """Each expert's share of the choices of a sequence, fp32 [B, E]. Collective if several ranks share a
        sequence."""
        experts_E = torch.arange(self.num_experts, device=chosen_BP.device)
        counts_BE = (chosen_BP[..., None] == experts_E).sum(1)
        if self.sum_over_sequence_ranks is not None:
            counts_BE = self.sum_over_sequence_ranks(counts_BE)
        return counts_BE / counts_BE.sum(1, keepdim=True)


class _AddLoss(torch.autograd.Function):
    """The first argument, as if `loss` were added to what is minimised. The gradient of `counter` is
    `statistics`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, loss: torch.Tensor, counter: torch.Tensor, statistics: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(statistics)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (statistics,) = ctx.saved_tensors
        return gradient, statistics.new_ones(()), statistics, None
