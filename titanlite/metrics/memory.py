"""Peak memory of a CUDA device, and the message of a run that ran out of it: the phase, the peak, and the
settings that need less memory."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from titanlite.errors import explain_host_memory, is_out_of_host_memory

GIB = 1 << 30
PHASES = {  # a function in a traceback, and the phase that it belongs to
    "forward_backward": "forward",
    "backward": "backward",
    "forward_one_chunk": "forward",  # of a pipeline stage
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
    "grad_norms": "the gradient norm",
    "step": "the optimizer's step",
    "validate": "validation",
    "score_tasks": "the tasks of a validation",
    "generate": "sampling",
    "save": "saving",
}
REMEDIES = """
  training.local_batch_size lower, with the same training.global_batch_size: fewer activations
  activation_checkpoint.mode = "selective" or "full": fewer activations, more computation
  loss.name = "chunked_cross_entropy", loss.chunk_tokens lower: fewer logits
  parallelism.fsdp_reduce = "micro_batch": smaller gradients while micro-batches accumulate
  parallelism.fsdp_reshard_after_forward = "always": no gathered weights between forward and backward
  optimizer.state_dtype = "int8": AdamW's state in 2.1 instead of 8 bytes per parameter
  more GPUs with parallelism.data_parallel_shard_degree = -1: smaller shards of weights and optimizer state
  training.enable_cpu_offload = true: weights, gradients and optimizer state on the CPU, which is slow"""


# Errors of CUDA, cuBLAS, cuDNN, NCCL and Triton, which allocate beside torch, and torch's from the compiler.
NO_MEMORY = re.compile(
    r"CUDA[^\n]*out of memory|'out of memory'|_STATUS_ALLOC_FAILED|DEVICE_ALLOCATION_FAILED"
)


class OutOfMemory(RuntimeError):
    """The memory of the device or of the machine is used up. The message names the phase and remedies."""

    exit_code = 5


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the device or of the machine is used up. One with an exit
    code of its own does not, whatever it quotes: for example, a save that failed for want of pinned memory
    of the host."""
    if hasattr(error, "exit_code"):
        return False
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_host_memory(error):
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


@contextmanager
def building(num_parameters: int, shards: int, keeps_average: bool = False) -> Iterator[None]:
    """Turns an out-of-memory error while the model and its optimizer are made into OutOfMemory.
    `keeps_average`: whether an average of the weights is made, too."""
    try:
        yield
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        size = 4 * num_parameters / shards / GIB
        others = "gradients and the average of the weights (ema.enable)" if keeps_average else "gradients"
        where = f"before the first step: weights take {size:.1f} GiB per rank, {others} as much"
        raise OutOfMemory(explain(where, e)) from e


def explain(where: str, error: BaseException) -> str:
    """The message for a run that ran out of memory, with the peak since the last report and what `error`
    says; one line if the machine's memory is used up."""
    if is_out_of_host_memory(error):
        return explain_host_memory(f" {where}", error)
    peak = ""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        peak = f" (peak memory {torch.cuda.max_memory_allocated() / GIB:.1f} of {total / GIB:.1f} GiB)"
    return f"out of memory {where}{peak}. Settings that need less memory:{REMEDIES}\n{error}"


def phase(trace: TracebackType | None) -> str:
    """The phase of the step, by the innermost function of a traceback that is in PHASES."""
    names = [frame.name for frame in traceback.extract_tb(trace)]
    return next((PHASES[name] for name in reversed(names) if name in PHASES), "outside a step")


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak allocated and reserved GiB since the last call; {} without a CUDA device."""
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak_allocated_gib": allocated / GIB, "memory/peak_reserved_gib": reserved / GIB}
