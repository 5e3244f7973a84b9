"""Newton-Schulz iteration: the orthogonal factor U V^T of a matrix U S V^T, by matrix products alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Coefficients = Sequence[Sequence[float]]  # (a, b, c) of each step

JORDAN = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024, https://kellerjordan.github.io/posts/muon
# Polar Express (Amsel et al. 2025, arXiv 2505.16932): the best odd polynomials of degree 5 for singular
# values from 0.001 to 1. All but the last are evaluated at x / 1.01, so that rounding in bf16 cannot push a
# singular value above the range of the next one; the division is part of the coefficients.
POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),  # repeated from here on
)
SETS = {"polar_express": POLAR_EXPRESS, "jordan": (JORDAN,)}
MARGIN = 1.01  # the largest singular value must stay below 1, also if rounding makes the norm too small


def coefficients_of(name: str, num_steps: int) -> Coefficients:
    """The coefficients of `num_steps` steps of a set; the set's last triple is repeated."""
    triples = SETS[name]
    return [triples[min(i, len(triples) - 1)] for i in range(num_steps)]


def orthogonalize(x: torch.Tensor, coefficients: Coefficients, dtype: torch.dtype) -> torch.Tensor:
    """Approximate the nearest matrices with orthonormal rows or columns: singular values are near 1 instead
    of exactly 1, and below 1 in directions whose singular value was below a thousandth of the matrix's norm.

    x: [num_matrices, m, n]. Returns the same shape in `dtype`, in which the products are computed. Each step
    is X <- a X + (b A + c A A) X with A = X X^T. The norm is taken in fp32: in bf16 it may be 0.4% too small,
    and the iteration diverges from singular values above 1. The Frobenius norm bounds the largest singular
    value. A matrix of zeros stays zero."""
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:  # A is then the smaller of the two possible products
        x = x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (x / (MARGIN * norm + 1e-7)).to(dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def num_flops(m: int, n: int, num_steps: int) -> int:
    """FLOPs of `orthogonalize` for one matrix [m, n]."""
    a, b = min(m, n), max(m, n)
    return num_steps * (4 * a * a * b + 2 * a**3)
