"""Context parallel: the tokens of each sequence are sharded over ranks, and attention gathers all keys and
values (Llama 3, Grattafiori et al. 2024, section 3.3.2).

With R ranks every sequence is split into 2R chunks. Rank r has chunks r and 2R - 1 - r ("head-tail"), so that
under a causal mask all ranks compute equally many scores.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.torch_compat import all_gather_with_gradient


class SequenceSharding:
    """The assignment of a sequence's tokens to the ranks along `mesh`."""

    def __init__(self, mesh: DeviceMesh):
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self._group = mesh.get_group()

    def gathered_positions(self, length: int, device: torch.device) -> torch.Tensor:
        """The position of each gathered token in a sequence of `length` tokens, int64 [T]."""
        chunks = torch.arange(length, device=device).view(2 * self.size, -1)
        return torch.cat([torch.cat((chunks[r], chunks[-1 - r])) for r in range(self.size)])

    def local_positions(self, length: int, device: torch.device) -> torch.Tensor:
        """The position of each of this rank's tokens, int64 [T / size]."""
        return self.gathered_positions(length, device).view(self.size, -1)[self.rank]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather [B, T / size, ...] from all ranks: [B, T, ...], in the order of `gathered_positions`.
        Gradients are summed over ranks."""
        return all_gather_with_gradient(x.contiguous(), 1, self._group)

    def gather_in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Gather [B, T / size, ...] from all ranks: [B, T, ...], in the order of the sequence."""
        heads, tails = self.gather(x).unflatten(1, (self.size, 2, -1)).unbind(2)
        return torch.cat((heads, tails.flip(1)), 1).flatten(1, 2)
