"""The settings by which a model is sharded and run, for `parallelize` and the ShardedModel that it makes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from titanlite.attention.auto import Auto
from titanlite.attention.base import AttentionBackend
from titanlite.models.load_balance import LoadBalance
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint
from titanlite.parallel.compile import Compile
from titanlite.parallel.float8 import Float8
from titanlite.parallelism import Parallelism
from titanlite.step_clock import StepClock


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The sections and dtypes that decide how a model is sharded and run. `attention`: the backend that
    `AttentionBackend.build` returned. `cpu_offload`: weights stay in host memory. `same_bits`:
    training.same_bits_on_any_ranks. `graphs_are_optional`: CUDA graphs are left out if they would take too
    much memory. `clock`: measures the phases of the steps."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    attention: AttentionBackend = field(default_factory=Auto)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    moe: LoadBalance = field(default_factory=LoadBalance)
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    cpu_offload: bool = False
    same_bits: bool = False
    graphs_are_optional: bool = False
    clock: StepClock = field(default_factory=lambda: StepClock(torch.device("cpu")))

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether gradients are reduced after each micro-batch, not once per step. With a reduce_dtype other
        than fp32, FSDP would accumulate micro-batches in that dtype."""
        is_set = self.parallelism.fsdp_reduce == "micro_batch" or self.same_bits
        return is_set or self.reduce_dtype != torch.float32
