"""Asynchronous copies of small tensors from the device to the host."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of `tensor` on the host. The constructor starts the copy and does not wait for the device. Later
    writes to `tensor` do not change the copy."""

    def __init__(self, tensor: torch.Tensor):
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.current_stream().record_event()
        else:
            self._copy = tensor.detach().to("cpu", copy=True)

    def result(self) -> torch.Tensor:
        """The copy. Waits until the device has computed the tensor."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy
