"""Compile and recompute: one graph serves all blocks, values stay, activations are really recomputed."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from titanlite.losses import cross_entropy
from titanlite.models.base import Decoder
from titanlite.models.llama3 import Llama3
from titanlite.parallel.recompute import ActivationCheckpoint, apply_recompute

SHAPE = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "hidden_dim": 64,
    "vocab_size": 99,
}


def build() -> Decoder:
    net = Llama3(flavor="debug", overrides=SHAPE).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return net


def step(net: Decoder) -> tuple[float, list[torch.Tensor]]:
    tokens = torch.arange(24).reshape(2, 12)
    loss = net(tokens, tokens, cross_entropy)
    loss.backward()
    return loss.item(), [p.grad for p in net.parameters()]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_one_graph_serves_all_blocks_and_changes_nothing(mode: str) -> None:
    wanted_loss, wanted = step(build())
    torch._dynamo.reset()
    net, counter = build(), CompileCounter()
    apply_recompute(net, ActivationCheckpoint(mode=mode))
    for block in net.blocks().values():
        block.compile(fullgraph=True, backend=counter)
    loss, gradients = step(net)
    assert counter.frame_count == 1, "every block compiled its own graph, or none at all"
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, wanted))


def test_full_recompute_keeps_only_the_blocks_inputs() -> None:
    def saved_elements(mode: str) -> int:
        net = build()
        apply_recompute(net, ActivationCheckpoint(mode=mode))
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            step(net)
        return sum(sizes)

    assert saved_elements("full") < 0.5 * saved_elements("none")
