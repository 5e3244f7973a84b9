"""Pipeline parallel: the blocks are partitioned into stages, each rank along the `pp` axis has one or two
stages, and micro-batches pass through all stages (Huang et al. 2019; 1F1B and interleaving: Narayanan et al.
2021; zero bubble: Qi et al. 2024).

torch's schedules order the forwards and backwards. A stage receives only hidden states from other ranks. It
takes positions, attention and head_fn from its own copy of the batch, because every schedule runs the
micro-batches of a stage in order."""

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
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder, Inputs
from titanlite.parallel.fsdp import add_up_gradients
from titanlite.parallelism import Parallelism
from titanlite.torch_compat import after_weight_backward, skip_p2p_to_own_rank

STAGES_PER_RANK = {  # by schedule
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")


def split_into_stages(parallelism: Parallelism, blocks: Sequence[str]) -> list[list[str]]:
    """The names of the blocks of each stage, in order. Raises ConfigError if a stage would have no blocks."""
    schedule = parallelism.pipeline_parallel_schedule
    num_stages = parallelism.pipeline_parallel_degree * STAGES_PER_RANK[schedule]
    if parallelism.pipeline_parallel_split_points:
        return _split_at(blocks, parallelism.pipeline_parallel_split_points, num_stages)
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    size, remainder = divmod(len(blocks) + first + last, num_stages)
    # The order in which stages get one of the remaining blocks: first the stages that have fewer blocks by
    # configuration, then all others from the second stage on.
    shortened = [i for i, less in ((0, first), (num_stages - 1, last)) if less]
    order = list(dict.fromkeys([*shortened, *range(1, num_stages), 0]))
    sizes = [size + (i in order[:remainder]) for i in range(num_stages)]
    sizes[0] -= first
    sizes[-1] -= last
    if min(sizes) < 1:
        raise ConfigError(
            f"{len(blocks)} blocks over {num_stages} stages, with {first} fewer on the first and {last} "
            f"fewer on the last stage, make {sizes}: lower the degree, choose a schedule with one stage per "
            "rank, or set both pipeline_parallel_..._stage_less_layers to 0",
            "parallelism.pipeline_parallel_degree",
        )
    bounds = list(itertools.accumulate(sizes, initial=0))
    return [list(blocks[a:b]) for a, b in itertools.pairwise(bounds)]


def _split_at(blocks: Sequence[str], points: Sequence[str], num_stages: int) -> list[list[str]]:
    key = "parallelism.pipeline_parallel_split_points"
    if len(points) != num_stages - 1:
        raise ConfigError(f"{len(points)} split points make {len(points) + 1} stages, not {num_stages}", key)
    names = [point.rpartition(".")[2] for point in points]
    if missing := [point for point, name in zip(points, names) if name not in blocks]:
        raise ConfigError(
            f"{missing[0]!r} is no block; the blocks are layers.{blocks[0]} to layers.{blocks[-1]}", key
        )
    bounds = [0, *(blocks.index(name) for name in names), len(blocks)]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ConfigError(f"{list(points)} are not in order, or leave the first stage without blocks", key)
    return [list(blocks[a:b]) for a, b in itertools.pairwise(bounds)]


def check_pipeline_parallel(
    parallelism: Parallelism,
    *,
    num_blocks: int,
    batch_sizes: Mapping[str, int],
    micro_batch_sequences: int,
    reduce_dtype: str,
    separates_weight_backward: bool,
) -> None:
    """Raises ConfigError for a job that the schedule cannot run.

    `batch_sizes`: the numbers of sequences per step, by the keys that set them. `micro_batch_sequences`:
    number of sequences in a micro-batch, summed over all data-parallel ranks. `separates_weight_backward`:
    whether gradients of a block's weights can be computed separately from its activations' gradients."""
    p, schedule = parallelism, parallelism.pipeline_parallel_schedule
    if p.pipeline_parallel_degree == 1:
        return
    degree_key = "parallelism.pipeline_parallel_degree"
    num_stages = len(split_into_stages(p, [str(i) for i in range(num_blocks)]))
    least = {"GPipe": 1, "1F1B": num_stages}.get(schedule, p.pipeline_parallel_degree)
    for key, size in batch_sizes.items():
        micro_batches = size // micro_batch_sequences
        rounds = max(micro_batches // p.pipeline_parallel_degree, 1)
        uneven = schedule.startswith("Interleaved") and micro_batches % rounds
        if micro_batches < least or uneven:
            legal = [n * micro_batch_sequences for n in (least, 2 * least, 4 * least)]
            raise ConfigError(
                f"{schedule} over {num_stages} stages cannot run {micro_batches} micro-batches; {least} or a "
                f"multiple works: {key} = {', '.join(map(str, legal))}",
                degree_key,
            )
    if p.fsdp_reduce == "micro_batch" or reduce_dtype != "float32":
        key = "fsdp_reduce" if p.fsdp_reduce == "micro_batch" else "mixed_precision_reduce"
        raise ConfigError(
            f"pipeline parallel reduces gradients once per step, in float32: unset {key}", degree_key
        )
    if schedule in ZERO_BUBBLE and p.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"{schedule} needs weights that stay gathered: set default or never",
            "parallelism.fsdp_reshard_after_forward",
        )
    if schedule in ZERO_BUBBLE and not separates_weight_backward:
        raise ConfigError(
            f"{schedule} computes gradients of weights and of activations separately, which compile.enable "
            "and activation_checkpoint do not support; use 1F1B or Interleaved1F1B with them",
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
    """The numbers of a rank's stages, in ascending order. With two stages per rank, the second half of the
    stages is on ranks 0 to last, for ZBVZeroBubble on ranks last to 0."""
    if STAGES_PER_RANK[schedule] == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule == "ZBVZeroBubble" else ranks + rank]


def apply_pipeline_parallel(
    net: Decoder, parallelism: Parallelism, mesh: Mesh
) -> tuple[Decoder, dict[int, Decoder]]:
    """This rank's stages of `net`: as one model, and by stage number. The two share their modules."""
    if mesh.pp is None:
        return net, {0: net}
    check_auxiliary_losses(net, mesh.degrees.pp)
    schedule, rank = parallelism.pipeline_parallel_schedule, mesh.coordinate.pp
    stages = split_into_stages(parallelism, list(net.blocks()))
    last = len(stages) - 1
    local = stages_of_rank(schedule, rank, mesh.degrees.pp)
    modules = {i: net.pipeline_stage(stages[i], first=i == 0, last=i == last) for i in local}
    blocks = [name for i in local for name in stages[i]]
    return net.pipeline_stage(blocks, first=0 in local, last=last in local), modules


class Pipeline:
    """Runs this rank's `stages`, by stage number, together with the other ranks along `mesh`. For tokens [B,
    T] ranks send hidden states [B, T / tp_degree, D] of `dtype`."""

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
        self._rank_of = {
            i: rank for rank in range(self.ranks) for i in stages_of_rank(schedule, rank, self.ranks)
        }
        self._tokens = torch.ones(())
        self._waiting: dict[int, Iterator[Inputs]] = {}
        self._schedule: Any = None
        self._scheduled_shape: tuple[int, torch.Size] | None = None
        for number, stage in self.stages.items():
            self._take_inputs(number, stage)

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.last in self.stages

    def forward_backward(self, inputs: Sequence[Inputs], tokens: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradient of (sum of token losses) / `tokens` over all micro-batches, and reduce it.
        Returns (sum of token losses) / `tokens`, detached; zero on ranks without the last stage."""
        shape = (len(inputs), inputs[0].tokens.shape)
        if self._scheduled_shape != shape:
            self._schedule, self._scheduled_shape = self._make_schedule(inputs), shape
        self._tokens = tokens.clamp(min=1)
        self._waiting = {i: iter(inputs) for i in self.stages}
        losses: list[torch.Tensor] = []
        first = [torch.cat([i.tokens for i in inputs])] if 0 in self.stages else []
        # head_fn has the targets; the schedule only needs a tensor with one entry per micro-batch.
        targets = torch.empty(len(inputs), device=tokens.device) if self.has_last else None
        results = losses if self.has_last else None
        self._schedule.step(*first, target=targets, losses=results, return_outputs=False)
        self._waiting = {}  # frees the masks
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=tokens.device)

    def forward(self, inputs: Inputs) -> torch.Tensor | None:
        """The output of the last stage for one micro-batch, without gradients; None on ranks without the last
        stage. With one stage per rank, a rank returns as soon as it has sent its hidden states."""
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
        """Send the last stage's output, which has the given shape, to all ranks. `output`: None on ranks
        without the last stage."""
        x = torch.empty(*shape, dtype=self.dtype, device=device) if output is None else output.contiguous()
        dist.broadcast(x, group=self.group, group_src=self._rank_of[self.last])
        return x

    def _take_inputs(self, number: int, stage: Decoder) -> None:
        """Replace the stage's forward by a forward of hidden states only, as torch's schedules call it. The
        other arguments come from the next micro-batch in `_waiting`."""
        inner = stage.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            inputs = next(self._waiting[number])
            return inner(x, inputs.positions, inputs.attention, inputs.head_fn)

        stage.forward = forward  # type: ignore[method-assign, assignment]

    def _hidden(self, inputs: Inputs) -> tuple[int, int, int]:
        B, T = inputs.tokens.shape
        return B, T // self.tp_degree, next(iter(self.stages.values())).config.dim

    def _make_schedule(self, inputs: Sequence[Inputs]) -> Any:
        """torch's schedule of this rank's stages, for this number of micro-batches of equal shape."""
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
        bubble = ""
        if self.schedule not in ZERO_BUBBLE:
            share = (self.ranks - 1) / (len(inputs) * len(stages) + self.ranks - 1)
            bubble = f"; each rank idles {share:.0%} of the time if all stages take equally long"
        logger.info(
            f"pipeline parallel: {len(inputs)} micro-batches over {self.last + 1} stages, "
            f"{self.schedule}{bubble}"
        )
        return schedule
