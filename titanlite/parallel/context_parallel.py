"""Context parallel: the tokens of each row are divided over the ranks of the `context` axis, and attention
gathers the keys and values of all of them (Llama 3, Grattafiori et al. 2024, section 3.3.2).

Every row is cut into twice as many pieces as there are ranks; rank r has piece r and the r-th from the end,
so that all see as many keys under a causal mask. Where documents are masked from each other, keys stay in the
order in which they are gathered: the mask knows where each is from.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

from titanlite.attention.base import Gathered, Pieces, part_mask

# torch 2.13 has renamed it
_all_gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd


class Context:
    """This rank's part of the rows. `backend`: the kernel of attention, as AttentionBackend names it."""

    def __init__(self, mesh: DeviceMesh, backend: str):
        self.size, self.rank, self.backend = mesh.size(), mesh.get_local_rank(), backend
        self._group = mesh.get_group()

    def places(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Where in a row of `length` this rank's tokens are, and where gathered ones are: int64 [T / size],
        [T]."""
        pieces = torch.arange(length, device=device).view(2 * self.size, -1)
        there = torch.cat([torch.cat((pieces[r], pieces[-1 - r])) for r in range(self.size)])
        return there.view(self.size, -1)[self.rank], there

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T / size, ...] of all ranks, as [B, T, ...] in the order of `places`. Gradients are summed."""
        return _all_gather(x.contiguous(), 1, self._group)

    def gather_row(self, x: torch.Tensor) -> torch.Tensor:
        """The same in the order of the row."""
        first, last = self.gather(x).unflatten(1, (self.size, 2, -1)).unbind(2)
        return torch.cat((first, last.flip(1)), 1).flatten(1, 2)

    def pieces(self) -> Pieces:
        """For rows without masks."""
        return Pieces(self.gather_row, self.rank, 2 * self.size - 1 - self.rank)

    def mask(self, here: torch.Tensor, there: torch.Tensor, positions: torch.Tensor | None) -> Gathered:
        """For queries and keys at these places; `positions` int64 [B, T], of rows whose documents are masked
        from each other, start from 0 in each."""
        document = None if positions is None else (positions == 0).cumsum(dim=-1, dtype=torch.int32)
        return Gathered(self.gather, part_mask(self.backend, here, there, document))
