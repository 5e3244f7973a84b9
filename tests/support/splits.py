"""Training with sequences that are split into shorter ones, on any layout, and its reference: whole sequences
under a mask that hides the shorter ones from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tests.support.gradients import NUM_SEQUENCES, SHAPE, build
from titanlite.data.batch import Batch, make_batch
from titanlite.data.packing import TokenSequence
from titanlite.metrics.token_statistics import POSITION_BINS, TokenStatistics

SEQ_LEN = 16
NUM_MICRO_BATCHES = 2


def whole_batch(step: int, masked: bool, seq_len: int = SEQ_LEN, most_documents: int = 4) -> Batch:
    """The sequences of a step. With `masked`, each has some documents, which are masked from each other, and
    some have padding."""
    rng = np.random.default_rng(step)
    sequences = []
    for i in range(NUM_SEQUENCES):
        tokens = rng.integers(0, SHAPE["vocab_size"], seq_len + 1)
        starts = rng.integers(0, seq_len - 2, i % most_documents)
        documents = np.unique([0, *starts]) if masked else None
        sequences.append(TokenSequence(tokens, documents, num_padding=2 if masked and i % 2 else 0))
    return make_batch(range(NUM_SEQUENCES), sequences, seq_len=seq_len, with_positions=masked)


def hidden_from_each_other(batch: Batch, num_splits: int) -> Batch:
    """The whole sequences, with positions that begin again where a shorter sequence begins: the mask of
    documents is then that of the shorter sequences, too."""
    num_sequences, seq_len = batch.inputs.shape
    in_shorter = torch.arange(seq_len) % (seq_len // num_splits)
    positions = in_shorter.expand(num_sequences, -1)
    positions = positions if batch.positions is None else torch.minimum(positions, batch.positions)
    return replace(batch, positions=positions, num_documents=int((positions == 0).sum()))


def sequences_of(batch: Batch, begin: int, count: int) -> Batch:
    """`count` sequences of the batch, from number `begin` on."""
    inputs, targets = batch.inputs[begin : begin + count], batch.targets[begin : begin + count]
    positions = None if batch.positions is None else batch.positions[begin : begin + count]
    num_documents = count if positions is None else int((positions == 0).sum())
    return Batch(inputs, targets, 0, 0, positions, num_documents)


def trained(
    world_size: int,
    rank: int,
    num_splits: Sequence[int],
    masked: bool,
    *,
    reference: bool = False,
    **layout: Any,
) -> dict[str, torch.Tensor]:
    """Train steps whose sequences are split into `num_splits[step]` shorter ones, or with `reference` are
    whole and masked, each followed by a validation on whole sequences. Returns the losses of all, and of the
    last step the losses by position, the statistics of a probe, gradients and weights."""
    model = build(world_size, rank, **layout)
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.3, momentum=0.9)
    size = NUM_SEQUENCES // model.mesh.dp_size // NUM_MICRO_BATCHES
    begins = [(a * model.mesh.dp_size + model.mesh.dp_rank) * size for a in range(NUM_MICRO_BATCHES)]
    losses = []
    for step, splits in enumerate(num_splits):
        batch = whole_batch(step, masked)
        parts = [sequences_of(batch, begin, size) for begin in begins]
        micro_batches = [
            hidden_from_each_other(part, splits) if reference else part.split(splits) for part in parts
        ]
        statistics = TokenStatistics(
            seq_len=SEQ_LEN, num_micro_batches=NUM_MICRO_BATCHES, sources=[], is_cross_entropy=True,
            device=torch.device("cpu"),
        )  # fmt: skip
        optimizer.zero_grad()
        losses.append(model.forward_backward(micro_batches, torch.tensor(batch.num_targets), statistics))
        optimizer.step()
        model.after_step(torch.tensor(True))
        losses.append(sum(model.loss_sum(part) for part in parts) / batch.num_targets)
    by_position = statistics.sums[-2 * POSITION_BINS :] * model.mesh.is_tp_leader
    results = {"losses": torch.stack(losses), "losses by position": by_position}
    if world_size > 1:
        for value in results.values():
            torch.distributed.all_reduce(value)
    blocks = model.probe(micro_batches[0])
    for key in ("residual_rms", "residual_max", "attention_logit_max", "attention_entropy"):
        results[key] = torch.tensor([getattr(block, key) for block in blocks])
    for name, p in model.net.named_parameters():
        for key, value in ((name, p.detach()), (f"gradient of {name}", p.grad)):
            results[key] = value.full_tensor() if isinstance(value, DTensor) else value
    return results


def on_rank(
    world_size: int, num_splits: Sequence[int], masked: bool, layout: dict[str, Any]
) -> dict[str, torch.Tensor]:
    return trained(world_size, torch.distributed.get_rank(), num_splits, masked, **layout)
