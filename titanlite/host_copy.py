"""A small tensor on its way from the device to the host, read later, so that neither waits for the other."""

from __future__ import annotations

import torch


class HostCopy:
    """Starts the copy of `tensor` when it is made. Later writes to `tensor` do not change what is read."""

    def __init__(self, tensor: torch.Tensor):
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.current_stream().record_event()
        else:
            self._copy = tensor.detach().to("cpu", copy=True)

    def result(self) -> torch.Tensor:
        """The values, on the host. Waits until the device has computed them."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy
