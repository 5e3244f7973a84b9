"""Kernels of `same_bits` for CUDA, written in Triton. Import it only on CUDA: torch's builds for CPUs come
without Triton.

The order of the additions inside a row follows from the compilation of the kernel, and Triton compiles a
kernel again for arguments that are 1 or multiples of 16. Therefore the kernel that adds inside rows reads
sizes and the addresses of shards from memory: all layouts run one compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

BLOCK = 1024


def add_in_order(total: torch.Tensor, received: torch.Tensor, is_first: bool) -> None:
    """Add the rows of `received`, [rows, n], one after the other to `total`, fp32 [n]. `is_first`: `total`
    has no value yet. Reads each value once."""
    n = total.numel()
    _add_in_order[(triton.cdiv(n, BLOCK),)](total, received, n, len(received), is_first, BLOCK)


@triton.jit
def _add_in_order(  # type: ignore[no-untyped-def]
    total_ptr, received_ptr, n, NUM_ROWS: tl.constexpr, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if IS_FIRST:
        total = tl.load(received_ptr + at, inside).to(tl.float32)
    else:
        total = tl.load(total_ptr + at, inside) + tl.load(received_ptr + at, inside).to(tl.float32)
    for _ in tl.static_range(1, NUM_ROWS):
        received_ptr += n
        total += tl.load(received_ptr + at, inside).to(tl.float32)
    tl.store(total_ptr + at, total, inside)


def write_squares(
    shards: Sequence[torch.Tensor], places: Sequence[tuple[int, ...]], out: torch.Tensor
) -> None:
    """`same_bits.write_squares` for fp32 on CUDA: one kernel for all shards, without a host
    synchronisation."""
    assert all(shard.dtype == torch.float32 and shard.is_contiguous() for shard in shards)
    table, chunks = _tables(tuple(places), out.device)
    pointers = torch.tensor([shard.data_ptr() for shard in shards]).pin_memory()
    pointers = pointers.to(out.device, non_blocking=True)
    _write_squares[(len(chunks),)](pointers, table, chunks, out, BLOCK)


@lru_cache(maxsize=8)
def _tables(places: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`places` as int64 [shards, 5]; and for each program of the kernel the shard, its first row and the row
    after its last one, int64 [programs, 3]. A program takes about 4096 values, and at most 64 rows."""
    chunks = []
    for i, (num_rows, width, *_) in enumerate(places):
        size = min(max(4 * BLOCK // width, 1), 64)
        first = np.arange(0, num_rows, size)
        chunks.append(np.stack([np.full_like(first, i), first, np.minimum(first + size, num_rows)], 1))
    table, programs = torch.tensor(places), torch.from_numpy(np.concatenate(chunks))
    return table.to(device), programs.to(device)


@triton.jit
def _write_squares(  # type: ignore[no-untyped-def]
    pointers_ptr, table_ptr, chunks_ptr, out_ptr, BLOCK: tl.constexpr
):
    chunks_ptr += 3 * tl.program_id(0)
    shard = tl.load(chunks_ptr)
    table_ptr += 5 * shard
    width, begin = tl.load(table_ptr + 1), tl.load(table_ptr + 2)
    inner, stride = tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    shard_ptr = tl.load(pointers_ptr + shard).to(tl.pointer_type(tl.float32))
    for row in range(tl.load(chunks_ptr + 1), tl.load(chunks_ptr + 2)):
        total = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, width, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(shard_ptr + row * width + at, at < width, 0.0).to(tl.float64)
            total += value * value
        tl.store(out_ptr + begin + row // inner * stride + row % inner, tl.sum(total))
