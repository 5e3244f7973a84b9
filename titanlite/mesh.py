"""The ranks as a mesh with named axes, and the one place that knows the order of the axes.

Axes, from the outermost in: `replicate` (HSDP: whole copies), `shard` (FSDP: parts of one copy), `context`
(parts of each row), `tensor` (parts of each layer). Ranks along `context` and `tensor` read the same rows;
replicate x shard are the data-parallel ranks. FSDP shards over `context`, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.component import ConfigError


class Degrees(NamedTuple):
    """Ranks along each axis, in the mesh's order."""

    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def data_parallel(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def same_rows(self) -> int:
        """Ranks that read the same ones."""
        return self.context * self.tensor


SHARD = "data_parallel_shard_degree"
KEYS = (
    "data_parallel_replicate_degree",
    SHARD,
    "context_parallel_degree",
    "tensor_parallel_degree",
)  # of the degrees, in their order


SHARD_AND_CONTEXT = "shard_context"  # the two as one axis


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
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters between forward and backward, and gather them again: `always` (all but the
    last block's and the head's, which the backward begins with), `never`, or `default`, which keeps those of
    a model that fit into 5% of the GPU's memory."""
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


@dataclass(frozen=True)
class Mesh:
    """Named views of the ranks. `device_mesh` is None in a single process."""

    degrees: Degrees
    rank: int
    device_mesh: DeviceMesh | None

    @property
    def dp_size(self) -> int:
        """Ranks that read different rows."""
        return self.degrees.data_parallel

    @property
    def dp_rank(self) -> int:
        """Which of them this one is."""
        return self.rank // self.degrees.same_rows

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the weights is divided."""
        return self.degrees.shard * self.degrees.same_rows

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that read the same rows: what they all know is counted once."""
        return self.rank % self.degrees.same_rows == 0

    @property
    def has_loss(self) -> bool:
        """Whether the loss of this rank's tokens is not another's, too."""
        return self.rank % self.degrees.tensor == 0

    @property
    def fsdp(self) -> DeviceMesh:
        """What fully_shard takes: one axis (shard), or two (replicate, shard) for HSDP."""
        assert self.device_mesh is not None, "no process group: nothing to shard over"
        shard = "shard" if self.degrees.context == 1 else SHARD_AND_CONTEXT
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


ALONE = Mesh(Degrees(1, 1, 1, 1), 0, None)


def build_mesh(parallelism: Parallelism, device_type: str, rank: int, world_size: int) -> Mesh:
    """The mesh of this job; collective over all ranks."""
    degrees = parallelism.degrees(world_size)
    mesh = init_device_mesh(device_type, degrees, mesh_dim_names=Degrees._fields) if world_size > 1 else None
    if mesh is not None and degrees.context > 1:
        mesh["shard", "context"]._flatten(SHARD_AND_CONTEXT)
    return Mesh(degrees, rank, mesh)
