"""Cross-entropy and its gradient in one kernel for CUDA, written in Triton. Import it only on CUDA: torch's
builds for CPUs come without Triton.

On one H100 the kernel takes 0.88 ms for the logits of 4096 tokens over 128,256 ids, the two kernels that
torch.compile makes of `losses.loss_and_gradient_` take 1.37 ms (benchmarks/results/cross_entropy_h100.json).
Each program has the logits of one token, which it reads twice and writes once. The L2 cache holds the logits
of only some of the running programs: the first read asks it to keep them (evict_last), the second read and
the store to drop them first (evict_first), because this kernel does not read them again. The kernel is
compiled once for all numbers of tokens. It is compiled for whether V, the distance of rows and the addresses
are multiples of 16, and for whether rows begin at cache sectors.

Shape suffixes: C tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # below all logits, and finite: infinity minus infinity is NaN
# The fastest of 11 choices for 128,256 and 151,936 ids on one H200, before the cache was told what to keep.
LANES, ROUNDS, WRITE_BLOCK = tl.constexpr(4096), tl.constexpr(4), tl.constexpr(8192)
WARPS = 16
L2_SECTOR_BYTES = 32


def fused_loss_and_gradient_(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, z_loss_multiplier: float = 0.0, softcap: float = 0.0
) -> torch.Tensor:
    """`losses.loss_and_gradient_` for the whole vocabulary, on CUDA: the sum of -log p(target), fp32 scalar;
    with a z-loss, fp32 [2]. Overwrites the logits, whose rows must be contiguous, with their gradient. Tokens
    whose target is below 0 do not count; their logits become arbitrary finite numbers. An id of V or above
    makes the loss NaN."""
    C, V = logits_CV.shape
    losses_C2 = torch.empty(C, 2, device=logits_CV.device)
    stride = logits_CV.stride(0)
    rows_aligned = stride * logits_CV.element_size() % L2_SECTOR_BYTES == 0
    _loss_and_gradient[(C,)](
        logits_CV, targets_C, losses_C2, V, stride, z_loss_multiplier, float(softcap), rows_aligned,
        softcap > 0, num_warps=WARPS,
    )  # fmt: skip
    return losses_C2.sum(0) if z_loss_multiplier else losses_C2[:, 0].sum()


@triton.jit
def _tanh(x, to_exponent):  # type: ignore[no-untyped-def]
    # tanh(x / softcap), if to_exponent is -2 log2(e) / softcap: the only division per logit.
    return 2.0 / (1.0 + tl.exp2(x * to_exponent)) - 1.0


@triton.jit
def _loss_and_gradient(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, losses_ptr, V, stride, z_loss_multiplier, softcap, ROWS_ALIGNED: tl.constexpr,
    CAPS: tl.constexpr,
):  # fmt: skip
    # With rows that do not begin at cache sectors, the kernel was slower with these policies; why was not
    # measured.
    KEEP: tl.constexpr = "evict_last" if ROWS_ALIGNED else ""
    DROP: tl.constexpr = "evict_first" if ROWS_ALIGNED else ""
    token = tl.program_id(0)
    logits_ptr += token.to(tl.int64) * stride
    target = tl.load(targets_ptr + token)
    counts = target >= 0
    # Read here, before the barriers of the reductions, so that no thread overwrites it before all have it. An
    # id that the vocabulary lacks makes the loss NaN.
    target_logit = tl.load(logits_ptr + tl.maximum(target, 0), mask=target < V, other=float("nan")).to(
        tl.float32
    )
    if CAPS:
        to_exponent = -2.0 * LOG2_E / softcap
        target_logit = softcap * _tanh(target_logit, to_exponent)

    # Online softmax (Milakov & Gimelshein 2018), to base 2: each lane has its own maximum and sum, which it
    # rescales once for ROUNDS logits.
    ids = tl.arange(0, ROUNDS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, V, ROUNDS * LANES):
        x = tl.load(
            logits_ptr + first + ids,
            mask=first + ids < V,
            other=float("-inf"),
            eviction_policy=KEEP,
        )
        x = x.to(tl.float32)
        if CAPS:  # the logits behind the last id are -infinity, which a cap would make finite
            x = tl.where(first + ids < V, softcap * _tanh(x, to_exponent), float("-inf"))
        x = x * LOG2_E
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(x - new_top[None, :]), 0)
        top = new_top
    row_top = tl.max(top, 0)
    log2_z = row_top + tl.log2(tl.sum(total * tl.exp2(top - row_top), 0))

    log_z = log2_z * LN_2
    tl.store(losses_ptr + 2 * token, tl.where(counts, log_z - target_logit, 0.0))
    tl.store(losses_ptr + 2 * token + 1, tl.where(counts, z_loss_multiplier * log_z * log_z, 0.0))
    factor = 1.0 + 2.0 * z_loss_multiplier * log_z

    # From the end, because what was read last is most likely to be in the cache.
    offsets = tl.arange(0, WRITE_BLOCK)
    num_blocks = tl.cdiv(V, WRITE_BLOCK)
    for block in range(0, num_blocks):
        columns = (num_blocks - 1 - block) * WRITE_BLOCK + offsets
        logits = tl.load(logits_ptr + columns, mask=columns < V, other=0.0, eviction_policy=DROP)
        logits = logits.to(tl.float32)
        if CAPS:
            tanh = _tanh(logits, to_exponent)
            logits = softcap * tanh
        gradient = tl.exp2(logits * LOG2_E - log2_z) * factor
        gradient = tl.where(counts & (columns == target), gradient - 1.0, gradient)
        if CAPS:
            gradient = gradient * (1.0 - tanh * tanh)
        gradient = gradient.to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + columns, gradient, mask=columns < V, eviction_policy=DROP)
