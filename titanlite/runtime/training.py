"""[training]: the size, number, precision and seed of the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from titanlite.config.component import ConfigError


@dataclass(frozen=True, kw_only=True)
class Training:
    """The step: its size, its number, its precision, its seed."""

    seq_len: int = 2048
    """Targets a row; a row is seq_len + 1 tokens."""
    local_batch_size: int = 8
    """Rows of one micro-batch of one rank: what has to fit into memory at once."""
    global_batch_size: int = -1
    """Rows of one optimizer step over all ranks; what exceeds local_batch_size x ranks is accumulated. -1:
    that product."""
    steps: int = 10000
    """Optimizer steps until the run is done."""
    max_norm: float = 1.0
    """Gradients are scaled down to this total norm; 0: never."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Only deterministic kernels: bit-identical reruns on the same layout, at some cost in speed."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"
    """dtype of parameters and activations in forward and backward (the optimizer's copy is fp32). auto:
    bfloat16 on CUDA, float32 elsewhere."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """dtype in which gradients are summed over ranks. bfloat16 halves the traffic; micro-batches still add up
    in fp32, for which each is reduced at once (as with parallelism.fsdp_reduce = "micro_batch")."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the host's memory, and let the CPU take the optimizer's
    step: for a model that the GPUs cannot hold. Slow."""
    gc_freq: int = 50
    """Collect Python's garbage every so many steps, on all ranks in the same one: a rank that does it in its
    own time holds up the others. 0: each in its own time."""

    def __post_init__(self) -> None:
        if self.gc_freq < 0:
            raise ConfigError(f"{self.gc_freq} is below 0", "gc_freq")
        for key in ("seq_len", "local_batch_size", "steps"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{getattr(self, key)} is below 1", key)
        if self.local_batch_size * self.seq_len >= 1 << 31:
            raise ConfigError(
                f"{self.local_batch_size} sequences of {self.seq_len} tokens are 2^31 tokens or more, too "
                "many for one micro-batch; set global_batch_size to accumulate a larger batch",
                "local_batch_size",
            )
        if self.global_batch_size < 1 and self.global_batch_size != -1:
            raise ConfigError(f"{self.global_batch_size} is neither -1 nor at least 1", "global_batch_size")
        if not self.max_norm >= 0:
            raise ConfigError(f"{self.max_norm} is not 0 or above", "max_norm")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"{self.seed} is not in [0, 2^63)", "seed")


@dataclass(frozen=True)
class StepPlan:
    """How one optimizer step is cut: `rows` = micro_batches x micro_batch_rows x data-parallel ranks."""

    rows: int
    micro_batch_rows: int
    micro_batches: int
    tokens: int

    @classmethod
    def of(cls, training: Training, dp_size: int) -> StepPlan:
        """Raises ConfigError if the global batch does not divide."""
        at_once = training.local_batch_size * dp_size
        rows = at_once if training.global_batch_size == -1 else training.global_batch_size
        if rows % at_once:
            nearest = sorted({max(rows // at_once, 1) * at_once, (rows // at_once + 1) * at_once})
            raise ConfigError(
                f"{rows} rows are no multiple of local_batch_size {training.local_batch_size} x {dp_size} "
                f"ranks = {at_once}; the nearest: {' or '.join(str(n) for n in nearest)}",
                "training.global_batch_size",
            )
        if rows * training.seq_len * training.steps >= 1 << 63:
            raise ConfigError(
                f"{training.steps} steps of {rows} x {training.seq_len} tokens are 2^63 tokens or more, "
                "which cannot be counted",
                "training.steps",
            )
        return cls(rows, training.local_batch_size, rows // at_once, rows * training.seq_len)


def choose_param_dtype(training: Training, device: torch.device) -> torch.dtype:
    if training.mixed_precision_param == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, training.mixed_precision_param)
