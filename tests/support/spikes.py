"""A loss that spikes because of a range of the data order: its sequences are random tokens, or their
gradients have the wrong sign."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from titanlite import train as trainer
from titanlite.data import held_out
from titanlite.data.batch import Batch
from titanlite.data.packing import TokenSequence
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.run import Run


@contextmanager
def garbage_sequences(first: int, last: int, vocab_size: int = 256) -> Iterator[None]:
    """In the body, the training sequences with the numbers `first` to `last` are random tokens, which depend
    on the number alone. For runs without loader workers."""
    make_batch = held_out.make_batch

    def with_garbage(numbers: Sequence[int], sequences: Sequence[TokenSequence], **settings: Any) -> Batch:
        replaced = [
            replace(sequence, tokens=_random(number, sequence.tokens, vocab_size))
            if first <= number <= last
            else sequence
            for number, sequence in zip(numbers, sequences)
        ]
        return make_batch(numbers, replaced, **settings)

    with patch.object(held_out, "make_batch", with_garbage):
        yield


@contextmanager
def wrong_gradients(first: int, last: int) -> Iterator[None]:
    """In the body, steps that begin with a sequence from `first` to `last` have the negative of their
    gradients, on all ranks, so that each of them raises the loss."""
    build, forward_backward, runs = trainer.build, ShardedModel.forward_backward, list[Run]()

    def building(*args: Any) -> Run:
        runs.append(build(*args))
        return runs[-1]

    def with_wrong_sign(self: ShardedModel, *args: Any) -> torch.Tensor:
        loss = forward_backward(self, *args)
        if first <= runs[-1].state.next_sequence <= last:
            for p in self.net.parameters():
                if p.grad is not None:
                    p.grad.neg_()
        return loss

    with (
        patch.object(trainer, "build", building),
        patch.object(ShardedModel, "forward_backward", with_wrong_sign),
    ):
        yield


def _random(number: int, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(number).integers(vocab_size, size=len(tokens)).astype(tokens.dtype)
