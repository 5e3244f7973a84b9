"""Pipeline parallel: each rank along the `pipeline` axis has one or two stages, each of some of the blocks,
and micro-batches go through the stages in order (Huang et al. 2019; 1F1B and interleaving: Narayanan et al.
2021; zero bubble: Qi et al. 2024).

torch's schedules order the forwards and backwards. A stage receives only hidden states; positions, attention
and head_fn of a micro-batch come from the rank's own copy of the batch. Every schedule visits a stage's
micro-batches in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.component import ConfigError
from titanlite.log import logger
from titanlite.mesh import Mesh, Parallelism
from titanlite.models.base import Decoder, Inputs
from titanlite.parallel.fsdp import add_up_gradients
from titanlite.torch_compat import after_weight_backward, skip_p2p_to_own_rank

STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}  # by schedule
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")


def split_into_stages(parallelism: Parallelism, blocks: Sequence[str]) -> list[list[str]]:
    """The names of the blocks of each stage, in order. Raises ConfigError if a stage would have none."""
    schedule = parallelism.pipeline_parallel_schedule
    num_stages = parallelism.pipeline_parallel_degree * STAGES_PER_RANK[schedule]
    if parallelism.pipeline_parallel_split_points:
        return _split_at(blocks, parallelism.pipeline_parallel_split_points, num_stages)
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    size, remainder = divmod(len(blocks) + first + last, num_stages)
    # Stages that get one of the remaining blocks: first those that will give up blocks, the first one last.
    shortened = [i for i, less in ((0, first), (num_stages - 1, last)) if less]
    order = list(dict.fromkeys([*shortened, *range(1, num_stages), 0]))
    sizes = [size + (i in order[:remainder]) for i in range(num_stages)]
    sizes[0] -= first
    sizes[-1] -= last
    if min(sizes) < 1:
        raise ConfigError(
            f"{len(blocks)} blocks on {num_stages} stages, {first} fewer on the first, {last} on the last, "
            f"make {sizes}: lower the degree, take a schedule with one stage per rank, or set both "
            "pipeline_parallel_..._stage_less_layers to 0",
            "parallelism.pipeline_parallel_degree",
        )
    bounds = list(itertools.accumulate(sizes, initial=0))
    return [list(blocks[a:b]) for a, b in itertools.pairwise(bounds)]


def _split_at(blocks: Sequence[str], points: Sequence[str], num_stages: int) -> list[list[str]]:
    key = "parallelism.pipeline_parallel_split_points"
    if len(points) != num_stages - 1:
        raise ConfigError(f"{len(points)} points make {len(points) + 1} stages, not {num_stages}", key)
    names = [point.rpartition(".")[2] for point in points]
    if missing := [point for point, name in zip(points, names) if name not in blocks]:
        raise ConfigError(
            f"{missing[0]!r} is no block; they are layers.{blocks[0]} to layers.{blocks[-1]}", key
        )
    bounds = [0, *(blocks.index(name) for name in names), len(blocks)]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ConfigError(f"{list(points)} are not in order, or leave the first stage without blocks", key)
    return [list(blocks[a:b]) for a, b in itertools.pairwise(bounds)]


def check_pipeline_parallel(
    parallelism: Parallelism,
    *,
    num_blocks: int,
    micro_batches: int,
    micro_batch_sequences: int,
    reduce_dtype: str,
    divides_blocks: bool,
) -> None:
    """Raises ConfigError for a job that the schedule cannot run.

    `micro_batches`: number per step and rank; `micro_batch_sequences`: sequences of one of them over all
    ranks. `divides_blocks`: whether the backward of a block can be divided in two.
    """
    p, schedule = parallelism, parallelism.pipeline_parallel_schedule
    if p.pipeline_parallel_degree == 1:
        return
    degree_key = "parallelism.pipeline_parallel_degree"
    num_stages = len(split_into_stages(p, [str(i) for i in range(num_blocks)]))
    least = {"GPipe": 1, "1F1B": num_stages}.get(schedule, p.pipeline_parallel_degree)
    rounds = max(micro_batches // p.pipeline_parallel_degree, 1)
    uneven = schedule.startswith("Interleaved") and micro_batches % rounds
    if micro_batches < least or uneven:
        legal = [n * micro_batch_sequences for n in (least, 2 * least, 4 * least)]
        raise ConfigError(
            f"{micro_batches} micro-batches do not fill {schedule} over {num_stages} stages; {least} or a "
            f"multiple do: training.global_batch_size = {', '.join(map(str, legal))}",
            degree_key,
        )
    if p.fsdp_reduce == "micro_batch" or reduce_dtype != "float32":
        key = "fsdp_reduce" if p.fsdp_reduce == "micro_batch" else "mixed_precision_reduce"
        raise ConfigError(
            f"pipeline parallel reduces gradients once per step, in float32: unset {key}", degree_key
        )
    if schedule in ZERO_BUBBLE and p.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"{schedule} needs weights that stay gathered: set it to default or never",
            "parallelism.fsdp_reshard_after_forward",
        )
    if schedule in ZERO_BUBBLE and not divides_blocks:
        raise ConfigError(
            f"{schedule} divides the backward of a block in two, which compile.enable and "
            "activation_checkpoint do not allow; use 1F1B or Interleaved1F1B with them",
            "parallelism.pipeline_parallel_schedule",
        )


def check_auxiliary_losses(net: Decoder, degree: int) -> None:
    """Raises ConfigError if pipeline parallel would lose auxiliary losses of the model."""
    if degree > 1 and type(net).auxiliary_losses is not Decoder.auxiliary_losses:
        raise ConfigError(
            "the model has auxiliary losses, which pipeline parallel does not support",
            "parallelism.pipeline_parallel_degree",
        )


def stages_of_rank(schedule: str, rank: int, ranks: int) -> list[int]:
    """The numbers of a rank's stages, in the order of the pipeline. `ZBVZeroBubble` turns at the last rank,
    so that the first rank has the last stage; other schedules begin anew at the first rank."""
    if STAGES_PER_RANK[schedule] == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule == "ZBVZeroBubble" else ranks + rank]


def apply_pipeline_parallel(
    net: Decoder, parallelism: Parallelism, mesh: Mesh
) -> tuple[Decoder, dict[int, Decoder]]:
    """All that this rank has of `net` as one model, and as stages by number; they share their modules."""
    if mesh.pp is None:
        return net, {0: net}
    check_auxiliary_losses(net, mesh.degrees.pp)
    schedule, rank = parallelism.pipeline_parallel_schedule, mesh.coordinate.pp
    stages = split_into_stages(parallelism, list(net.blocks()))
    last = len(stages) - 1
    mine = stages_of_rank(schedule, rank, mesh.degrees.pp)
    modules = {i: net.pipeline_stage(stages[i], first=i == 0, last=i == last) for i in mine}
    blocks = [name for i in mine for name in stages[i]]
    return net.pipeline_stage(blocks, first=0 in mine, last=last in mine), modules


class Pipeline:
    """Runs the stages of all ranks along `mesh`. Between stages travel hidden states [B, T / tp_degree, D] of
    `dtype` for tokens [B, T]. `stages`: this rank's, by number."""

    def __init__(
        self,
        stages: Mapping[int, Decoder],
        schedule: str,
        mesh: DeviceMesh,
        tp_degree: int,
        dtype: torch.dtype,
    ):
        self.stages, self.schedule = dict(sorted(stages.items())), schedule
        self.tp_degree, self.dtype = tp_degree, dtype
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.last = self.ranks * STAGES_PER_RANK[schedule] - 1
        owner = {i: r for r in range(self.ranks) for i in stages_of_rank(schedule, r, self.ranks)}
        self._rank_of = [owner[i] for i in range(self.last + 1)]
        self._tokens = torch.ones(())
        self._waiting: dict[int, Iterator[Inputs]] = {}
        self._schedule: Any = None
        self._scheduled_shape: tuple[int, torch.Size] | None = None
        for number, stage in self.stages.items():
            self._feed(number, stage)

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.last in self.stages

    def forward_backward(self, inputs: Sequence[Inputs], tokens: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradient of (sum of token losses) / `tokens`, and reduce it at the end. Returns that
        loss, detached; zero on ranks without the last stage."""
        shape = (len(inputs), inputs[0].tokens.shape)
        if self._scheduled_shape != shape:
            self._schedule, self._scheduled_shape = self._make_schedule(inputs), shape
        self._tokens = tokens.clamp(min=1)
        self._waiting = {i: iter(inputs) for i in self.stages}
        losses: list[torch.Tensor] = []
        first = [torch.cat([i.tokens for i in inputs])] if 0 in self.stages else []
        # head_fn knows the targets; the schedule only needs one entry per micro-batch.
        targets = torch.empty(len(inputs), device=tokens.device) if self.has_last else None
        into = losses if self.has_last else None
        self._schedule.step(*first, target=targets, losses=into, return_outputs=False)
        self._waiting = {}  # masks are large
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=tokens.device)

    def forward(self, inputs: Inputs) -> torch.Tensor | None:
        """The output of the last stage for one micro-batch; None on ranks without that stage. With one stage
        per rank, a rank goes on to the next micro-batch once its hidden states are sent."""
        x = inputs.tokens
        for number, stage in self.stages.items():
            if number > 0 and (source := self._rank_of[number - 1]) != self.rank:
                x = torch.empty(self._hidden(inputs), dtype=self.dtype, device=inputs.tokens.device)
                dist.recv(x, group=self.group, group_src=source)
            self._waiting = {number: iter([inputs])}
            x = stage(x)
            if number < self.last and (target := self._rank_of[number + 1]) != self.rank:
                dist.send(x.contiguous(), group=self.group, group_dst=target)
        self._waiting = {}
        return x if self.has_last else None

    def broadcast_from_last(
        self, output: torch.Tensor | None, shape: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        """The output of the last stage, of that `shape`, on all ranks. `output`: None on ranks without it."""
        x = torch.empty(*shape, dtype=self.dtype, device=device) if output is None else output.contiguous()
        dist.broadcast(x, group=self.group, group_src=self._rank_of[self.last])
        return x

    def _feed(self, number: int, stage: Decoder) -> None:
        """Let the stage's forward, which gets hidden states only, take the rest of each micro-batch."""
        inner = stage.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            inputs = next(self._waiting[number])
            return inner(x, inputs.positions, inputs.attention, inputs.head_fn)

        stage.forward = forward  # type: ignore[method-assign, assignment]

    def _hidden(self, inputs: Inputs) -> tuple[int, int, int]:
        B, T = inputs.tokens.shape
        return B, T // self.tp_degree, next(iter(self.stages.values())).dim

    def _make_schedule(self, inputs: Sequence[Inputs]) -> Any:
        """torch's schedule of this rank's stages, for as many micro-batches of the same shape."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        device = inputs[0].tokens.device
        hidden = torch.empty(self._hidden(inputs[0]), dtype=self.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(inputs[0].tokens.shape, dtype=inputs[0].tokens.dtype, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                module,
                i,
                self.last + 1,
                device,
                input_args=(tokens if i == 0 else hidden,),
                output_args=(loss if i == self.last else hidden,),
                group=self.group,
            )
            for i, module in self.stages.items()
        ]
        for stage, module in zip(stages, self.stages.values()):
            after_weight_backward(stage, partial(add_up_gradients, module))
            if device.type == "cpu":
                skip_p2p_to_own_rank(stage)
        schedule_class = get_schedule_class(self.schedule)
        schedule = schedule_class(
            stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
            n_microbatches=len(inputs),
            loss_fn=lambda loss, _: loss / self._tokens,
            scale_grads=False,
        )
        waits = ""
        if self.schedule not in ZERO_BUBBLE:
            bubble = (self.ranks - 1) / (len(inputs) * len(stages) + self.ranks - 1)
            waits = f"; a rank waits {bubble:.0%} of the time if all stages take equally long"
        logger.info(
            f"pipeline: {len(inputs)} micro-batches through {self.last + 1} stages by {self.schedule}{waits}"
        )
        return schedule
