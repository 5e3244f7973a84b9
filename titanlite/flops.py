"""The peak FLOP/s of devices, for the model FLOPs utilisation (MFU).

MFU is left out, never guessed, if the device's peak is not known.
"""

from __future__ import annotations

import re

# Dense bf16 tensor-core FLOP/s with fp32 accumulation, from the vendors' datasheets (sparsity figures
# halved). The first matching pattern counts, so longer names come first.
PEAK_BF16_FLOPS = [
    (r"\bGB200\b", 2.5e15),
    (r"\bB200\b", 2.25e15),
    (r"\bH200 NVL\b", 835.5e12),
    (r"\bH200\b", 989e12),
    (r"\bGH200\b", 989e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100\b", 989e12),
    (r"\bH800$", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bA800\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10\b", 125e12),
    (r"\bMI355X\b", 2.5e15),
    (r"\bMI325X\b", 1307e12),
    (r"\bMI300X\b", 1307e12),
    (r"\bMI250X\b", 191.5e12),  # one die: a process sees each of the two dies as a device
    (r"\bRTX 5090$", 209.5e12),
    (r"\bRTX 4090$", 165.2e12),
    (r"\bRTX 3090$", 71e12),
]


def peak_bf16_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one device; None if the device is not in the table."""
    if " MIG " in device_name:  # a slice of a device
        return None
    return next((flops for pattern, flops in PEAK_BF16_FLOPS if re.search(pattern, device_name)), None)
