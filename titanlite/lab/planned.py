"""The inputs of a plan: a job, and its model on the meta device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.lab.activations import BlockShape
from titanlite.lab.cards import GIB, Cluster
from titanlite.lab.sharding import Parameter, parameters_of
from titanlite.models.base import Decoder
from titanlite.parallel.reshard import StepMemory
from titanlite.parallelism import Degrees
from titanlite.runtime.training import BatchLayout, choose_param_dtype

MAX_BLOCKS = 1000  # of a planned model: one with more takes minutes


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The inputs of a plan of memory and time. `net`: the whole model on the meta device. `parameters`:
    parameters_of(net, optimizer). `global_batch`: the largest number of sequences per step. `device_bytes`:
    memory of a GPU; 0: a CPU."""

    job: Job
    net: Decoder
    parameters: Sequence[Parameter]
    global_batch: int
    degrees: Degrees
    param_dtype: torch.dtype
    device_bytes: int

    @property
    def layout(self) -> str:
        """The layout in words."""
        return self.job.parallelism.describe(self.degrees, self.shape.num_experts)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP wraps the model; a single process shards nothing."""
        return self.degrees != Degrees(1, 1, 1, 1, 1)

    @property
    def num_micro_batches(self) -> int:
        return BatchLayout.from_training(self.job.training, self.degrees.data_parallel).num_micro_batches(
            self.global_batch
        )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank; tensor parallel shards them further between the layers."""
        return self.job.training.local_batch_size * self.job.training.seq_len // self.degrees.cp

    @property
    def shape(self) -> BlockShape:
        """The shape of the first block: all blocks have the same MLP or experts."""
        return self.shapes[0]

    @cached_property
    def shapes(self) -> list[BlockShape]:
        """The shapes of the blocks."""
        job, num_chosen = self.job, getattr(self.net.config, "n_experts_per_token", 1)
        return BlockShape.of_blocks(
            self.net,
            size=self.param_dtype.itemsize,
            compiled=job.compile.enable,
            is_float8=job.float8.enable and job.float8.recipe != "rowwise_with_gw_hp",
            tp=self.degrees.tp,
            cp=self.degrees.cp,
            ep=job.parallelism.expert_parallel_degree,
            gathers_tokens=job.parallelism.gathers_tokens(num_chosen),
        )

    @property
    def step_memory(self) -> StepMemory:
        """The settings by which the run decides whether FSDP frees gathered weights."""
        return self.job.step_memory(self.net, math.prod(self.degrees), self.param_dtype)


def planned_run(job: Job, cluster: Cluster) -> PlannedRun:
    """The inputs of a plan of a job. Raises ConfigError."""
    if job.model.config.n_layers > MAX_BLOCKS:
        raise ConfigError(f"a plan counts at most {MAX_BLOCKS:,} blocks", "model.overrides.n_layers")
    card, degrees = cluster.card, job.parallelism.degrees(cluster.gpus)
    batch = BatchLayout.from_training(job.training, degrees.data_parallel)
    net = job.build_on_meta()
    return PlannedRun(
        job=job,
        net=net,
        parameters=parameters_of(net, job.optimizer),
        global_batch=max(job.batch_sizes(batch.global_size).values()),
        degrees=degrees,
        param_dtype=choose_param_dtype(job.training, torch.device("cpu" if card.is_cpu else "cuda")),
        device_bytes=0 if card.is_cpu else int(card.memory_gib * GIB),
    )
