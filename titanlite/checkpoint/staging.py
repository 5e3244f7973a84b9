"""Staging: copies of the state in host memory, made at a save, that training can no longer change.

Buffers are pinned where the state is on a GPU and reused from save to save, so at most one save may be in
flight. (torch's own DefaultStager fails at its second use with DTensors: KeyError <class 'type'>, seen with
torch 2.11 on CUDA.)
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

Tensors = dict[str, dict[str, torch.Tensor]]


class HostBuffers:
    """One host buffer for each tensor's local shard."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copy(self, tensors: Tensors) -> Tensors:
        """The tensors on the host, DTensors with the same placements; blocks until they are there."""
        copies = {
            part: {name: self._copy(part, name, t) for name, t in of.items()} for part, of in tensors.items()
        }
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy(self, part: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get((part, name))
        if buffer is None:
            buffer = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._buffers[part, name] = buffer
        buffer.copy_(local, non_blocking=local.is_cuda)
        if isinstance(tensor, DTensor):  # from_local would move the buffer back to the mesh's device
            return DTensor(buffer, tensor._spec, requires_grad=False)
        return buffer
