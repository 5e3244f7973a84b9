"""Staging: copies of the state in host memory, made at a save, that training can no longer change.

The buffers are allocated once and reused, so at most one save may be in flight. On CUDA they are pinned and
the copy runs on a stream of its own, beside the next step's forward and backward: only the optimizer's next
update has to wait for it, and waits on the device. (torch's own DefaultStager fails at its second use with
DTensors: KeyError <class 'type'>, seen with torch 2.11 on CUDA.)
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.state import Tensors
from titanlite.torch_compat import dtensor_like

SEGMENT_BYTES = 256 << 20  # pinned at once; pinning holds up the driver, so not all of it in one call


class HostBuffers:
    """One host buffer for each tensor's local shard."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def allocate(self, tensors: Tensors) -> int:
        """Have a buffer for each tensor; returns their bytes. Takes seconds for tens of GB, once. Raises
        CheckpointError if the host has not that much memory to pin."""
        wanted = {name: local for name, local in _local(tensors) if name not in self._buffers}
        segment: list[tuple[str, torch.Tensor]] = []
        for name, local in wanted.items():
            if segment and sum(t.nbytes for _, t in segment) + local.nbytes > SEGMENT_BYTES:
                self._allocate(segment)
                segment = []
            segment.append((name, local))
        if segment:
            self._allocate(segment)
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, tensors: Tensors) -> Tensors:
        """Begin to copy; the tensors on the host, DTensors with the same placements, are complete after
        wait(). Until wait_on_device() the originals must not change."""
        self.allocate(tensors)
        cuda = any(local.is_cuda for _, local in _local(tensors))
        if cuda:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream if cuda else None):
            for name, local in _local(tensors):
                self._buffers[name].copy_(local, non_blocking=cuda)
        self._copied = self._stream.record_event() if cuda and self._stream else None
        return {
            part: {name: self._on_host(f"{part}.{name}", t) for name, t in of.items()}
            for part, of in tensors.items()
        }

    def wait(self) -> None:
        """Until the copies are complete; for the thread that writes them."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait_on_device(self) -> None:
        """What the device does next on the current stream waits for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _on_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers[name]
        if isinstance(tensor, DTensor):
            return dtensor_like(buffer, tensor)
        return buffer

    def _allocate(self, segment: list[tuple[str, torch.Tensor]]) -> None:
        """One mapping of its own for all tensors of `segment`: page-aligned, which pinning wants, and not
        rounded up to a power of two, which torch's pinned allocator would do."""
        offsets, size = [], 0
        for _, local in segment:
            offsets.append(size)
            size += -(-local.nbytes // 64) * 64
        try:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as e:
            raise CheckpointError(f"no host memory for an asynchronous save: {e}; {INSTEAD}") from e
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Linux; loader workers need no part of it
            if hasattr(mmap, advice):
                with suppress(OSError):  # a kernel without huge pages
                    memory.madvise(getattr(mmap, advice))
        if size and segment[0][1].is_cuda:
            pin(torch.frombuffer(memory, dtype=torch.uint8))
        for (name, local), offset in zip(segment, offsets):
            count = local.numel()
            flat = torch.frombuffer(memory, dtype=local.dtype, count=count, offset=offset) if count else None
            self._buffers[name] = (
                torch.empty(local.shape, dtype=local.dtype) if flat is None else flat.view(local.shape)
            )


INSTEAD = "set --checkpoint.async_mode=disabled to save without a copy"


_pinned: list[torch.Tensor] = []  # never unmapped: the driver would refuse the next mapping at that address


def pin(memory: torch.Tensor) -> None:
    """Page-lock host memory for the life of the process, so that the device writes to it directly."""
    _pinned.append(memory)
    memory.zero_()  # the pages exist before they are pinned, which is faster
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) != 0:
        raise CheckpointError(
            f"{memory.nbytes >> 20} MiB of host memory cannot be pinned ({code}); {INSTEAD}"
        )


def same_device() -> Callable[[], None]:
    """For a thread to begin with: threads start on device 0, whatever this rank's is."""
    if not torch.cuda.is_available():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


def _local(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{part}.{name}", t.to_local() if isinstance(t, DTensor) else t)
        for part, of in tensors.items()
        for name, t in of.items()
    ]
