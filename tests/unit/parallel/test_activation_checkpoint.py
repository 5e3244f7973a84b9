"""Which operators the mode `op` of activation checkpointing repeats, in a block with experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.attention.sdpa import CAUSAL
from titanlite.models.base import Decoder
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint, apply_activation_checkpoint

SHAPE = {"n_layers": 1, "vocab_size": 64, "dim": 32, "n_experts": 4, "moe_hidden_dim": 16}


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.num = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num[str(func)] += 1
        return func(*args, **(kwargs or {}))


def gradients(mode: Any, option: str = "op") -> tuple[list[torch.Tensor], Counter[str]]:
    """The gradients of a model with experts, and the operators that its backward ran."""
    net: Decoder = Qwen3MoE(flavor="debug", overrides=SHAPE).build()
    generator = torch.Generator().manual_seed(0)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    apply_activation_checkpoint(net, ActivationCheckpoint(mode=mode, selective_ac_option=option))
    loss = net(torch.arange(40).view(2, 20), None, CAUSAL).logsumexp(-1).sum()
    with Operators() as operators:
        loss.backward()
    return [p.grad for p in net.parameters()], operators.num


@pytest.mark.parametrize(
    ("mode", "option", "num_products", "num_choices"),
    # Two grouped products are the gradients of the inputs; the others are repeated.
    [("none", "op", 2, 0), ("full", "op", 4, 1), ("selective", "op", 3, 0), ("selective", "mlp", 4, 1)],
)
def test_experts_are_repeated_as_the_mode_says(
    mode: str, option: str, num_products: int, num_choices: int
) -> None:
    """With `op`, the choice of a router and the first of its experts' products are kept."""
    actual, num = gradients(mode, option)
    assert num["titanlite.grouped_mm.default"] == num_products
    assert num["aten.topk.default"] == num_choices
    assert all(torch.equal(a, b) for a, b in zip(actual, gradients("none")[0], strict=True))
