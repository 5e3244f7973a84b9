"""Bad steps: NaN in each place where it can arise in a step, a large gradient, and random tokens in place of
the sequences. For tests in one process and on several ranks."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite import train as trainer
from titanlite.data.batch import Batch
from titanlite.parallel.sharded_model import ShardedModel

FAULTS = ("gradient", "weight", "loss")  # not finite
OUTLIERS = ("large gradient", "random tokens")
WATCHED = [  # a run of 20 steps that finds outliers from step 7 on
    "--guard.skip_sigma=6", "--guard.window=6",
    "--optimizer.lr=1e-2", "--lr_scheduler.total_steps=40", "--training.steps=20",
]  # fmt: skip
VALUES = {"gradient": math.nan, "large gradient": 1e3}


def _on_last_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def _first_element(tensor: torch.Tensor) -> torch.Tensor | None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.view(-1)[:1] if local.numel() else None


def _first(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    """One element of which this rank has a copy or the shard."""
    return next(element for t in tensors if (element := _first_element(t)) is not None)


def _bad_loss(head_fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda hidden, weight: head_fn(hidden, weight) * math.nan


def _with_random_tokens(batch: Batch) -> Batch:
    """The batch with other tokens, which are equal on ranks that share its sequences."""
    generator = torch.Generator().manual_seed(batch.hash % (1 << 32))
    inputs, targets = (
        torch.randint(258, t.shape, generator=generator).to(t) for t in (batch.inputs, batch.targets)
    )
    return replace(batch, inputs=inputs, targets=targets)


@contextmanager
def bad_steps(steps: Collection[int], fault: str = "gradient", signal_at: int = 0) -> Iterator[None]:
    """Runs in the body have a fault in each of `steps`. On the last rank alone: NaN in one element of a
    gradient, in one element of a weight while gradients are computed, or in the loss of one micro-batch; or a
    large number in one element of a gradient. On all ranks: random tokens in place of the sequences.

    `fault` = "nothing": the optimizer's step is left out there instead. `signal_at`: the process sends itself
    SIGTERM in that step.
    """
    forward_backward, inputs = ShardedModel.forward_backward, ShardedModel.model_inputs
    build, guarded_step = trainer.build, trainer.guarded_step
    runs: list[trainer.Run] = []
    spoiled: list[bool] = []

    def step() -> int:
        return runs[-1].state.step

    def building(*args: Any) -> trainer.Run:
        runs.append(build(*args))
        return runs[-1]

    def with_fault(self: ShardedModel, batches: Sequence[Batch], *args: Any) -> torch.Tensor:
        here = fault if step() in steps and _on_last_rank() else ""
        spoiled[:] = [True] if here == "loss" else []
        weight = _first(p.detach() for p in reversed([*self.net.parameters()]))  # one that every token meets
        before = weight.clone()
        if here == "weight":
            weight.fill_(math.nan)
        if fault == "random tokens" and step() in steps:
            batches = [_with_random_tokens(batch) for batch in batches]
        loss = forward_backward(self, batches, *args)
        weight.copy_(before)
        if here in VALUES:
            _first(p.grad for p in self.net.parameters() if p.grad is not None).fill_(VALUES[here])
        if step() == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    def with_bad_loss(self: ShardedModel, *args: Any) -> Any:
        made = inputs(self, *args)
        return made._replace(head_fn=_bad_loss(made.head_fn)) if spoiled and spoiled.pop() else made

    def left_out(*args: Any) -> None:
        if step() not in steps:
            guarded_step(*args)

    with (
        patch.object(trainer, "build", building),
        patch.object(ShardedModel, "forward_backward", with_fault),
        patch.object(ShardedModel, "model_inputs", with_bad_loss),
        patch.object(trainer, "guarded_step", left_out if fault == "nothing" else guarded_step),
    ):
        yield
