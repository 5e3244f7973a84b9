"""How far a run is from the compute-optimal one, by the law of Hoffmann et al. 2022 (Chinchilla, arXiv
2203.15556) with the constants of the refit by Besiroglu et al. 2024 (arXiv 2404.10102).

loss(N, D) = E + A / N^alpha + B / D^beta, for N parameters and D tokens, with C = 6 N D FLOPs. The loss is
that of the law's data and tokenizer: only differences between two choices carry over to other runs."""

from __future__ import annotations

from dataclasses import dataclass

A, B, ALPHA, BETA = 482.01, 2085.43, 0.3478, 0.3658
RULE = 20  # tokens per parameter, Chinchilla's rule of thumb


@dataclass(frozen=True)
class Optimum:
    """`parameters` and `tokens`: the best for the same FLOPs. `excess`: how much lower their loss is, in nats
    per token. `half`: the tokens that a model of half the size needs for the loss of the run; None: no number
    is enough. `half_flops`: what these tokens cost, in units of the run's FLOPs."""

    tokens_per_parameter: float
    parameters: float
    tokens: float
    excess: float
    half: float | None
    half_flops: float | None


def reducible(parameters: float, tokens: float) -> float:
    """The part of the loss that more parameters and tokens reduce, in nats per token."""
    return A / parameters**ALPHA + B / tokens**BETA


def optimum(parameters: float, tokens: float) -> Optimum:
    """The compute-optimal run with the FLOPs of a run, and the smaller model that reaches the run's loss."""
    product = parameters * tokens
    # d loss / d N = 0 along N D = product
    best = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * product ** (BETA / (ALPHA + BETA))
    loss = reducible(parameters, tokens)
    left = loss - A / (parameters / 2) ** ALPHA
    half = (B / left) ** (1 / BETA) if left > 0 else None
    return Optimum(
        tokens_per_parameter=tokens / parameters,
        parameters=best,
        tokens=product / best,
        excess=loss - reducible(best, product / best),
        half=half,
        half_flops=None if half is None else half / tokens / 2,
    )
