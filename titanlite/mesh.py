"""The ranks as a mesh with named axes, and the one place that knows the order of the axes.

Axes, from the outermost in: `pipeline` (parts of the model, one after another), `replicate` (HSDP: whole
copies), `shard` (FSDP: parts of one copy), `context` (parts of each row), `tensor` (parts of each layer).
Ranks along `pipeline`, `context` and `tensor` read the same rows; replicate x shard are the data-parallel
ranks. FSDP shards over `context`, too.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlite.config.component import ConfigError


class Degrees(NamedTuple):
    """Ranks along each axis, or a rank's place on each; in the mesh's order."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def data_parallel(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        """`pipeline 2 x shard 4`: the axes along which there is more than one rank."""
        axes = [f"{axis} {n}" for axis, n in self._asdict().items() if n > 1]
        return " x ".join(axes) or "unsharded"


SHARD = "data_parallel_shard_degree"
KEYS = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    SHARD,
    "context_parallel_degree",
    "tensor_parallel_degree",
)  # of the degrees, in their order


SHARD_AND_CONTEXT = "shard_context"  # the two as one axis

STAGES_A_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}  # of the schedules
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How the ranks are laid out. The product of the degrees is the number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model; above 1 with sharding is HSDP."""
    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP); -1: the rest."""
    context_parallel_degree: int = 1
    """Ranks that share the tokens of each row; attention gathers keys and values. For long rows."""
    tensor_parallel_degree: int = 1
    """Ranks that share each layer's work on the same rows, and the rows' tokens between the layers (sequence
    parallel)."""
    pipeline_parallel_degree: int = 1
    """Ranks, or groups of ranks, that share the blocks: each has some, and passes on what comes out of them.
    Micro-batches are those that global_batch_size accumulates."""
    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Which micro-batch a rank works on when. `1F1B`: forwards and backwards in turns, one stage a rank.
    `GPipe`: all forwards first. `Interleaved1F1B`: two stages a rank, which wait less and send more.
    `InterleavedZeroBubble`, `ZBVZeroBubble`: also the weights' gradients apart from the activations', to fill
    what waiting is left; not with compile.enable, nor with recompute."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """How many blocks the first stage's embedding counts for when blocks are divided."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """How many blocks the last stage's head and loss count for."""
    pipeline_parallel_split_points: list[str] = field(default_factory=list)
    """The blocks with which all stages but the first begin, by name, such as `["layers.3", "layers.6"]`;
    empty: by number, as even as can be."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters between forward and backward, and gather them again: `always` (all but the
    last block's and the head's, which the backward begins with), `never`, or `default`, which keeps those of
    a model that fit into 5% of the GPU's memory, and those of a pipeline, which gathers again for each
    micro-batch otherwise."""
    fsdp_reduce: Literal["step", "micro_batch"] = "step"
    """When gradients are summed over ranks: once a step, which is fastest but keeps a whole model's gradients
    on every rank while micro-batches accumulate, or after each micro-batch, which keeps only the rank's
    shard."""

    def __post_init__(self) -> None:
        for key in KEYS:
            degree = getattr(self, key)
            if degree < 1 and (degree != -1 or key != SHARD):
                least = "neither -1 nor at least 1" if key == SHARD else "below 1"
                raise ConfigError(f"{degree} is {least}", key)
        for key in (
            "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers",
        ):
            if getattr(self, key) < 0:
                raise ConfigError(f"{getattr(self, key)} is below 0", key)

    def stages(self, blocks: Sequence[str]) -> list[list[str]]:
        """The blocks of each stage, in order. Raises ConfigError if a stage is left with none."""
        number = self.pipeline_parallel_degree * STAGES_A_RANK[self.pipeline_parallel_schedule]
        if self.pipeline_parallel_split_points:
            return _split_at(blocks, self.pipeline_parallel_split_points, number)
        first = self.pipeline_parallel_first_stage_less_layers
        last = self.pipeline_parallel_last_stage_less_layers
        each, more = divmod(len(blocks) + first + last, number)
        ends = [i for i, less in ((0, first), (number - 1, last)) if less]  # where blocks will be missing
        order = list(dict.fromkeys([*ends, *range(1, number), 0]))
        sizes = [each + (i in order[:more]) for i in range(number)]
        sizes[0] -= first
        sizes[-1] -= last
        if min(sizes) < 1:
            raise ConfigError(
                f"{len(blocks)} blocks on {number} stages, {first} fewer on the first, {last} on the last, "
                f"make {sizes}: lower the degree, take a schedule with one stage a rank, or set both "
                "pipeline_parallel_..._stage_less_layers to 0",
                "parallelism.pipeline_parallel_degree",
            )
        begins = list(itertools.accumulate(sizes, initial=0))
        return [list(blocks[a:b]) for a, b in itertools.pairwise(begins)]

    @property
    def fewest_ranks(self) -> int:
        """The smallest number of ranks that the degrees allow."""
        return math.prod(max(getattr(self, key), 1) for key in KEYS)

    def degrees(self, world_size: int) -> Degrees:
        """The degrees for a number of ranks. Raises ConfigError if they do not multiply to it."""
        asked = Degrees(*(getattr(self, key) for key in KEYS))
        product = " x ".join(f"{key} {n}" for key, n in zip(KEYS, asked) if n > 1)
        if asked.shard == -1:
            others = -math.prod(asked)
            if world_size % others:
                raise ConfigError(
                    f"there are {world_size} ranks, which {product} does not divide", "parallelism"
                )
            return asked._replace(shard=world_size // others)
        if math.prod(asked) != world_size:
            raise ConfigError(
                f"{product or 'no degree above 1'} makes {math.prod(asked)}, there are {world_size} ranks; "
                "a shard degree of -1 takes the rest",
                "parallelism",
            )
        return asked


def _split_at(blocks: Sequence[str], points: Sequence[str], number: int) -> list[list[str]]:
    key = "parallelism.pipeline_parallel_split_points"
    if len(points) != number - 1:
        raise ConfigError(f"{len(points)} points make {len(points) + 1} stages, not {number}", key)
    names = [point.rpartition(".")[2] for point in points]
    if missing := [point for point, name in zip(points, names) if name not in blocks]:
        raise ConfigError(
            f"{missing[0]!r} is no block; they are layers.{blocks[0]} to layers.{blocks[-1]}", key
        )
    begins = [0, *(blocks.index(name) for name in names), len(blocks)]
    if any(a >= b for a, b in itertools.pairwise(begins)):
        raise ConfigError(f"{list(points)} are not in order, or leave the first stage without blocks", key)
    return [list(blocks[a:b]) for a, b in itertools.pairwise(begins)]


@dataclass(frozen=True)
class Mesh:
    """Named views of the ranks. `device_mesh` is None in a single process that shards nothing."""

    degrees: Degrees
    rank: int
    device_mesh: DeviceMesh | None

    @property
    def place(self) -> Degrees:
        """This rank's coordinates."""
        rank, place = self.rank, []
        for size in reversed(self.degrees):
            rank, along = divmod(rank, size)
            place.append(along)
        return Degrees(*reversed(place))

    @property
    def dp_size(self) -> int:
        """Ranks that read different rows."""
        return self.degrees.data_parallel

    @property
    def dp_rank(self) -> int:
        """Which of them this one is."""
        return self.place.replicate * self.degrees.shard + self.place.shard

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the weights is divided."""
        return math.prod(self.degrees) // self.degrees.replicate

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that read the same rows: what they all know is counted once."""
        return self.place.pipeline == self.place.context == self.place.tensor == 0

    @property
    def has_tokens(self) -> bool:
        """Whether this rank speaks for its tokens, whose loss others along `tensor` know, too."""
        return self.place.tensor == 0

    @property
    def fsdp(self) -> DeviceMesh:
        """What fully_shard takes: one axis (shard), or two (replicate, shard) for HSDP."""
        assert self.device_mesh is not None, "no process group: nothing to shard over"
        shard = "shard" if self.degrees.context == 1 else SHARD_AND_CONTEXT
        with warnings.catch_warnings():  # of axes made of two, for which torch has no other way yet
            warnings.simplefilter("ignore", UserWarning)
            return self.device_mesh[("replicate", shard) if self.degrees.replicate > 1 else shard]

    @property
    def context(self) -> DeviceMesh:
        """The ranks that share the tokens of each row."""
        assert self.device_mesh is not None
        return self.device_mesh["context"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share each layer's work."""
        assert self.device_mesh is not None
        return self.device_mesh["tensor"]

    @property
    def pipeline(self) -> DeviceMesh | None:
        """The ranks that share the blocks; None if there is one."""
        return self.device_mesh["pipeline"] if self.device_mesh and self.degrees.pipeline > 1 else None


ALONE = Mesh(Degrees(1, 1, 1, 1, 1), 0, None)


def build_mesh(
    parallelism: Parallelism, device_type: str, rank: int, world_size: int, always: bool = False
) -> Mesh:
    """The mesh of this job; collective over all ranks. `always`: also for a single process."""
    degrees = parallelism.degrees(world_size)
    if world_size == 1 and not always:
        return Mesh(degrees, rank, None)
    axes = {axis: n for axis, n in degrees._asdict().items() if n > 1 or axis == "shard"}
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if degrees.context > 1:
        mesh["shard", "context"]._flatten(SHARD_AND_CONTEXT)
    return Mesh(degrees, rank, mesh)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, and where in the whole it begins along each dim."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    return tensor.to_local(), tuple(offsets)
