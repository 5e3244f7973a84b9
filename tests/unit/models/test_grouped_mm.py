"""Grouped products equal one product per group, forward and backward, with empty groups and without rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titanlite.models.grouped_mm import grouped_mm

SIZES = {  # rows per group
    "all groups": [5, 3, 7, 2],
    "empty groups": [0, 9, 0, 4],
    "one group": [0, 0, 0, 11],
    "no rows": [0, 0, 0, 0],
}


def inputs(sizes: list[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Rows, weights and the ends of the groups; the dims are no multiples of 8."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 10, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), 6, 10, generator=generator).requires_grad_()
    return x, weight, torch.tensor(sizes).cumsum(0).int()


def by_group(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    begins = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ w.to(x.dtype).T for a, b, w in zip(begins, begins[1:], weight)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_and_gradients_are_those_of_each_group(sizes: list[int], dtype: torch.dtype) -> None:
    x, weight, ends = inputs(sizes, dtype)
    out, wanted = grouped_mm(x, weight, ends), by_group(x, weight, ends)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, (x, weight), g)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, (x, weight), g))
    assert gradients[1].dtype == torch.float32
    assert not gradients[1][torch.tensor(sizes) == 0].any(), "an expert without tokens has a gradient of 0"


def test_control_shifted_ends_give_other_products() -> None:
    x, weight, ends = inputs(SIZES["all groups"])
    with torch.no_grad():
        shifted = ends - torch.tensor([1, 1, 1, 0], dtype=torch.int32)
        assert (grouped_mm(x, weight, ends) - by_group(x, weight, shifted)).abs().max() > 1


@pytest.mark.full
def test_the_operators_fit_their_declarations() -> None:
    """Shapes and strides under torch.compile, and the gradient's formula."""
    for sizes in (SIZES["empty groups"], SIZES["no rows"]):
        torch.library.opcheck(torch.ops.titanlite.grouped_mm.default, inputs(sizes))
    x, _, ends = inputs(SIZES["empty groups"])
    g = torch.randn(13, 6)
    torch.library.opcheck(torch.ops.titanlite.grouped_mm_weight.default, (g, x.detach(), ends))


def test_no_gradient_is_computed_for_frozen_weights() -> None:
    x, weight, ends = inputs(SIZES["all groups"])
    calls = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    for frozen in (False, True):
        weight.requires_grad_(not frozen)
        calls.clear()
        with Recorder():
            grouped_mm(x, weight, ends).sum().backward()
        assert any("grouped_mm_weight" in call for call in calls) is not frozen


@pytest.mark.full
def test_equals_torchs_grouped_product() -> None:
    x, weight, ends = (t.detach() for t in inputs([3, 0, 8, 5]))
    x, weight = F.pad(x, (0, 6)).bfloat16(), F.pad(weight, (0, 6, 0, 2)).bfloat16()
    theirs = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    torch.testing.assert_close(grouped_mm(x, weight, ends), theirs)
