"""What decides the memory and the time of a rank: sections of a job, and its model on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from titanlite.attention.auto import Auto
from titanlite.attention.base import AttentionBackend
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.lab.activations import BlockShape
from titanlite.lab.sharding import Parameter, knows_state, parameters_of
from titanlite.losses import ChunkedCrossEntropy, CrossEntropy, Loss
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer
from titanlite.optim.ema import EMA
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint
from titanlite.parallel.compile import Compile
from titanlite.parallel.float8 import Float8
from titanlite.parallelism import Degrees, Parallelism
from titanlite.runtime.training import BatchLayout, Training

MAX_BLOCKS = 1000  # of a planned model: one with more takes minutes
KNOWN_LOSSES = (CrossEntropy, ChunkedCrossEntropy)
# Backends whose memory is linear in the sequence length, also with masks.
LINEAR_ATTENTION = ("auto", "flash_attention_4", "head_tail", "varlen", "flex")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What decides the memory of a rank: the whole model on the meta device, and sections of the job.
    `parameters`: parameters_of(net, optimizer). `global_batch`: the largest number of sequences per step.
    `device_bytes`: memory of a GPU; 0: a CPU."""

    net: Decoder
    parameters: Sequence[Parameter]
    training: Training
    global_batch: int
    degrees: Degrees
    optimizer: Optimizer
    loss: Loss
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    ema: EMA = field(default_factory=EMA)
    attention: AttentionBackend = field(default_factory=Auto)
    param_dtype: torch.dtype = torch.bfloat16
    device_bytes: int = 0

    @property
    def layout(self) -> str:
        """The layout in words."""
        return self.parallelism.describe(self.degrees, self.shape.num_experts)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP wraps the model; a single process shards nothing."""
        return self.degrees != Degrees(1, 1, 1, 1, 1)

    @property
    def num_micro_batches(self) -> int:
        return BatchLayout.of(self.training, self.degrees.data_parallel).num_micro_batches(self.global_batch)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank; tensor parallel shards them further between the layers."""
        return self.training.local_batch_size * self.training.seq_len // self.degrees.cp

    @cached_property
    def shape(self) -> BlockShape:
        num_chosen = getattr(self.net.config, "n_experts_per_token", 1)
        return BlockShape.of(
            self.net,
            size=self.param_dtype.itemsize,
            compiled=self.compile.enable,
            is_float8=self.float8.enable and self.float8.recipe != "rowwise_with_gw_hp",
            tp=self.degrees.tp,
            cp=self.degrees.cp,
            ep=self.parallelism.expert_parallel_degree,
            gathers_tokens=self.parallelism.gathers_tokens(num_chosen),
        )

    @property
    def unmeasured_memory(self) -> str | None:
        """Why no recorded run shows that the planned memory is right; None: recorded runs show it.
        docs/planning.md has their errors."""
        modules = (self.net, *self.net.blocks().values())
        if any(not type(module).__module__.startswith("titanlite.") for module in modules):
            return "the blocks of a model from outside the package are not known"
        try:
            has_experts = self.shape.num_experts > 0
        except ConfigError as e:
            return str(e)
        reasons = {
            "no run in fp32 was measured": self.param_dtype == torch.float32,
            "no run with data_parallel_replicate_degree above 1 was measured": self.degrees.dp_replicate > 1,
            "no run with expert parallel, or with experts and tensor parallel, was measured": has_experts
            and self.parallelism.shards_experts_apart,
            "more than 1,000 blocks would take minutes to plan": len(self.net.blocks()) > MAX_BLOCKS,
            f"the state of {self.optimizer.name!r} is not known": not knows_state(self.optimizer),
            f"the memory of the loss {self.loss.name!r} is not known": type(self.loss) not in KNOWN_LOSSES,
            "the attention may keep all scores or a mask of all pairs of tokens": self.attention.name
            not in LINEAR_ATTENTION
            or getattr(self.attention, "sdpa_kernel", "auto") == "math",
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def planned_run(job: Job, num_ranks: int, param_dtype: torch.dtype, device_bytes: int) -> PlannedRun:
    """The sections of a job that decide the memory and the time of a step on `num_ranks` ranks.
    `device_bytes`: memory of a GPU; 0: a CPU."""
    degrees = job.parallelism.degrees(num_ranks)
    batch = BatchLayout.of(job.training, degrees.data_parallel)
    net = job.build_on_meta()
    return PlannedRun(
        net=net,
        parameters=parameters_of(net, job.optimizer),
        training=job.training,
        global_batch=max(job.batch_sizes(batch.global_size).values()),
        degrees=degrees,
        optimizer=job.optimizer,
        loss=job.loss,
        parallelism=job.parallelism,
        activation_checkpoint=job.activation_checkpoint,
        compile=job.compile,
        float8=job.float8,
        ema=job.ema,
        attention=job.attention,
        param_dtype=param_dtype,
        device_bytes=device_bytes,
    )
