"""Reads weights in MXFP4, in which gpt-oss's experts are published (OCP Microscaling Formats 1.0).

In place of a tensor NAME [E, I, O] the files have, for its transposed matrices, NAME_blocks uint8
[E, O, I / 32, 16] and NAME_scales uint8 [E, O, I / 32]. A byte has two values in E2M1, the first in its low
bits; a block of 32 values has the factor 2 to the power of its scale - 127. The products are exact in bf16
if they are finite."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from titanlite.config.component import ConfigError
from titanlite.interop.weights import Chunk, LazyTensor, Region

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_SIZE = 32
SCALE_OFFSET = 127
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 by its three low bits; the fourth is the sign


def dequantized(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors, in which bf16 tensors replace their blocks and scales. A read dequantises its
    region. Raises ConfigError for blocks without fitting scales."""
    result = dict(tensors)
    for name, blocks in tensors.items():
        base = name.removesuffix(BLOCKS)
        if base == name or blocks.dtype != torch.uint8:
            continue
        scales = tensors.get(f"{base}{SCALES}")
        if scales is None:
            raise ConfigError(f"{name} in {blocks.file} has no {base}{SCALES} beside it")
        fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK_SIZE // 2)
        if not fits or scales.dtype != torch.uint8:
            raise ConfigError(
                f"{name} in {blocks.file} has shape {blocks.shape}, and its scales are {scales.dtype} of "
                f"shape {scales.shape}; expected blocks [E, O, I / 32, 16] and uint8 scales [E, O, I / 32]"
            )
        num_experts, num_rows, num_blocks = scales.shape
        shape = (num_experts, num_blocks * BLOCK_SIZE, num_rows)
        chunks = [
            Chunk((e, 0, 0), (1, *shape[1:]), functools.partial(_load, blocks, scales, e))
            for e in range(num_experts)
        ]
        del result[name], result[f"{base}{SCALES}"]
        result[base] = LazyTensor(shape, torch.bfloat16, blocks.file, chunks)
    return result


def _load(blocks: LazyTensor, scales: LazyTensor, expert: int, region: Region) -> torch.Tensor:
    """Read a region [1, I, O] of the tensor of one expert."""
    _, inputs, rows = region
    near = slice(inputs.start // BLOCK_SIZE, -(-inputs.stop // BLOCK_SIZE))
    stored = (slice(expert, expert + 1), rows, near)
    values = values_of(blocks.read((*stored, slice(0, BLOCK_SIZE // 2))), scales.read(stored))
    begin = near.start * BLOCK_SIZE
    return values[..., inputs.start - begin : inputs.stop - begin].transpose(1, 2).contiguous()


def values_of(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values, bf16 [..., 32 G], of blocks uint8 [..., G, 16] with scales uint8 [..., G]."""
    e2m1 = torch.tensor([*POSITIVE, *(-x for x in POSITIVE)])
    low_first = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    factors = torch.exp2(scales.to(torch.float32) - SCALE_OFFSET)
    return (e2m1[low_first.int()] * factors[..., None]).to(torch.bfloat16).flatten(-2)
