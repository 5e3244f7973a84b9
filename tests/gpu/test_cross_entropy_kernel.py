"""The cross-entropy kernel for CUDA: the loss and the gradient of the compiled function that it replaces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from titanlite.losses import IGNORE, WHOLE_VOCABULARY, loss_and_gradient_

pytestmark = pytest.mark.gpu


def example(C: int, V: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets, of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(C, V, generator=generator) * 3).to(dtype).cuda()
    targets = torch.randint(0, V, (C,), generator=generator)
    targets[:2] = torch.tensor([0, V - 1])
    targets[2::5] = IGNORE
    return logits, targets.cuda()


@pytest.mark.parametrize(("z_loss_multiplier", "softcap"), [(0.0, 0.0), (1e-3, 0.0), (0.0, 5.0), (1e-3, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("C", "V"), [(64, 128_256), (61, 50_257), (5, 16_384), (7, 3), (33, 16_385)])
def test_it_is_the_loss_and_gradient_of_fp64(
    C: int, V: int, dtype: torch.dtype, z_loss_multiplier: float, softcap: float
) -> None:
    from titanlite.cross_entropy_kernel import fused_loss_and_gradient_

    logits, targets = example(C, V, dtype)
    counts = targets != IGNORE
    exact = logits.double()
    vocabulary = replace(WHOLE_VOCABULARY, softcap=softcap)
    total = loss_and_gradient_(exact, targets, vocabulary, z_loss_multiplier)
    actual = fused_loss_and_gradient_(logits, targets, z_loss_multiplier, softcap)
    torch.testing.assert_close(actual, total.float(), rtol=1e-5, atol=1e-5)
    resolution = torch.finfo(dtype).eps
    torch.testing.assert_close(
        logits[counts].double(), exact[counts], rtol=resolution, atol=max(resolution / 8, 1e-6)
    )
    assert logits.isfinite().all()
    wrong = exact[counts].roll(1, 0)
    with pytest.raises(AssertionError):  # control: another token's target
        torch.testing.assert_close(logits[counts].double(), wrong, rtol=resolution, atol=resolution)


def test_rows_may_be_apart_and_all_runs_are_equal() -> None:
    from titanlite.cross_entropy_kernel import fused_loss_and_gradient_

    logits, targets = example(300, 40_000, torch.bfloat16)
    apart = logits.new_zeros(300, 40_064)
    for _ in range(20):  # a program that overwrote a logit before all its threads have read it would differ
        whole, part = logits.clone(), apart[:, :40_000].copy_(logits)
        total = fused_loss_and_gradient_(whole, targets)
        assert torch.equal(total, fused_loss_and_gradient_(part, targets))
        assert torch.equal(whole, part)
    assert not apart[:, 40_000:].any()


def test_an_id_that_the_vocabulary_lacks_makes_the_loss_nan() -> None:
    from titanlite.cross_entropy_kernel import fused_loss_and_gradient_

    logits, targets = example(10, 5000, torch.bfloat16)
    targets[3] = 5000
    assert fused_loss_and_gradient_(logits, targets).isnan()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_makes_the_loss_not_finite(value: float) -> None:
    from titanlite.cross_entropy_kernel import fused_loss_and_gradient_

    logits, targets = example(10, 5000, torch.bfloat16)
    logits[4, 4321] = value
    assert not fused_loss_and_gradient_(logits, targets).isfinite()
