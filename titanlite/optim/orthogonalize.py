"""Newton-Schulz iteration: the orthogonal factor U V^T of a matrix U S V^T, by matrix products alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Coefficients = Sequence[Sequence[float]]  # (a, b, c) of each step

JORDAN = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024, https://kellerjordan.github.io/posts/muon
# Polar Express (Amsel et al. 2025, arXiv 2505.16932, Algorithm 1): the best odd polynomials of degree 5 for
# singular values from 0.001 to 1, and the divisor of their argument there: rounding in bf16 cannot push a
# singular value above the range of the next one. The first has the 1.01 by which the norm is multiplied, too.
_POLAR_EXPRESS = (
    (1.01**2, 8.28721201814563, -23.595886519098837, 17.300387312530933),
    (1.01, 4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (1.01, 3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (1.01, 3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (1.01, 2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.01, 1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.01, 1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.0, 1.875, -1.25, 0.375),  # repeated from here on
)
POLAR_EXPRESS = tuple((a / d, b / d**3, c / d**5) for d, a, b, c in _POLAR_EXPRESS)
SETS = {"polar_express": POLAR_EXPRESS, "jordan": (JORDAN,)}


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
    x = (x / (norm + 1e-7)).to(dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def num_flops(m: int, n: int, num_steps: int) -> int:
    """FLOPs of `orthogonalize` for one matrix [m, n]."""
    a, b = min(m, n), max(m, n)
    return num_steps * (4 * a * a * b + 2 * a**3)
