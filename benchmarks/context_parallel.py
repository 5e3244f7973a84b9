"""Causal attention of one sequence sharded over GPUs, forward and backward: titanlite's two kernels for
context parallelism (gathered keys and values, with cuDNN in head-tail chunks or FlexAttention), torch's
context_parallel (ring attention, with both of its rotate methods), and one GPU with the full sequence.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --output benchmarks/results/NAME.json

Shapes are those of Llama 3 8B: 32 query heads and 8 key heads of size 128, bf16, one sequence. Milliseconds
are medians over --rounds on the slowest rank. TFLOP/s per GPU counts the matrix products of causal attention
once for the forward and 2.5 times for the backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from titanlite.attention.context_parallel import SequenceSharding  # noqa: E402
from titanlite.attention.flex import Flex  # noqa: E402
from titanlite.attention.head_tail import HeadTail  # noqa: E402
from titanlite.attention.sdpa import CAUSAL  # noqa: E402

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128


def main() -> None:
    """Measure all cases and write the results on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    ways = {
        "head_tail": titanlite(masked=False),
        "flex": titanlite(masked=True),
        "ring": ring("alltoall"),
        "ring_allgather": ring("allgather"),
    }
    results: list[dict[str, Any]] = []
    for length in options.lengths:
        for name, prepare in {"one_gpu": one_gpu, **ways}.items():
            result: dict[str, Any] = {
                "way": name,
                "length": length,
                "gpus": 1 if name == "one_gpu" else ranks,
            }
            try:
                step = prepare(mesh, length)
                d_q = step()[0]
                d_q = d_q if d_q.shape[2:] == (HEADS, HEAD_DIM) else d_q.transpose(1, 2)
                if name == "one_gpu":
                    whole = d_q
                else:  # check that all cases compute the same gradient
                    local = whole[:, SequenceSharding(mesh["cp"]).local_positions(length, d_q.device)]
                    result["difference"] = round(((d_q - local).norm() / local.norm()).item(), 5)
                result |= measure(step, options.rounds)
                flops = 3.5 * 2 * HEADS * HEAD_DIM * length**2 / result["gpus"]
                result["tflops"] = round(flops / result["ms"] / 1e9, 1)
            except Exception as e:  # torch's context_parallel may not work with this version of torch
                result["error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
            results.append(result)
            if rank == 0:
                print(result, flush=True)
            torch.cuda.empty_cache()
    if rank == 0:
        write_result(options.output, {"rows": results})
    dist.destroy_process_group()


def measure(step: Callable[[], tuple[torch.Tensor, ...]], rounds: int) -> dict[str, Any]:
    """Return the milliseconds per step on the slowest rank, and the peak memory in GiB."""
    torch.cuda.reset_peak_memory_stats()
    times = []
    for i in range(rounds + 3):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        ms = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        if i >= 3:
            times.append(ms.item())
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": round(statistics.median(times), 3), "peak_gib": round(peak, 2)}


def full_sequence(length: int) -> list[torch.Tensor]:
    """Return queries, keys, values and the output's gradient of the full sequence, [1, T, heads, E], equal on
    all ranks."""
    torch.manual_seed(0)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(1, length, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in heads]


def one_gpu(mesh: Any, length: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Prepare torch's attention with cuDNN on one GPU."""
    *inputs, gradient = full_sequence(length)
    q, k, v = (x.requires_grad_() for x in inputs)

    def step() -> tuple[torch.Tensor, ...]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.autograd.grad(CAUSAL.attend(q, k, v), (q, k, v), gradient)

    return step


def titanlite(masked: bool) -> Callable[[Any, int], Callable[[], tuple[torch.Tensor, ...]]]:
    """Prepare attention as in a training step: in head-tail chunks or, if `masked`, with FlexAttention's mask
    for documents, here one document. The mask is made once per step and is not part of the measured time."""

    def prepare(mesh: Any, length: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        sharding, backend = SequenceSharding(mesh), Flex() if masked else HeadTail()
        tokens = torch.empty(1, length, dtype=torch.int64, device="cuda")
        attention = backend.for_context_parallel(sharding, tokens, None, num_documents=1)
        local = sharding.local_positions(length, tokens.device)
        *inputs, gradient = (x[:, local].clone() for x in full_sequence(length))
        q, k, v = (x.requires_grad_() for x in inputs)
        attend = torch.compile(lambda attention, q, k, v: attention.attend(q, k, v), fullgraph=True)
        return lambda: torch.autograd.grad(attend(attention, q, k, v), (q, k, v), gradient)

    return prepare


def ring(method: str) -> Callable[[Any, int], Callable[[], tuple[torch.Tensor, ...]]]:
    """Prepare torch's context_parallel with this rotate method and cuDNN, as torchtitan uses it."""

    def prepare(mesh: Any, length: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(method)
        buffers = [x.transpose(1, 2).contiguous() for x in full_sequence(length)]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
        ):
            q, k, v, gradient = (x.clone() for x in buffers)
        q, k, v = (x.requires_grad_() for x in (q, k, v))

        def step() -> tuple[torch.Tensor, ...]:
            nothing = torch.empty(2 * mesh.size(), device="cuda")
            with (
                context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[0], no_restore_buffers={nothing}),
                sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            ):
                groups = HEADS // KEY_HEADS  # torch's ring attention does not support grouped queries
                keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
                out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
                return torch.autograd.grad(out, (q, k, v), gradient)

        return step

    return prepare


if __name__ == "__main__":
    main()
