"""Staging: copies of the state in host memory, from which a checkpoint is written while training changes the
originals.

The buffers are allocated once and reused, so at most one save may be in flight. On CUDA they are pinned, and
the copy runs on a stream of its own during the next step's forward and backward. Only the optimizer's next
update waits for it, on the device. (torch's DefaultStager fails at its second use with DTensors: KeyError
<class 'type'>, seen with torch 2.11 on CUDA.)"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.state import Tensors
from titanlite.torch_compat import dtensor_like

SEGMENT_BYTES = 256 << 20  # pinned in one call; pinning blocks the driver, so not all memory at once


class HostBuffers:
    """A host buffer for the local shard of each tensor."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def allocate(self, tensors: Tensors) -> int:
        """Allocate the missing buffers, and return the bytes of all of them. Takes seconds for tens of GB,
        once. Raises CheckpointError if the host cannot pin that much memory."""
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
        """Start to copy `tensors` and return the copies on the host; a DTensor's copy has the same
        placements. The copies are complete after wait(). The originals may change after wait_on_device()."""
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
        """Block the calling thread until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait_on_device(self) -> None:
        """Make later work on the current CUDA stream wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _on_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers[name]
        if isinstance(tensor, DTensor):
            return dtensor_like(buffer, tensor)
        return buffer

    def _allocate(self, segment: list[tuple[str, torch.Tensor]]) -> None:
        """Allocate the buffers of `segment` in one memory mapping: it is page-aligned, as pinning needs, and
        not rounded up to a power of two, as by torch's allocator of pinned memory."""
        offsets, size = [], 0
        for _, local in segment:
            offsets.append(size)
            size += -(-local.nbytes // 64) * 64
        try:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as e:
            raise CheckpointError(f"no host memory for an asynchronous save: {e}; {INSTEAD}") from e
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Linux; loader workers do not need a copy
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


_pinned: list[
    torch.Tensor
] = []  # never unmapped: the driver would refuse a later mapping at the same address


def pin(memory: torch.Tensor) -> None:
    """Page-lock host memory for the life of the process, so that the device writes to it directly."""
    _pinned.append(memory)
    memory.zero_()  # pinning is faster if the pages exist
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) != 0:
        raise CheckpointError(
            f"{memory.nbytes >> 20} MiB of host memory cannot be pinned ({code}); {INSTEAD}"
        )


def same_device() -> Callable[[], None]:
    """A function that sets this rank's device in a new thread, which would otherwise use device 0."""
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
