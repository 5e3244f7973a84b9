"""The scaling law of a user's own runs: loss(N, D) = E + A / N^alpha + B / D^beta, for N parameters and D
tokens (Hoffmann et al. 2022, arXiv 2203.15556, approach 3).

Variable projection: for given exponents, E, A and B are a linear least squares in relative error, so only the
two exponents are searched, on grids that become finer around the best point. There is no starting value, and
no search that stops early, as that for the published constants did (Besiroglu et al. 2024, arXiv 2404.10102).
Parabolas through runs of equal FLOPs (approach 2) are biased even without noise.

Intervals are from a parametric bootstrap: each replica has the fitted losses with other noise, and is fitted
again. Drawing whole runs with replacement gives much wider intervals if there are fewer than 12, because few
different ones are left in a replica."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from titanlite.config.component import ConfigError

Floats = np.ndarray[Any, np.dtype[np.float64]]

EXPONENTS = 0.05, 1.5  # the range that is searched; published exponents are between 0.2 and 0.8
COARSE, FINE = 30, 9  # points per exponent of the first grid, and of the finer ones around its best point
SHRINK, NUM_FINE = 0.8, 45  # the finer grids: factor of the next one's width, and how many; to 2e-6
NUM_REPLICAS = 1000
QUANTILES = 0.025, 0.975
NUM_CONSTANTS = 5


class Interval(NamedTuple):
    """A value, and the bounds between which 95% of the replicas lie."""

    value: float
    low: float
    high: float


class Law(NamedTuple):
    """The constants of one or several laws, each an array with an entry per law. The loss is in nats per
    token; infinite E: no law with positive A and B fits."""

    E: Floats
    A: Floats
    alpha: Floats
    B: Floats
    beta: Floats

    def loss(self, parameters: float | Floats, tokens: float | Floats) -> Floats:
        """The loss of each law."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def best_parameters(self, flops: float) -> Floats:
        """The parameters with the lowest loss for 6 N D = `flops`."""
        ratio = self.alpha * self.A / (self.beta * self.B)  # d loss / d N = 0 along N D = flops / 6
        return np.asarray((ratio * (flops / 6) ** self.beta) ** (1 / (self.alpha + self.beta)))

    def flops_for(self, tokens: float) -> Floats:
        """The FLOPs for which `tokens` is the best number of tokens."""
        ratio = self.alpha * self.A / (self.beta * self.B)
        return np.asarray(6 * tokens * (ratio * tokens**self.beta) ** (1 / self.alpha))


# The refit of Hoffmann et al. 2022 by Besiroglu et al. 2024 (arXiv 2404.10102). Only differences of losses
# carry over to other data and tokenizers.
CHINCHILLA = Law(*(np.array([constant]) for constant in (1.8172, 482.01, 0.3478, 2085.43, 0.3658)))


class FittedLaw(NamedTuple):
    """A law fitted to runs. `law`: of one entry. `replicas`: the laws of the bootstrap. `noise`: the standard
    deviation of the runs' relative residuals. `noises`: a draw of a new run's residual for each replica."""

    law: Law
    replicas: Law
    noise: float
    noises: Floats

    def constants(self) -> dict[str, Interval]:
        """E, A, alpha, B and beta with their intervals."""
        pairs = zip(self.law._fields, self.law, self.replicas)
        return {name: interval(value, replicas) for name, value, replicas in pairs}

    def exponent(self) -> Interval:
        """The power of the FLOPs that the compute-optimal number of parameters is proportional to."""
        one, many = (law.beta / (law.alpha + law.beta) for law in (self.law, self.replicas))
        return interval(one, many)

    def forecast(self, parameters: float, tokens: float) -> Interval:
        """The loss of a run that has not been trained; the interval is for one run, with its noise."""
        losses = self.replicas.loss(parameters, tokens) * (1 + self.noises)
        return interval(self.law.loss(parameters, tokens), losses)

    def optimum(self, flops: float) -> tuple[Interval, Interval, Interval]:
        """The compute-optimal parameters and tokens for 6 N D = `flops`, and the loss that they reach."""
        one, many = (law.best_parameters(flops) for law in (self.law, self.replicas))
        tokens = interval(flops / 6 / one, flops / 6 / many)
        losses = self.replicas.loss(many, flops / 6 / many)
        return interval(one, many), tokens, interval(self.law.loss(one, flops / 6 / one), losses)


def interval(value: Floats, replicas: Floats) -> Interval:
    """The value of a law of one entry, and the interval of the replicas' values."""
    low, high = np.quantile(replicas, QUANTILES)
    return Interval(float(value[0]), float(low), float(high))


def fit(parameters: Floats, tokens: Floats, losses: Floats, num_replicas: int = NUM_REPLICAS) -> FittedLaw:
    """Fit the law to at least 6 runs; equal arguments give equal bits. Raises ConfigError if the runs do not
    determine it."""
    law = best_laws(parameters, tokens, losses[None])
    if not np.isfinite(law.E[0]):
        raise ConfigError("no law fits the runs: their losses do not fall with both parameters and tokens")
    fitted = law.loss(parameters, tokens)
    degrees = len(losses) - NUM_CONSTANTS
    noise = float(np.sqrt(np.sum((losses / fitted - 1) ** 2) / degrees))
    rng = np.random.default_rng(0)
    # The residuals of few runs tell the noise only roughly. With its scale drawn anew for each replica, the
    # intervals are Student's t in the linear case.
    scales = noise * np.sqrt(degrees / rng.chisquare(degrees, num_replicas))
    draws = scales[:, None] * rng.standard_normal((num_replicas, len(losses) + 1))
    replicas = best_laws(parameters, tokens, fitted * (1 + draws[:, :-1]))
    possible = np.isfinite(replicas.E)
    if np.mean(possible) < 1 - QUANTILES[0]:
        raise ConfigError(
            f"the runs do not determine the law: in {1 - np.mean(possible):.0%} of the bootstrap, loss does "
            "not fall with both parameters and tokens; add runs with other sizes, or with less noise"
        )
    result = FittedLaw(law, Law(*(values[possible] for values in replicas)), noise, draws[possible, -1])
    _check_exponents(result)
    return result


def _check_exponents(result: FittedLaw) -> None:
    """Raise ConfigError for a law with an exponent that the runs do not tell."""
    for name, size in (("alpha", "parameters"), ("beta", "tokens")):
        value, low, high = result.constants()[name]
        step = 1e-4
        if low < EXPONENTS[0] + step or high > EXPONENTS[1] - step:
            raise ConfigError(
                f"the runs do not determine {name}, the exponent of the {size}: {value:.2f}, with 95% of the "
                f"bootstrap from {low:.2f} to {high:.2f}; add runs with other {size}, or with less noise"
            )


def best_laws(parameters: Floats, tokens: Floats, losses: Floats) -> Law:
    """The law with the smallest squared relative error for each row of losses."""
    x, y = np.log(parameters), np.log(tokens)
    middle_x, middle_y = x.mean(), y.mean()  # powers of the ratios to the middle are of the order of 1
    rows, num = np.arange(len(losses)), COARSE
    width = EXPONENTS[1] - EXPONENTS[0]
    centers = np.full((2, len(losses)), np.mean(EXPONENTS))
    for _ in range(1 + NUM_FINE):
        offsets = np.linspace(-width / 2, width / 2, num)
        alphas, betas = np.clip(centers[..., None] + offsets, *EXPONENTS)
        powers = np.exp(alphas[..., None] * (middle_x - x)), np.exp(betas[..., None] * (middle_y - y))
        errors, *constants = _project(*powers, losses)
        i, j = np.unravel_index(errors.reshape(len(losses), -1).argmin(axis=1), errors.shape[1:])
        centers = np.stack([alphas[rows, i], betas[rows, j]])
        # Slowly: the errors have a long, narrow valley, which a fast refinement would leave too early.
        width, num = (SHRINK * width if num == FINE else 4 * width / (num - 1)), FINE
    E, A, B = (constant[rows, i, j] for constant in constants)
    alpha, beta = centers
    E[np.isinf(errors[rows, i, j])] = np.inf
    return Law(E, A * np.exp(alpha * middle_x), alpha, B * np.exp(beta * middle_y), beta)


def _project(u: Floats, v: Floats, losses: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """The squared relative error and E, A, B >= 0 of the best E + A u + B v, of shape [rows, len(u), len(v)].
    The error is infinite where the best A or B is negative. u, v: [rows, exponents, runs]."""
    weights = 1 / losses**2
    total = weights.sum(axis=1)
    mean_u, mean_v = (np.einsum("rn,rgn->rg", weights, w) / total[:, None] for w in (u, v))
    mean = np.einsum("rn,rn->r", weights, losses) / total
    A, B, error = _least_squares(
        u - mean_u[..., None], v - mean_v[..., None], losses - mean[:, None], weights
    )
    E = mean[:, None, None] - A * mean_u[:, :, None] - B * mean_v[:, None, :]
    if np.any(E < 0):
        at_zero = _least_squares(u, v, losses, weights)
        A, B, error = (np.where(E < 0, other, own) for other, own in zip(at_zero, (A, B, error)))
        E = np.maximum(E, 0)
    return np.where((A > 0) & (B > 0), error, np.inf), E, A, B


def _least_squares(u: Floats, v: Floats, target: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """A, B and the weighted squared error of the best A u + B v, by the normal equations."""
    uu, vv = (np.einsum("rn,rgn->rg", weights, w * w) for w in (u, v))
    ut, vt = (np.einsum("rn,rgn->rg", weights * target, w) for w in (u, v))
    uu, ut, vv, vt = uu[:, :, None], ut[:, :, None], vv[:, None, :], vt[:, None, :]
    uv = np.matmul(u * weights[:, None], v.swapaxes(1, 2))
    with np.errstate(divide="ignore", invalid="ignore"):  # u and v may be equal; the result is then not used
        determinant = uu * vv - uv**2
        A, B = (ut * vv - vt * uv) / determinant, (vt * uu - ut * uv) / determinant
        error = np.einsum("rn,rn->r", weights, target**2)[:, None, None] - A * ut - B * vt
    return A, B, error
