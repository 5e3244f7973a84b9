"""Batch: the sequences of one micro-batch as tensors, the contract between the loader and the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from titanlite.data.packing import TokenSequence
from titanlite.losses import IGNORE

_U64 = 1 << 64


@dataclass(frozen=True)
class Batch:
    """inputs, targets: int64 [sequences, seq_len]; targets that do not count in the loss are IGNORE.

    `positions`: int64 [sequences, seq_len], restarting from 0 at each of the `num_documents` documents and at
    the start of each sequence; None unless documents are masked from each other. `source_ids`: int64
    [sequences], the index of each sequence's source in SequenceDataset.source_names; None in validation.
    `num_targets`: number of targets that count, known on the host before the forward. `hash`: sum of the
    sequences' 64-bit hashes mod 2^64. The sum of `hash` over the micro-batches and ranks of a step identifies
    the global batch on any layout."""

    inputs: torch.Tensor
    targets: torch.Tensor
    num_targets: int
    hash: int
    positions: torch.Tensor | None = None
    num_documents: int = 0
    source_ids: torch.Tensor | None = None

    def split(self, num_splits: int) -> Batch:
        """Return the batch with each sequence as `num_splits` shorter sequences, [sequences * num_splits,
        seq_len / num_splits], which do not attend to each other. The batch must be on the host.

        All targets still count: the last target of a shorter sequence is the first token of the next. `hash`
        stays the hash of the whole sequences. Without `positions`, num_documents stays, too. Raises
        ValueError if num_splits does not divide seq_len."""
        if num_splits == 1:
            return self
        num_sequences, seq_len = self.inputs.shape
        if num_splits < 1 or seq_len % num_splits:
            raise ValueError(f"{seq_len} tokens cannot be split into {num_splits} sequences of equal length")
        shape = num_sequences * num_splits, seq_len // num_splits
        batch = replace(self, inputs=self.inputs.reshape(shape), targets=self.targets.reshape(shape))
        if self.source_ids is not None:
            batch = replace(batch, source_ids=self.source_ids.repeat_interleave(num_splits))
        if self.positions is not None:  # a document that continues in the next sequence begins again there
            positions = self.positions.reshape(shape).minimum(torch.arange(shape[1]))
            batch = replace(batch, positions=positions, num_documents=int((positions == 0).sum()))
        return batch

    def ahead(self, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and the targets that are `distance` places later, int64 [sequences, seq_len];
        past the end of a sequence, 0 and IGNORE. A later target counts only if all targets from the token's
        own target to the later one count, so that none crosses the end of a document or a prompt."""
        tokens, targets = F.pad(self.inputs, (0, distance))[:, distance:], self.targets
        for _ in range(distance):
            targets = F.pad(targets[:, 1:], (0, 1), value=IGNORE).where(self.targets != IGNORE, IGNORE)
        return tokens, targets

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; the copy is asynchronous from pinned memory."""
        # An asynchronous copy reads freed memory if its source is pageable and freed at once (on MPS: pytorch
        # issue 189690).
        return self._map(lambda t: t.to(device, non_blocking=t.is_pinned()))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked host memory. The loader's pinning thread calls this."""
        return self._map(torch.Tensor.pin_memory)

    def __reduce__(self) -> tuple[Any, ...]:
        # Loader workers send batches by value: shared memory costs a handshake of 0.4 ms per tensor.
        values = vars(self).values()
        return _received, tuple(v.numpy().astype(np.int32) if torch.is_tensor(v) else v for v in values)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors: dict[str, Any] = {name: change(v) for name, v in vars(self).items() if torch.is_tensor(v)}
        return replace(self, **tensors)


def _received(*values: Any) -> Batch:
    fields: list[Any] = [
        torch.from_numpy(v.astype(np.int64)) if isinstance(v, np.ndarray) else v for v in values
    ]
    return Batch(*fields)


class MicroBatch(NamedTuple):
    """The sequences of a micro-batch, by their global numbers. `num_splits`: each sequence is trained as this
    many shorter ones."""

    numbers: list[int]
    num_splits: int = 1


def make_batch(
    numbers: Sequence[int],
    sequences: Sequence[TokenSequence],
    *,
    seq_len: int,
    num_sequences: int | None = None,
    with_positions: bool = False,
) -> Batch:
    """Make a batch of sequences and their global numbers, padded to `num_sequences` sequences.

    Where a sequence has `document_starts`, no target crosses from one document to the next. Where it has a
    `loss_mask`, only the tokens that the mask names are targets.
    """
    num_sequences = len(sequences) if num_sequences is None else num_sequences
    inputs = np.zeros((num_sequences, seq_len), dtype=np.int64)
    targets = np.full((num_sequences, seq_len), IGNORE, dtype=np.int64)
    latest_start = np.zeros((num_sequences, seq_len), dtype=np.int64)  # start of each token's document
    num_documents = num_sequences
    for i, sequence in enumerate(sequences):
        inputs[i], targets[i] = sequence.tokens[:-1], sequence.tokens[1:]
        if sequence.document_starts is not None:
            inner = sequence.document_starts[sequence.document_starts > 0]
            targets[i, inner - 1] = IGNORE
            targets[i, seq_len - sequence.num_padding :] = IGNORE
            inner = inner[inner < seq_len]
            latest_start[i, inner] = inner
            num_documents += len(inner)
        if sequence.loss_mask is not None:
            targets[i, ~sequence.loss_mask[1:]] = IGNORE
    positions = np.arange(seq_len) - np.maximum.accumulate(latest_start, axis=1) if with_positions else None
    total_hash = (
        sum(sequence_hash(n, sequence.tokens, sequence.loss_mask) for n, sequence in zip(numbers, sequences))
        % _U64
    )
    return Batch(
        torch.from_numpy(inputs), torch.from_numpy(targets), int((targets != IGNORE).sum()), total_hash,
        None if positions is None else torch.from_numpy(positions), num_documents,
    )  # fmt: skip


def sequence_hash(number: int, tokens: np.ndarray, loss_mask: np.ndarray | None = None) -> int:
    """Return a 64-bit hash of a sequence's global number, its tokens, and its loss mask if it has one."""
    data = number.to_bytes(8, "little") + tokens.astype("<u4").tobytes()
    data += b"" if loss_mask is None else np.packbits(loss_mask).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
