"""Pins the Newton-Schulz iteration against a singular value decomposition, and the bands of its sets of
coefficients."""

from __future__ import annotations

import pytest
import torch

from titanlite.optim.orthogonalize import (
    JORDAN,
    POLAR_EXPRESS,
    coefficients_of,
    num_flops,
    orthogonalize,
)

BANDS = {  # singular values of the result for a normal matrix, after five steps
    "polar_express": (0.86, 1.13),
    "jordan": (0.67, 1.14),
}


PUBLISHED = {  # divisor of the norm, and the coefficients of five steps
    "jordan": (1.0, [(3.4445, -4.7750, 2.0315)] * 5),
    "polar_express": (
        1.01,
        [
            (8.20516041400557, -22.901934987056, 16.4607249101803),
            (4.06639515994277, -2.86115408675514, 0.518399522669474),
            (3.90959490443792, -2.82335173503952, 0.525036976939003),
            (3.28556401719862, -2.41530195963594, 0.485294065527909),
            (2.27787328708398, -1.61982176526544, 0.398480787041684),
        ],
    ),
}


def published(
    x: torch.Tensor, divisor: float, coefficients: list[tuple[float, float, float]]
) -> torch.Tensor:
    x = x.double() / (divisor * x.double().norm())
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_iteration_of_a_set_is_the_published_one(name: str) -> None:
    """Only Polar Express divides by 1.01 x the norm; the other divisor is the control."""
    divisor, coefficients = PUBLISHED[name]
    for shape in ((40, 100), (100, 40), (64, 64)):
        x = random(*shape)
        actual = orthogonalize(x[None], coefficients_of(name, 5), torch.float32)[0]
        wanted = published(x, divisor, coefficients)
        assert (actual - wanted).norm() < 1e-4 * wanted.norm()
        assert (actual - published(x, 2.01 - divisor, coefficients)).norm() > 2e-3 * wanted.norm()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BANDS)
def test_singular_values_end_in_the_band_of_the_set(name: str, dtype: torch.dtype) -> None:
    low, high = BANDS[name]
    for shape in ((2, 96, 256), (2, 256, 96), (1, 128, 128)):
        x = random(*shape)
        if shape[1] == shape[2]:  # a square normal matrix has a singular value near 0
            u, s, v = torch.linalg.svd(x)
            x = u @ torch.diag_embed(s.clamp(min=2.0)) @ v
        values = torch.linalg.svdvals(orthogonalize(x, coefficients_of(name, 5), dtype).float())
        assert low < values.min() < values.max() < high, shape


def test_the_result_approaches_the_orthogonal_factor_of_the_singular_value_decomposition() -> None:
    for shape in ((1, 40, 100), (1, 100, 40)):
        x = random(*shape)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        error = [
            ((orthogonalize(x, coefficients_of("polar_express", n), torch.float32) - u @ v).norm() / u.norm())
            for n in (2, 5, 8)
        ]
        assert error[0] > error[1] > error[2]
        assert error[2] < 1e-4
        wrong = orthogonalize(x.mT.reshape(shape), coefficients_of("polar_express", 8), torch.float32)
        assert (wrong - u @ v).norm() > 0.5 * u.norm()


def test_small_singular_values_grow_and_none_exceeds_the_band() -> None:
    u, _, v = torch.linalg.svd(random(1, 64, 64))
    x = u @ torch.diag_embed(torch.logspace(0, -4, 64)) @ v
    smallest = {}
    for name, (_, high) in BANDS.items():
        values = torch.linalg.svdvals(orthogonalize(x, coefficients_of(name, 5), torch.float32))
        assert values.max() < high + 0.1
        smallest[name] = values.min()
    assert smallest["polar_express"] > smallest["jordan"] > 0.005


def test_the_scale_of_a_matrix_does_not_matter_and_zeros_stay_zero() -> None:
    x = random(1, 32, 64)
    wanted = orthogonalize(x, coefficients_of("polar_express", 5), torch.float32)
    for scale in (1e-4, 1e4):
        actual = orthogonalize(scale * x, coefficients_of("polar_express", 5), torch.float32)
        assert torch.allclose(actual, wanted, atol=1e-3)
    zeros = torch.zeros(1, 4, 8)
    assert torch.equal(orthogonalize(zeros, coefficients_of("jordan", 5), torch.float32), zeros)


def test_a_batch_has_the_results_of_its_matrices() -> None:
    x, coefficients = random(3, 16, 48), coefficients_of("polar_express", 5)
    alone = torch.cat([orthogonalize(x[i : i + 1], coefficients, torch.float32) for i in range(3)])
    assert torch.allclose(orthogonalize(x, coefficients, torch.float32), alone, atol=1e-6)


def test_the_last_coefficients_are_repeated() -> None:
    assert coefficients_of("jordan", 3) == [JORDAN] * 3
    assert coefficients_of("polar_express", 10) == [*POLAR_EXPRESS, POLAR_EXPRESS[-1], POLAR_EXPRESS[-1]]
    assert num_flops(2048, 8192, 5) == num_flops(8192, 2048, 5) == 5 * (4 * 2048**2 * 8192 + 2 * 2048**3)
