"""The inputs of a plan: sections of a job, and its model on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from titanlite.job import Job
from titanlite.lab.activations import BlockShape
from titanlite.lab.sharding import Parameter, parameters_of
from titanlite.losses import Loss
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer
from titanlite.optim.ema import EMA
from titanlite.parallel.reshard import StepMemory
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Degrees
from titanlite.runtime.training import BatchLayout, Training

MAX_BLOCKS = 1000  # of a planned model: one with more takes minutes


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The inputs of a plan of memory and time: the whole model on the meta device, and sections of the job.
    `parameters`: parameters_of(net, optimizer). `global_batch`: the largest number of sequences per step.
    `device_bytes`: memory of a GPU; 0: a CPU."""

    net: Decoder
    parameters: Sequence[Parameter]
    training: Training
    global_batch: int
    degrees: Degrees
    optimizer: Optimizer
    loss: Loss
    settings: ParallelSettings
    ema: EMA
    device_bytes: int

    @property
    def layout(self) -> str:
        """The layout in words."""
        return self.settings.parallelism.describe(self.degrees, self.shape.num_experts)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP wraps the model; a single process shards nothing."""
        return self.degrees != Degrees(1, 1, 1, 1, 1)

    @property
    def num_micro_batches(self) -> int:
        return BatchLayout.from_training(self.training, self.degrees.data_parallel).num_micro_batches(
            self.global_batch
        )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank; tensor parallel shards them further between the layers."""
        return self.training.local_batch_size * self.training.seq_len // self.degrees.cp

    @cached_property
    def shape(self) -> BlockShape:
        float8 = self.settings.float8
        num_chosen = getattr(self.net.config, "n_experts_per_token", 1)
        return BlockShape.of(
            self.net,
            size=self.settings.param_dtype.itemsize,
            compiled=self.settings.compile.enable,
            is_float8=float8.enable and float8.recipe != "rowwise_with_gw_hp",
            tp=self.degrees.tp,
            cp=self.degrees.cp,
            ep=self.settings.parallelism.expert_parallel_degree,
            gathers_tokens=self.settings.parallelism.gathers_tokens(num_chosen),
        )

    @property
    def step_memory(self) -> StepMemory:
        """The settings by which the run decides whether FSDP frees gathered weights."""
        return StepMemory(
            net=self.net,
            optimizer=self.optimizer,
            loss=self.loss,
            settings=self.settings,
            degrees=self.degrees,
            has_average=self.ema.enable,
            tokens=self.tokens,
            accumulates=self.num_micro_batches > 1,
        )


def planned_run(job: Job, num_ranks: int, param_dtype: torch.dtype, device_bytes: int) -> PlannedRun:
    """The sections of a job that decide the memory and the time of a step on `num_ranks` ranks.
    `device_bytes`: memory of a GPU; 0: a CPU."""
    degrees = job.parallelism.degrees(num_ranks)
    batch = BatchLayout.from_training(job.training, degrees.data_parallel)
    net = job.build_on_meta()
    return PlannedRun(
        net=net,
        parameters=parameters_of(net, job.optimizer),
        training=job.training,
        global_batch=max(job.batch_sizes(batch.global_size).values()),
        degrees=degrees,
        optimizer=job.optimizer,
        loss=job.loss,
        settings=job.parallel_settings(param_dtype),
        ema=job.ema,
        device_bytes=device_bytes,
    )
