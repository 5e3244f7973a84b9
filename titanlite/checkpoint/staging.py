"""Copies of the state in host memory, from which a checkpoint is written while training changes the state.

The buffers are allocated once and reused, so at most one save may be in flight. On CUDA they are pinned, and
the copy runs on its own stream during the next step's forward and backward. Only the optimizer's next update
waits for the copy, on the device. (torch's DefaultStager fails at its second use with DTensors: KeyError
<class 'type'>, seen with torch 2.11 on CUDA.)"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.state import Tensors, flattened
from titanlite.mesh import local_shard
from titanlite.torch_compat import dtensor_like

SEGMENT_BYTES = 256 << 20  # pinned in one call; a call blocks the driver, so memory is pinned in segments
ADVICE = "set --checkpoint.async_mode=disabled to save without a copy"


class HostBuffers:
    """A host buffer for the local shard of each tensor."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def allocate(self, tensors: Tensors) -> int:
        """Allocate the missing buffers, and return the bytes of all buffers. The first call takes seconds for
        tens of GB. Raises CheckpointError if the host cannot pin that much memory."""
        segment: dict[str, torch.Tensor] = {}
        for name, local in _local(tensors).items():
            if name in self._buffers:
                continue
            if segment and sum(t.nbytes for t in segment.values()) + local.nbytes > SEGMENT_BYTES:
                self._allocate(segment)
                segment = {}
            segment[name] = local
        if segment:
            self._allocate(segment)
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, tensors: Tensors) -> Tensors:
        """Start to copy `tensors`, and return the copies on the host. The copy of a DTensor has the same
        placements. The copies are complete after wait(). `tensors` may change after wait_on_device()."""
        self.allocate(tensors)
        local_tensors = _local(tensors)
        cuda = any(local.is_cuda for local in local_tensors.values())
        if cuda:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream if cuda else None):
            for name, local in local_tensors.items():
                self._buffers[name].copy_(local, non_blocking=cuda)
        self._copied = self._stream.record_event() if cuda and self._stream else None
        return {
            section: {name: self._on_host(f"{section}.{name}", t) for name, t in by_name.items()}
            for section, by_name in tensors.items()
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
        return dtensor_like(buffer, tensor) if isinstance(tensor, DTensor) else buffer

    def _allocate(self, segment: dict[str, torch.Tensor]) -> None:
        """Allocate the buffers of `segment` in one memory mapping. A mapping is page-aligned, as pinning
        needs, and is not rounded up to a power of two, as torch's allocator of pinned memory does."""
        offsets, size = [], 0
        for local in segment.values():
            offsets.append(size)
            size += -(-local.nbytes // 64) * 64
        try:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as e:
            raise CheckpointError(f"no host memory for an asynchronous save: {e}; {ADVICE}") from e
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # on Linux; loader workers need no copy
            if hasattr(mmap, advice):
                with suppress(OSError):  # a kernel without huge pages
                    memory.madvise(getattr(mmap, advice))
        if size and next(iter(segment.values())).is_cuda:
            pin(torch.frombuffer(memory, dtype=torch.uint8))
        for (name, local), offset in zip(segment.items(), offsets):
            buffer = torch.empty(0, dtype=local.dtype)
            if count := local.numel():  # frombuffer refuses an empty tensor
                buffer = torch.frombuffer(memory, dtype=local.dtype, count=count, offset=offset)
            self._buffers[name] = buffer.view(local.shape)


_pinned: list[torch.Tensor] = []  # never freed: the driver would refuse a later mapping at the same address


def pin(memory: torch.Tensor) -> None:
    """Page-lock host memory for the life of the process, so that the device writes to it directly."""
    _pinned.append(memory)
    memory.zero_()  # pinning is faster if the pages exist
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) != 0:
        raise CheckpointError(f"{memory.nbytes >> 20} MiB of host memory cannot be pinned ({code}); {ADVICE}")


def same_device() -> Callable[[], None]:
    """A function that makes a new thread use this rank's device; without it the thread uses device 0."""
    if not torch.cuda.is_available():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


def _local(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: local_shard(tensor) for name, tensor in flattened(tensors).items()}
