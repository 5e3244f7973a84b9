"""Initial weights as a pure function of seed, parameter name and element index: equal on every layout and
device.

Each element is a hash of its index in the full parameter, so a rank computes only its own shard, on its own
device and without communication. Values from torch's generators would depend on the shard, the device or a
kernel's grid.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from titanlite.mesh import local_shard_and_offsets

CHUNK = 1 << 22  # elements per chunk, to limit the memory of int64 temporaries


def fill_normal(
    parameter: torch.Tensor,
    name: str,
    mean: float,
    std: float,
    seed: int,
    device: torch.device | None = None,
    function: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Fill a parameter, or this rank's shard of a DTensor, with values of normal(mean, std), or with
    `function` of them. `device` computes the values; default: the parameter's device."""

    def values(index: torch.Tensor, key: int) -> torch.Tensor:
        normal = _normal(index, key) * std + mean
        return normal if function is None else function(normal)

    _fill(parameter, name, seed, device, values if std or function is not None else mean)


def fill_uniform(
    parameter: torch.Tensor, name: str, bound: float, seed: int, device: torch.device | None = None
) -> None:
    """Fill a parameter as fill_normal does, with values of uniform(-bound, bound)."""
    _fill(parameter, name, seed, device, (lambda index, key: _uniform(index, key) * bound) if bound else 0.0)


@torch.no_grad()
def _fill(
    parameter: torch.Tensor,
    name: str,
    seed: int,
    device: torch.device | None,
    values: Callable[[torch.Tensor, int], torch.Tensor] | float,
) -> None:
    """Fill a parameter with values(index, key) or with a constant."""
    local, offsets = local_shard_and_offsets(parameter)
    if not callable(values):
        local.fill_(values)
        return
    if local.numel() == 0:
        return
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)
    device = device or local.device
    if device.type == "mps":
        device = torch.device("cpu")  # MPS has no float64
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(1, parameter.ndim)):
        along = (torch.arange(local.shape[dim], device=device) + offsets[dim]) * stride
        index = index + along.reshape(-1, *[1] * (parameter.ndim - 1 - dim))
        stride *= parameter.shape[dim]
    rows_per_chunk = max(CHUNK // max(local[0].numel(), 1), 1)
    for begin in range(0, len(local), rows_per_chunk):
        chunk = local[begin : begin + rows_per_chunk]
        rows = torch.arange(begin, begin + len(chunk), device=device) + offsets[0]
        chunk.copy_(values((rows * stride).reshape(-1, *[1] * (local.ndim - 1)) + index, key))


def _normal(index: torch.Tensor, key: int) -> torch.Tensor:
    """Standard normal values, fp32, for int64 indices: the Box-Muller transform of the two halves of a keyed
    64-bit hash.

    Computed in fp64 and rounded, because the last bit of an fp32 logarithm depends on the processor's
    instruction set. The last bit of fp64 changes the fp32 value of about one element in 1e8.
    """
    bits = _hash64(index ^ key)
    high, low = (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    radius = torch.sqrt(-2.0 * torch.log((high.double() + 0.5) * 2.0**-32))
    return (radius * torch.cos((2.0 * math.pi * 2.0**-32) * low.double())).float()


def _uniform(index: torch.Tensor, key: int) -> torch.Tensor:
    """Values between -1 and 1, fp32, for int64 indices: the upper half of a keyed 64-bit hash."""
    high = (_hash64(index ^ key) >> 32) & 0xFFFFFFFF
    return ((high.double() + 0.5) * 2.0**-31 - 1.0).float()


def _hash64(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser in wrapping int64 arithmetic (Steele et al. 2014)."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right; torch's shifts int64 arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
