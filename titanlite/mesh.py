"""The ranks as a mesh with named axes, and the one place that knows the order of the axes.

Axes, from the outermost in: `pp` (pipeline parallel: stages), `dp_replicate` (HSDP: copies of the model),
`dp_shard` (FSDP: shards of one copy), `cp` (context parallel: chunks of each sequence), `tp` (tensor
parallel: shards of each layer). Ranks along `pp`, `cp` and `tp` read the same sequences; those along
`dp_replicate` and `dp_shard` are the data-parallel ranks. FSDP also shards over `cp`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titanlite.config.component import ConfigError
from titanlite.torch_compat import flatten_mesh, local_offsets


class Degrees(NamedTuple):
    """The number of ranks along each axis, or a rank's coordinate on each, in the mesh's order."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def data_parallel(self) -> int:
        """The number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        """The axes with more than one rank, such as `pp 2 x dp_shard 4`."""
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


DP_SHARD_AND_CP = "dp_shard_cp"  # both as one axis


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How the ranks are laid out. The product of the degrees is the number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Number of copies of the sharded model; above 1 with sharding is HSDP."""
    data_parallel_shard_degree: int = -1
    """Number of ranks that share one copy of parameters, gradients and optimizer state (FSDP); -1: all ranks
    that the other degrees leave."""
    context_parallel_degree: int = 1
    """Number of ranks that share the tokens of each sequence; attention gathers keys and values. For long
    sequences."""
    tensor_parallel_degree: int = 1
    """Number of ranks that share each layer's work on the same sequences, and the tokens of those sequences
    between the layers (sequence parallel)."""
    pipeline_parallel_degree: int = 1
    """Number of ranks, or groups of ranks, that share the blocks as pipeline stages. The pipeline's
    micro-batches are those that global_batch_size accumulates."""
    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """The order of a rank's forwards and backwards. `1F1B`: in turns, one stage per rank. `GPipe`: all
    forwards first. `Interleaved1F1B`: two stages per rank, which wait less and send more.
    `InterleavedZeroBubble`, `ZBVZeroBubble`: also compute the weights' gradients apart from the activations',
    to fill the remaining bubbles; not with compile.enable or activation checkpointing."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """Give the first stage, which has the embedding, this many fewer blocks."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """Give the last stage, which has the head and the loss, this many fewer blocks."""
    pipeline_parallel_split_points: list[str] = field(default_factory=list)
    """Names of the first blocks of all stages but the first, such as `["layers.3", "layers.6"]`; empty: split
    as evenly as possible."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters between forward and backward, and gather them again: `always` (all but those
    of the last block and the head, with which the backward begins), `never`, or `default`. `default` keeps
    them gathered if they fit into 5% of the GPU's memory, and under pipeline parallel, which would otherwise
    gather them for each micro-batch."""
    fsdp_reduce: Literal["step", "micro_batch"] = "step"
    """When gradients are summed over ranks: once per step, which is fastest but keeps the whole model's
    gradients on every rank while micro-batches accumulate, or after each micro-batch, which keeps only the
    rank's shard."""

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

    def check(self, seq_len: int) -> None:
        """Raises ConfigError unless context and tensor parallel can shard sequences of `seq_len` tokens."""
        context, tensor = self.context_parallel_degree, self.tensor_parallel_degree
        if context > 1 and seq_len % (2 * context * tensor):
            raise ConfigError(
                f"training.seq_len = {seq_len} is no multiple of 2 x context_parallel_degree {context} x "
                f"tensor_parallel_degree {tensor}: each rank has two chunks of equal size of each sequence",
                "parallelism.context_parallel_degree",
            )
        if seq_len % tensor:
            raise ConfigError(
                f"training.seq_len = {seq_len} is no multiple of {tensor}: sequence parallel shards the "
                "tokens of each sequence over the tensor-parallel ranks",
                "parallelism.tensor_parallel_degree",
            )

    @property
    def fewest_ranks(self) -> int:
        """The smallest number of ranks that the degrees allow."""
        return math.prod(max(getattr(self, key), 1) for key in KEYS)

    def degrees(self, world_size: int) -> Degrees:
        """The degrees for a number of ranks. Raises ConfigError if they do not multiply to it."""
        asked = Degrees(*(getattr(self, key) for key in KEYS))
        product = " x ".join(f"{key} {n}" for key, n in zip(KEYS, asked) if n > 1)
        if asked.dp_shard == -1:
            others = -math.prod(asked)
            if world_size % others:
                raise ConfigError(
                    f"there are {world_size} ranks, which {product} does not divide", "parallelism"
                )
            return asked._replace(dp_shard=world_size // others)
        if math.prod(asked) != world_size:
            raise ConfigError(
                f"{product or 'no degree above 1'} makes {math.prod(asked)}, there are {world_size} ranks; "
                "a shard degree of -1 takes the rest",
                "parallelism",
            )
        return asked


@dataclass(frozen=True)
class Mesh:
    """Named views of the ranks. `device_mesh` is None in a single process that shards nothing."""

    degrees: Degrees
    rank: int
    device_mesh: DeviceMesh | None

    @property
    def coordinate(self) -> Degrees:
        """This rank's coordinate on each axis."""
        rank, coordinate = self.rank, []
        for size in reversed(self.degrees):
            rank, along = divmod(rank, size)
            coordinate.append(along)
        return Degrees(*reversed(coordinate))

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks, which read different sequences."""
        return self.degrees.data_parallel

    @property
    def dp_rank(self) -> int:
        """This rank's number among the data-parallel ranks."""
        return self.coordinate.dp_replicate * self.degrees.dp_shard + self.coordinate.dp_shard

    @property
    def shards(self) -> int:
        """The number of ranks over which one copy of the weights is sharded."""
        return math.prod(self.degrees) // self.degrees.dp_replicate

    @property
    def is_data_leader(self) -> bool:
        """True on one rank of each group that reads the same sequences, so that counts of a batch are summed
        once."""
        return self.coordinate.pp == self.coordinate.cp == self.coordinate.tp == 0

    @property
    def is_tp_leader(self) -> bool:
        """True on tensor-parallel rank 0, the only one whose loss counts in sums over ranks: the loss of all
        ranks along `tp` is the same."""
        return self.coordinate.tp == 0

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for fully_shard: one axis, or two (replicas, shards) for HSDP."""
        assert self.device_mesh is not None, "no process group: nothing to shard over"
        shard = "dp_shard" if self.degrees.cp == 1 else DP_SHARD_AND_CP
        with warnings.catch_warnings():  # of flattened axes, for which torch has no other way yet
            warnings.simplefilter("ignore", UserWarning)
            return self.device_mesh[("dp_replicate", shard) if self.degrees.dp_replicate > 1 else shard]

    @property
    def cp(self) -> DeviceMesh:
        """The ranks that share the tokens of each sequence (context parallel)."""
        assert self.device_mesh is not None
        return self.device_mesh["cp"]

    @property
    def tp(self) -> DeviceMesh:
        """The ranks that share each layer's work (tensor parallel)."""
        assert self.device_mesh is not None
        return self.device_mesh["tp"]

    @property
    def pp(self) -> DeviceMesh | None:
        """The ranks that share the blocks (pipeline parallel); None if there is one."""
        return self.device_mesh["pp"] if self.device_mesh and self.degrees.pp > 1 else None


ALONE = Mesh(Degrees(1, 1, 1, 1, 1), 0, None)


def build_mesh(
    parallelism: Parallelism, device_type: str, rank: int, world_size: int, always: bool = False
) -> Mesh:
    """The mesh of a job; collective over all ranks. `always`: make a device mesh for a single process,
    too."""
    degrees = parallelism.degrees(world_size)
    if world_size == 1 and not always:
        return Mesh(degrees, rank, None)
    axes = {axis: n for axis, n in degrees._asdict().items() if n > 1 or axis == "dp_shard"}
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if degrees.cp > 1:
        flatten_mesh(mesh["dp_shard", "cp"], DP_SHARD_AND_CP)
    return Mesh(degrees, rank, mesh)


def local_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's shard of a tensor, and the index at which it begins in the full tensor along each dim."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    return tensor.to_local(), local_offsets(tensor)
