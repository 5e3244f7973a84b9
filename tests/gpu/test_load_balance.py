"""The balance of experts on CUDA: equal counts and gradients however the router is compiled or repeated."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from titanlite.models.load_balance import LoadBalance
from titanlite.models.moe import Router
from titanlite.models.qwen3_moe import Qwen3MoE

pytestmark = pytest.mark.gpu
NUM_TOKENS = 4096


@pytest.mark.parametrize("kind", ["global", "sequence"])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_counts_and_gradients(kind: str, repeated: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    config = Qwen3MoE(flavor="debug").config
    router = Router(config).cuda()
    torch.nn.init.normal_(router.weight, std=0.1)
    load = router.load
    load.enable(LoadBalance(load_balance=kind, z_loss_coeff=0.1), counts_in_forward=False)
    load.share_gradient.copy_(torch.arange(config.n_experts) / NUM_TOKENS)
    load.factors.fill_(1 / NUM_TOKENS)
    h_ND = torch.randn(NUM_TOKENS, config.dim, device="cuda")

    def weights_and_counts(h_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = router(h_ND, 4)
        return routing.weights_NK, routing.counts_E

    def run(forward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        load.begin_step()
        router.weight.grad = None
        counts = 0
        for part in h_ND.chunk(2):
            weights, new = checkpoint(forward, part, use_reentrant=False) if repeated else forward(part)
            weights.square().sum().backward()
            counts = counts + new
        with torch.no_grad():
            forward(h_ND)
        return router.weight.grad, load.step_statistics()[: config.n_experts], counts

    expected, _, _ = run(weights_and_counts)
    forward = torch.compile(weights_and_counts, fullgraph=True) if compiled else weights_and_counts
    gradient, counted, counts = run(forward)
    assert torch.equal(counted, counts.float())
    assert counts.sum() == NUM_TOKENS * config.n_experts_per_token
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)
