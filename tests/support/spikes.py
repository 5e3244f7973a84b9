"""A loss that spikes because of its data: sequences of random tokens in a range of the data order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from titanlite.data import loader
from titanlite.data.batch import Batch
from titanlite.data.packing import TokenSequence


@contextmanager
def garbage_sequences(first: int, last: int, vocab_size: int = 256) -> Iterator[None]:
    """In the body, the training sequences with the numbers `first` to `last` are random tokens, which depend
    on the number alone. For runs without loader workers."""
    make_batch = loader.make_batch

    def with_garbage(numbers: Sequence[int], sequences: Sequence[TokenSequence], **settings: Any) -> Batch:
        replaced = [
            replace(sequence, tokens=_random(number, sequence.tokens, vocab_size))
            if first <= number <= last
            else sequence
            for number, sequence in zip(numbers, sequences)
        ]
        return make_batch(numbers, replaced, **settings)

    with patch.object(loader, "make_batch", with_garbage):
        yield


def _random(number: int, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(number).integers(vocab_size, size=len(tokens)).astype(tokens.dtype)
