"""Pipeline parallel: each rank along the `pipeline` axis has some of the blocks, as one stage or two, and
micro-batches go through the stages one after another (Huang et al. 2019; 1F1B and interleaving: Narayanan et
al. 2021; zero bubble: Qi et al. 2024).

torch's schedules decide who does what when. A stage is a `part` of the model; the schedule hands it hidden
states, and what else a micro-batch has it takes from this rank's own copy of the rows, in order: in every
schedule a stage sees the micro-batches in theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.log import logger
from titanlite.mesh import STAGES_A_RANK, Mesh, Parallelism
from titanlite.models.base import Decoder, Inputs
from titanlite.parallel.fsdp import add_up_gradients


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """The numbers of a rank's stages, in the order of the pipeline. `ZBVZeroBubble` turns at the last rank,
    so that the first one has the last stage; the others begin anew at the first rank."""
    if STAGES_A_RANK[schedule] == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule == "ZBVZeroBubble" else ranks + rank]


def apply_pipeline(net: Decoder, parallelism: Parallelism, mesh: Mesh) -> tuple[Decoder, dict[int, Decoder]]:
    """This rank's part of `net`, and the stages it consists of, by number; they share their modules."""
    if mesh.pipeline is None:
        return net, {0: net}
    schedule, rank = parallelism.pipeline_parallel_schedule, mesh.place.pipeline
    stages = parallelism.stages(list(net.blocks()))
    mine = stages_of(schedule, rank, mesh.degrees.pipeline)
    parts = {i: net.part(stages[i], first=i == 0, last=i == len(stages) - 1) for i in mine}
    blocks = [name for i in mine for name in stages[i]]
    return net.part(blocks, first=0 in mine, last=len(stages) - 1 in mine), parts


class Pipeline:
    """Runs the stages of all ranks along `mesh`. Hidden states between them: [B, T / divided, D] for tokens
    [B, T], of `dtype`."""

    def __init__(
        self, parts: Mapping[int, Decoder], schedule: str, mesh: DeviceMesh, divided: int, dtype: torch.dtype
    ):
        self.parts, self.schedule = dict(sorted(parts.items())), schedule
        self.divided, self.dtype = divided, dtype
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.last = self.ranks * STAGES_A_RANK[schedule] - 1
        owner = {i: r for r in range(self.ranks) for i in stages_of(schedule, r, self.ranks)}
        self._rank_of = [owner[i] for i in range(self.last + 1)]
        self._tokens = torch.ones(())
        self._waiting: dict[int, Iterator[Inputs]] = {}
        self._run: Any = None
        self._for: tuple[int, torch.Size] | None = None
        for stage, part in self.parts.items():
            self._feed(stage, part)

    @property
    def has_last(self) -> bool:
        """Whether the last stage, and with it the loss, is here."""
        return self.last in self.parts

    def forward_backward(self, inputs: Sequence[Inputs], tokens: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradient of (sum of token losses) / `tokens`, which is reduced at the end; returns
        that loss, detached; zero where it is not computed."""
        shape = (len(inputs), inputs[0].tokens.shape)
        if self._for != shape:
            self._run, self._for = self._scheduled(inputs), shape
        self._tokens = tokens.clamp(min=1)
        self._waiting = {i: iter(inputs) for i in self.parts}
        losses: list[torch.Tensor] = []
        first = [torch.cat([i.tokens for i in inputs])] if 0 in self.parts else []
        # The targets are with the rest of a micro-batch; the schedule only wants to see as many.
        targets = torch.empty(len(inputs), device=tokens.device) if self.has_last else None
        asked = losses if self.has_last else None
        self._run.step(*first, target=targets, losses=asked, return_outputs=False)
        self._waiting = {}  # masks are large
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=tokens.device)

    def forward(self, inputs: Inputs) -> torch.Tensor | None:
        """What comes out of the last stage, for one micro-batch; None where that is not. With one stage a
        rank, it may go on to the next micro-batch when its hidden states are sent."""
        x = inputs.tokens
        for stage, part in self.parts.items():
            if stage > 0 and (source := self._rank_of[stage - 1]) != self.rank:
                x = torch.empty(self._hidden(inputs), dtype=self.dtype, device=inputs.tokens.device)
                dist.recv(x, group=self.group, group_src=source)
            self._waiting = {stage: iter([inputs])}
            x = part(x)
            if stage < self.last and (target := self._rank_of[stage + 1]) != self.rank:
                dist.send(x.contiguous(), group=self.group, group_dst=target)
        self._waiting = {}
        return x if self.has_last else None

    def from_last(
        self, found: torch.Tensor | None, shape: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        """What the rank with the last stage has found, of that `shape`, on all of them."""
        x = torch.empty(*shape, dtype=self.dtype, device=device) if found is None else found.contiguous()
        dist.broadcast(x, group=self.group, group_src=self._rank_of[self.last])
        return x

    def _feed(self, stage: int, part: Decoder) -> None:
        inner = part.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            return inner(x, *next(self._waiting[stage])[1:])

        part.forward = forward  # type: ignore[method-assign, assignment]

    def _hidden(self, inputs: Inputs) -> tuple[int, int, int]:
        rows, length = inputs.tokens.shape
        return rows, length // self.divided, next(iter(self.parts.values())).dim

    def _scheduled(self, inputs: Sequence[Inputs]) -> Any:
        """torch's schedule of this rank's stages, for so many micro-batches of this shape."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        device = inputs[0].tokens.device
        hidden = torch.empty(self._hidden(inputs[0]), dtype=self.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(inputs[0].tokens.shape, dtype=inputs[0].tokens.dtype, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                part,
                i,
                self.last + 1,
                device,
                input_args=(tokens if i == 0 else hidden,),
                output_args=(loss if i == self.last else hidden,),
                group=self.group,
            )
            for i, part in self.parts.items()
        ]
        for stage, part in zip(stages, self.parts.values()):
            weight_backward = stage.backward_weight_one_chunk

            def backward(
                *args: Any, run: Any = weight_backward, part: Decoder = part, **options: Any
            ) -> None:
                run(*args, **options)
                add_up_gradients(part)

            stage.backward_weight_one_chunk = backward  # type: ignore[method-assign]
            if device.type == "cpu":
                skip_p2p_to_own_rank(stage)
        kind = get_schedule_class(self.schedule)
        run = kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            n_microbatches=len(inputs),
            loss_fn=lambda loss, _: loss / self._tokens,
            scale_grads=False,
        )
        waiting = (self.ranks - 1) / (len(inputs) + self.ranks - 1)
        if len(stages) > 1:
            waiting = share_waiting(run.pipeline_order)
        logger.info(
            f"pipeline: {len(inputs)} micro-batches through {self.last + 1} stages by {self.schedule}; "
            f"a rank waits {waiting:.0%} of the time, if all stages take equally long"
        )
        return run


def skip_p2p_to_own_rank(stage: Any) -> None:
    """torch 2.11 warms up point-to-point connections before the first step (torch 2.13 does not). Two
    neighbouring stages of ZBVZeroBubble are on the last rank, and gloo cannot send to its own rank."""
    warm_up = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in warm_up() if op.peer != dist.get_rank()]


COSTS = {"FORWARD": 1, "FULL_BACKWARD": 2, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1}


def share_waiting(order: Mapping[int, Sequence[Any]]) -> float:
    """The bubble: what part of the time ranks that follow `order` (torch's actions, by rank) wait for one
    another, if all stages take equally long, a backward twice as long as a forward, and sending no time."""
    left = {r: [a for a in of if a and a.computation_type.name in COSTS] for r, of in order.items()}
    last = max(a.stage_index for actions in left.values() for a in actions)
    clock = dict.fromkeys(left, 0)
    work = sum(COSTS[a.computation_type.name] for actions in left.values() for a in actions)
    ended: dict[tuple[bool, int, int], int] = {}  # of forwards and of backwards
    while any(left.values()):
        so_far = len(ended)
        for rank, actions in left.items():
            while actions:
                a = actions[0]
                kind, stage, number = a.computation_type.name, a.stage_index, a.microbatch_index
                forward = kind == "FORWARD"
                before = (forward, stage - 1 if forward else stage + 1, number)
                alone = kind == "BACKWARD_WEIGHT" or stage == (0 if forward else last)
                if not alone and before not in ended:
                    break
                clock[rank] = max(clock[rank], 0 if alone else ended[before]) + COSTS[kind]
                if kind != "BACKWARD_WEIGHT":
                    ended[forward, stage, number] = clock[rank]
                actions.pop(0)
        assert len(ended) > so_far or not any(left.values()), "this order waits for itself"
    return 1 - work / (len(left) * max(clock.values()))
