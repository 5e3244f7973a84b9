"""Dry runs: the model of any rank of a job, made in one process without the job's devices.

torch's fake process group stands for all ranks: its collectives return at once and exchange nothing. The
mesh, the pipeline stages and the shards are made by the code that a run uses, on the meta device, so that no
weight is allocated. Kernels, memory, speed and communication are not checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from titanlite.losses import Loss
from titanlite.mesh import build_mesh, local_shard
from titanlite.models.base import Decoder
from titanlite.parallel.apply import parallelize
from titanlite.parallel.pipeline_parallel import split_into_stages, stages_of_rank
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Degrees
from titanlite.torch_compat import fake_process_group

MAX_EXCESS = 1.1  # largest shard over an even share, above which a warning advises against the layout
MAX_SHARDS = 1024  # of FSDP, per copy of the model


@dataclass(frozen=True)
class RankModel:
    """The model of one rank. `num_parameters`: elements of its shards. `even_share`: elements of its pipeline
    stages, divided by the number of ranks that share them."""

    rank: int
    num_parameters: int
    even_share: float


@dataclass(frozen=True)
class PipelineRank:
    """The ranks with the same pipeline stages, by the models of the first and the last of them: the first
    has the largest shard of every parameter, the last the smallest.

    `stages`: the names of the blocks of each stage, by the stage's number from 0. `num_stages`: of all ranks.
    `num_alike`: number of later pipeline ranks that differ only in the names of their blocks."""

    stages: dict[int, list[str]]
    num_stages: int
    first: RankModel
    last: RankModel
    num_alike: int = 0

    def describe(self) -> str:
        """One line on the ranks, their pipeline stages, blocks and parameters."""
        first, last = self.first, self.last
        ranks = f"rank {first.rank}" if first == last else f"ranks {first.rank} to {last.rank}"
        stages = [
            f"stage {i + 1} of {self.num_stages} with {_span(names)}" if self.num_stages > 1 else _span(names)
            for i, names in self.stages.items()
        ]
        least = f"{last.num_parameters:,} to " if last.num_parameters < first.num_parameters else ""
        alike = f"; {self.num_alike} other pipeline rank(s) alike" if self.num_alike else ""
        return f"{ranks}: {' and '.join(stages)}, {least}{first.num_parameters:,} parameters per rank{alike}"


def _span(blocks: Sequence[str]) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}"


def dry_run(
    make_net: Callable[[], Decoder], loss: Loss, settings: ParallelSettings, num_ranks: int
) -> list[PipelineRank]:
    """Shard the model without weights, as the first and the last rank of each pipeline rank of a job of
    `num_ranks` ranks do. `make_net`: makes the whole model on the meta device. Pipeline ranks that differ
    from an earlier one only in the names of their blocks are only counted. Raises the errors of the run."""
    parallelism, net, groups = settings.parallelism, make_net(), dict[str, PipelineRank]()
    num_pipeline_ranks = parallelism.degrees(num_ranks).pp
    num_each = num_ranks // num_pipeline_ranks
    stages, stages_of = [list(net.blocks())], [[0]]
    if num_pipeline_ranks > 1:
        schedule = parallelism.pipeline_parallel_schedule
        stages = split_into_stages(parallelism, list(net.blocks()))
        stages_of = [stages_of_rank(schedule, i, num_pipeline_ranks) for i in range(num_pipeline_ranks)]
    for i, local in enumerate(stages_of):
        blocks = [[net.blocks()[name] for name in stages[stage]] for stage in local]
        shapes = [[[p.shape for p in block.parameters()] for block in of_stage] for of_stage in blocks]
        key = f"{0 in local} {len(stages) - 1 in local} {shapes}"  # whether it has embedding and head
        if key in groups:
            groups[key] = replace(groups[key], num_alike=groups[key].num_alike + 1)
            continue
        first, last = i * num_each, (i + 1) * num_each - 1
        model = model_of_rank(make_net(), loss, settings, first, num_ranks)
        other = model_of_rank(make_net(), loss, settings, last, num_ranks) if last > first else model
        groups[key] = PipelineRank({stage: stages[stage] for stage in local}, len(stages), model, other)
    return list(groups.values())


def model_of_rank(
    net: Decoder, loss: Loss, settings: ParallelSettings, rank: int, num_ranks: int
) -> RankModel:
    """Shard `net`, which is on the meta device, as `rank` of `num_ranks` ranks does."""
    offload = settings.cpu_offload
    with fake_process_group(rank, num_ranks) if num_ranks > 1 or offload else nullcontext():
        mesh = build_mesh(settings.parallelism, "cpu", rank, num_ranks, always=offload)
        parameters = list(parallelize(net, loss, mesh, settings).net.parameters())
        return RankModel(
            rank,
            sum(local_shard(p).numel() for p in parameters),
            sum(p.numel() for p in parameters) * mesh.degrees.pp / mesh.shards,
        )


def warnings(ranks: list[PipelineRank], degrees: Degrees, num_node_ranks: int) -> list[str]:
    """Advice on layouts that run, but slowly or with more memory than they need. `num_node_ranks`: the ranks
    of a node."""
    texts, num_ranks = [], degrees.data_parallel * degrees.pp * degrees.cp * degrees.tp
    if num_ranks > num_node_ranks and num_node_ranks % degrees.tp:
        texts.append(
            f"tensor parallel spans nodes: groups of {degrees.tp} ranks do not fit into nodes of "
            f"{num_node_ranks}. Its collectives are on the critical path of every layer; set "
            f"parallelism.tensor_parallel_degree to a divisor of {num_node_ranks}"
        )
    excess = max(rank.first.num_parameters / rank.first.even_share for rank in ranks)
    num_shards = degrees.dp_shard * degrees.cp
    if excess > MAX_EXCESS and num_shards > 1:
        texts.append(
            f"the largest shard has {excess:.2f} times an even share of the parameters: the rows of matrices "
            f"do not divide evenly by the {num_shards} ranks that share them. Shard over fewer ranks, or a "
            "number of ranks that divides the rows: set parallelism.data_parallel_replicate_degree"
        )
    if text := too_many_shards(degrees):
        texts.append(text)
    return texts


def too_many_shards(degrees: Degrees) -> str | None:
    """Advice against FSDP over more ranks than MAX_SHARDS; None if it has fewer."""
    num_shards = degrees.dp_shard * degrees.cp
    if num_shards <= MAX_SHARDS:
        return None
    return (
        f"FSDP shards over {num_shards:,} ranks: a start loops over them for each parameter, and a rank has "
        f"few rows of a matrix. Set parallelism.data_parallel_replicate_degree, for at most {MAX_SHARDS:,}"
    )
