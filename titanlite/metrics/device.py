"""Peak memory of a CUDA device."""

from __future__ import annotations

import torch

GIB = 1 << 30


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak allocated and reserved GiB since the last call; {} without a CUDA device."""
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak_allocated_gib": allocated / GIB, "memory/peak_reserved_gib": reserved / GIB}
