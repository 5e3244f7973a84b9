"""Batch: the rows of one micro-batch. The contract between the loader and whatever consumes rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from titanlite.data.packing import Row

IGNORE = -100  # a target that does not count; cross_entropy's own default

_U64 = 1 << 64


@dataclass(frozen=True)
class Batch:
    """inputs, targets: int64 [rows, seq_len]; targets are IGNORE where they do not count.

    `positions`: int64 [rows, seq_len], from 0 in each of `num_documents` documents and at each row's
    beginning, where documents are masked from each other; else None. `num_targets`: targets that count, known
    on the host before the forward. `sha`: sum of the rows' 64-bit hashes mod 2^64; summed over a step's
    micro-batches and ranks it names the global batch, however that was split."""

    inputs: torch.Tensor
    targets: torch.Tensor
    num_targets: int
    sha: int
    positions: torch.Tensor | None = None
    num_documents: int = 0

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; asynchronous from pinned memory."""
        # From pageable memory that is freed at once an asynchronous copy may read anything (MPS: pytorch
        # 189690).
        return self._map(lambda t: t.to(device, non_blocking=t.is_pinned()))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory; the loader's pinning thread calls it."""
        return self._map(torch.Tensor.pin_memory)

    def __reduce__(self) -> tuple[Any, ...]:
        # A batch comes from a loader worker by value: shared memory costs a handshake of 0.4 ms a tensor.
        tensors = (self.inputs, self.targets, self.positions)
        small = [None if t is None else t.numpy().astype(np.int32) for t in tensors]
        return _received, (*small, self.num_targets, self.sha, self.num_documents)

    def _map(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        positions = None if self.positions is None else of(self.positions)
        return replace(self, inputs=of(self.inputs), targets=of(self.targets), positions=positions)


def _received(inputs: Any, targets: Any, positions: Any, *counts: int) -> Batch:
    tensors = (
        None if a is None else torch.from_numpy(a.astype(np.int64)) for a in (inputs, targets, positions)
    )
    inputs, targets, positions = tensors
    num_targets, sha, num_documents = counts
    return Batch(inputs, targets, num_targets, sha, positions, num_documents)


def make_batch(
    numbers: Sequence[int],
    rows: Sequence[Row],
    *,
    seq_len: int,
    num_rows: int | None = None,
    with_positions: bool = False,
) -> Batch:
    """Rows with their global numbers as a batch; padded to `num_rows`.

    Where a row says where its documents begin, no target crosses from one to the next.
    """
    num_rows = len(rows) if num_rows is None else num_rows
    inputs = np.zeros((num_rows, seq_len), dtype=np.int64)
    targets = np.full((num_rows, seq_len), IGNORE, dtype=np.int64)
    began = np.zeros((num_rows, seq_len), dtype=np.int64)  # where the latest document did, once accumulated
    num_documents, ignored = num_rows, (num_rows - len(rows)) * seq_len
    for i, row in enumerate(rows):
        inputs[i], targets[i] = row.tokens[:-1], row.tokens[1:]
        if row.begins is not None:
            inner = row.begins[row.begins > 0]
            targets[i, inner - 1] = IGNORE
            targets[i, seq_len - row.num_padding :] = IGNORE
            ignored += len(inner) + row.num_padding
            inner = inner[inner < seq_len]
            began[i, inner] = inner
            num_documents += len(inner)
    positions = np.arange(seq_len) - np.maximum.accumulate(began, axis=1) if with_positions else None
    sha = sum(row_hash(number, row.tokens) for number, row in zip(numbers, rows)) % _U64
    return Batch(
        torch.from_numpy(inputs), torch.from_numpy(targets), targets.size - ignored, sha,
        None if positions is None else torch.from_numpy(positions), num_documents,
    )  # fmt: skip


def row_hash(number: int, row: np.ndarray) -> int:
    """64-bit hash of a row's tokens and its place in the run's order."""
    data = number.to_bytes(8, "little") + row.astype("<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
