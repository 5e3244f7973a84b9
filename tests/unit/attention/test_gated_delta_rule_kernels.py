"""The operators around the kernels of flash-linear-attention, with a stand-in for its functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.fla import stand_in_for_fla
from titanlite.attention.gated_delta_rule_kernels import Rule, RuleInputs, fla_rule, torch_rule

B, T, K, H, E = 2, 130, 2, 4, 16


def inputs() -> RuleInputs:
    g = torch.Generator().manual_seed(0)
    q, k, v, decay, beta = (
        torch.randn(B, T, *shape, generator=g) for shape in ((K, E), (K, E), (2 * H, E), (H,), (H,))
    )
    v = v[:, :, ::2]  # not contiguous
    return RuleInputs(*(x.requires_grad_() for x in (q, k, v, -F.softplus(decay), beta.sigmoid())))


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_the_operators_have_the_gradients_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, has_state: bool, keep_state: bool
) -> None:
    stand_in_for_fla(monkeypatch)
    tensors = inputs()
    state = torch.randn(B, H, E, E, generator=torch.Generator().manual_seed(1)).requires_grad_()
    leaves = (*tensors, *([state] if has_state else []))

    def gradients(rule: Rule, of_state: bool) -> tuple[torch.Tensor, ...]:
        out, last = rule(tensors, state if has_state else None, None, keep_state)
        loss = out.square().sum()
        if of_state and last is not None:
            loss = loss + last.pow(3).sum()
        return torch.autograd.grad(loss, leaves)

    expected = gradients(torch_rule, True)
    for a, b in zip(gradients(fla_rule, True), expected):
        assert (a - b).norm() <= 1e-6 * b.norm()
    if keep_state:  # control
        assert not torch.allclose(gradients(fla_rule, False)[2], expected[2])


def test_the_shapes_that_the_compiler_assumes_are_those_of_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in_for_fla(monkeypatch)
    tensors = [x.detach().contiguous() for x in inputs()]
    leaves = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(
        torch.ops.titanlite.fla_gated_delta_rule.default,
        (leaves, torch.randn(B, H, E, E), None, None, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
