"""Context parallel: the tokens of each sequence are sharded over ranks, and attention gathers all keys and
values (Llama 3, Grattafiori et al. 2024, section 3.3.2).

With R ranks every sequence is split into 2R chunks. Rank r has chunks r and 2R - 1 - r ("head-tail"), so that
under a causal mask all ranks compute equally many scores. With a sliding window that reaches back into the
chunk before only, the owners of neighbouring chunks exchange the ends of their chunks instead.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.torch_compat import all_gather_with_gradient, all_to_all_with_gradient


class SequenceSharding:
    """The assignment of a sequence's tokens to the ranks along `mesh`."""

    def __init__(self, mesh: DeviceMesh):
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self._group = mesh.get_group()
        self.own_chunks = self.rank, 2 * self.size - 1 - self.rank
        """The numbers of this rank's chunks in each sequence."""

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

    def chunks(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's two chunks [2 B, C, ...] of [B, 2 C, ...]: first those of all sequences that are nearer
        to the start."""
        return torch.cat(x.chunk(2, 1))

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """The reverse of `chunks`."""
        return torch.cat(x.chunk(2), 1)

    def chunks_with_previous(self, x: torch.Tensor, num: int) -> torch.Tensor:
        """`chunks`, each with the last `num` tokens of the chunk before it in the sequence in front of it: [2
        B, num + C, ...], zeros before the first chunk. Gradients go back to the owners of these tokens.
        Collective."""
        chunks = self.chunks(x)
        head_end, tail_end = chunks[:, chunks.shape[1] - num :].chunk(2)
        # The chunk after head r is head r + 1, and the chunk after tail 2R - 1 - r is the tail of rank r - 1.
        has_before, has_after = self.rank > 0, self.rank < self.size - 1
        sent = [tail_end] * has_before + [head_end] * has_after
        counts = [len(tail_end) * (abs(rank - self.rank) == 1) for rank in range(self.size)]
        received = all_to_all_with_gradient(torch.cat(sent), counts, counts, self._group)
        ends = list(received.chunk(len(sent)))
        before_head = ends.pop(0) if has_before else torch.zeros_like(head_end)
        before_tail = ends.pop(0) if has_after else head_end  # the last rank's head is before its tail
        return torch.cat((torch.cat((before_head, before_tail)), chunks), 1)
