"""Batch: the rows of one micro-batch. The contract between the loader and whatever consumes rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

IGNORE = -100  # a target that does not count; cross_entropy's own default

_U64 = 1 << 64


@dataclass(frozen=True)
class Batch:
    """inputs, targets: int64 [rows, seq_len]; targets are IGNORE where they do not count.

    `num_targets`: targets that count, known on the host before the forward. `sha`: sum of the rows' 64-bit
    hashes mod 2^64; summed over a step's micro-batches and ranks it names the global batch, however that was
    split.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    num_targets: int
    sha: int

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; asynchronous from pinned memory."""
        # From pageable memory that is freed at once an asynchronous copy may read anything (MPS: pytorch
        # 189690).
        inputs, targets = (t.to(device, non_blocking=t.is_pinned()) for t in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory; the loader's pinning thread calls it."""
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())


def make_batch(
    numbers: Sequence[int],
    rows: Sequence[np.ndarray],
    *,
    num_rows: int | None = None,
    seq_len: int | None = None,
) -> Batch:
    """Rows int64 [seq_len + 1] with their global numbers as a batch; padded to `num_rows`."""
    num_rows = len(rows) if num_rows is None else num_rows
    width = len(rows[0]) if seq_len is None else seq_len + 1
    tokens = torch.zeros((num_rows, width), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i] = torch.from_numpy(row)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    targets[len(rows) :] = IGNORE
    sha = sum(row_hash(number, row) for number, row in zip(numbers, rows)) % _U64
    return Batch(inputs, targets, num_targets=int((targets != IGNORE).sum()), sha=sha)


def row_hash(number: int, row: np.ndarray) -> int:
    """64-bit hash of a row's tokens and its place in the run's order."""
    data = number.to_bytes(8, "little") + row.astype("<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
