"""A weight whose shards are trained by CompiledAdamW, each by itself, as ranks do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from titanlite.optim.low_bit import CompiledAdamW, moments

Cut = Callable[[torch.Tensor], list[torch.Tensor]]
SHAPE = (48, 512)


def gradient(shape: tuple[int, ...] | torch.Size, step: int) -> torch.Tensor:
    """A gradient whose rows differ in size by a factor of 1000."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(step))
    return g * torch.logspace(-3, 0, shape[0])[:, None] if len(shape) == 2 else g


def whole(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone()]


def rows(x: torch.Tensor) -> list[torch.Tensor]:
    """Three shards of rows, of which the last is smaller."""
    return [part.clone() for part in x.split([17, 17, 14])]


def grid(x: torch.Tensor) -> list[torch.Tensor]:
    """Two x two shards of different sizes."""
    return [part.clone() for half in x.split([20, 28]) for part in half.split([64, x.shape[1] - 64], 1)]


def trained_shards(cut: Cut, device: str = "cpu", block_of_shard: bool = False) -> list[torch.Tensor]:
    """The shards of a weight and of its moments after five steps. `block_of_shard`: torchao's rule, by which
    the state of a shard is in 8 bits if the shard's number of elements is a multiple of the block."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    params = [nn.Parameter(shard) for shard in cut(weight)]
    kinds = ["int8" if not block_of_shard or p.numel() % 1024 == 0 else "float32" for p in params]
    optimizers = [
        CompiledAdamW([{"params": [p], "lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}], 1e-8, kind)
        for p, kind in zip(params, kinds)
    ]
    for step in range(1, 6):
        for p, shard, optimizer in zip(params, cut(gradient(SHAPE, step).to(device)), optimizers):
            p.grad = shard
            optimizer.step()
    states = [moments(optimizer.state[p]) for optimizer, p in zip(optimizers, params)]
    return [torch.stack([p.detach(), *state]) for p, state in zip(params, states)]


def joined(shards: list[torch.Tensor]) -> torch.Tensor:
    """The whole weight and its moments, [3, rows, columns]."""
    if len(shards) == 4:
        shards = [torch.cat(shards[:2], -1), torch.cat(shards[2:], -1)]
    return torch.cat(shards, 1)
