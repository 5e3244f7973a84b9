"""The probe: statistics of what happens inside the blocks, from an additional forward of one micro-batch.

Each rank records its own tokens, heads, MLP units and blocks in two tables that have a row for every block
of the model. One all-reduce of each table, by sum and by maximum, makes the statistics of the whole model,
which are equal on every layout within rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.attention.base import Attention
from titanlite.attention.recording import RecordingAttention
from titanlite.mesh import Mesh, local_shard
from titanlite.models.base import Decoder

NUM_QUERIES = 64  # attention is measured for so many tokens at the end of each sequence
DEAD = 1e-3  # a unit is dead if no token's activation exceeds this share of the RMS over all units


@dataclass(frozen=True)
class BlockStatistics:
    """Statistics of one block. The lists have a value per head."""

    block: str
    """The block's name in the model."""
    residual_rms: float
    """Root mean square of the residual stream after the block."""
    residual_max: float
    """Largest magnitude in the residual stream after the block."""
    attention_logit_max: list[float]
    """Largest attention logit. Empty if the attention was not measured."""
    attention_entropy: list[float]
    """Mean entropy of the attention probabilities, in nats. Empty if the attention was not measured."""
    dead_units_pct: float | None
    """Share of dead MLP units. None if the units were not measured."""


def mlp_units(net: Decoder) -> dict[str, int]:
    """The names of the blocks in order, with the number of MLP units of each: 0 if the family does not name
    the layer that they enter. `net`: the whole model, before any transform."""
    names = {module: name for name, module in net.named_modules()}
    units = dict[str, int]()
    for block in _probed(net):
        down = _mlp_down(net, block)
        units[names[block]] = down.in_features if isinstance(down, nn.Linear) else 0
    return units


def _probed(net: Decoder) -> list[nn.Module]:
    """The blocks that a forward without gradients runs."""
    blocks = list(net.blocks().values())
    return blocks[: len(blocks) - len(net.training_blocks())]


def _mlp_down(net: Decoder, block: nn.Module) -> nn.Module | None:
    """The block's layer whose inputs are the hidden units of the MLP; None if it has no such layer."""
    return dict(block.named_modules()).get(net.mlp_down) if net.mlp_down else None


@contextmanager
def state_unchanged(net: Decoder, device: torch.device) -> Iterator[None]:
    """Restores the values of all buffers and the state of the random number generators after the body."""
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, value in buffers:
        buffer.copy_(value)


class BlockRecorder:
    """Records a forward of `net`, this rank's blocks of a model. `units`: the `mlp_units` of the whole
    model."""

    def __init__(self, net: Decoder, units: Mapping[str, int], mesh: Mesh, device: torch.device):
        self._net, self._units, self._mesh = net, units, mesh
        self._rows = {name: row for row, name in enumerate(units)}
        self._row = 0  # of the block that is running
        num_heads, num_units = net.config.n_heads, max(units.values())
        # -inf and 0 stay where this rank has no tokens, heads, units or blocks.
        self._maxima = torch.full((len(units), 1 + num_heads + num_units), -math.inf, device=device)
        self._residual_max, self._logit_max, self._unit_max = self._maxima.split((1, num_heads, num_units), 1)
        self._sums = torch.zeros(len(units), 4 + 2 * num_heads, device=device)
        self._residual, self._hidden, self._entropy, self._queries = self._sums.split(
            (2, 2, num_heads, num_heads), 1
        )

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Records the residual stream and the MLP units in each block that runs in the body."""
        names = {module: name for name, module in self._net.named_modules()}
        with ExitStack() as stack:
            for block in _probed(self._net):
                row = self._rows[names[block]]
                handles = [
                    block.register_forward_pre_hook(partial(self._enter_block, row)),
                    block.register_forward_hook(partial(self._record_residual, row)),
                ]
                if self._units[names[block]] and (down := _mlp_down(self._net, block)) is not None:
                    # It runs before the hooks of tensor parallel and float8, which change the input.
                    hook = partial(self._record_units, row)
                    handles.append(down.register_forward_pre_hook(hook, prepend=True))
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def attention(self, attention: Attention, queries: torch.Tensor) -> Attention:
        """`attention`, which then records the queries at the indices `queries` int64 [Q] in each block."""
        return RecordingAttention(attention, queries, self._record_attention)

    def statistics(self) -> list[BlockStatistics]:
        """The statistics of all blocks of the model, over all ranks. Waits for the device. Collective."""
        if self._mesh.device_mesh is not None:
            dist.all_reduce(self._sums)
            dist.all_reduce(self._maxima, dist.ReduceOp.MAX)
        residual_rms, hidden_rms = (s[:, :1].div(s[:, 1:]).sqrt() for s in (self._residual, self._hidden))
        num_units = torch.tensor([*self._units.values()], device=self._sums.device)[:, None]
        exists = torch.arange(self._unit_max.shape[1], device=self._sums.device) < num_units
        dead = (self._unit_max <= DEAD * hidden_rms) & exists
        dead_pct = 100 * dead.sum(1, keepdim=True) / num_units
        # A maximum over ranks may drop a NaN; a sum keeps it.
        residual_max = self._residual_max.where(residual_rms.isfinite(), residual_rms)
        logit_max = self._logit_max.where(self._entropy.isfinite(), self._entropy)
        parts = (residual_rms, residual_max, dead_pct, logit_max, self._entropy / self._queries)
        statistics = []
        for name, (rms, largest, dead_units, *heads) in zip(self._units, torch.cat(parts, 1).tolist()):
            logits, entropies = heads[: len(heads) // 2], heads[len(heads) // 2 :]
            if -math.inf in logits:  # a head whose attention did not tell which keys a query sees
                logits, entropies = [], []
            measured = dead_units if self._units[name] else None
            statistics.append(BlockStatistics(name, rms, largest, logits, entropies, measured))
        return statistics

    def _enter_block(self, row: int, block: nn.Module, args: Any) -> None:
        self._row = row

    def _record_residual(self, row: int, block: nn.Module, args: Any, output: torch.Tensor) -> None:
        x_BTD = local_shard(output)
        _keep_larger(self._residual_max[row], _norm(x_BTD, math.inf))
        _add_square(self._residual[row], x_BTD)

    def _record_units(self, row: int, layer: nn.Linear, args: Any) -> None:
        h_BTF = local_shard(args[0])
        columns = self._columns(h_BTF.shape[-1], layer.in_features)
        _keep_larger(self._unit_max[row, columns], _norm(h_BTF.flatten(0, -2), math.inf, dim=0))
        _add_square(self._hidden[row], h_BTF)

    def _record_attention(self, logit_max: torch.Tensor, entropy_sum: torch.Tensor, num_queries: int) -> None:
        columns = self._columns(len(logit_max), self._net.config.n_heads)
        _keep_larger(self._logit_max[self._row, columns], logit_max)
        self._entropy[self._row, columns] += entropy_sum
        self._queries[self._row, columns] += num_queries

    def _columns(self, num_local: int, num: int) -> slice:
        """The numbers of this rank's heads or MLP units, of which the model has `num`."""
        first = 0 if num_local == num else self._mesh.coordinate.tp * num_local
        return slice(first, first + num_local)


def _norm(x: torch.Tensor, order: float = 2.0, dim: int | None = None) -> torch.Tensor:
    return torch.linalg.vector_norm(x, order, dim, dtype=torch.float32)


def _keep_larger(largest: torch.Tensor, values: torch.Tensor) -> None:
    largest.copy_(torch.maximum(largest, values))  # NaN stays NaN


def _add_square(sums: torch.Tensor, x: torch.Tensor) -> None:
    """Add the sum of squares and the number of elements of `x` to the two `sums`."""
    sums[0] += _norm(x).square()
    sums[1] += x.numel()
