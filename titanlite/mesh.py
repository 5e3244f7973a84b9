"""The ranks as a mesh with named axes, and the one place that knows the order of the axes.

Axes: `replicate` (HSDP: whole copies) and `shard` (FSDP: parts of one copy); together they are the
data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.component import ConfigError


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How the ranks are laid out. The product of the degrees is the number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model; above 1 with sharding is HSDP."""
    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP); -1: the rest."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters between forward and backward, and gather them again: `always`, `never`, or
    `default`, which keeps those of a model that fit into 5% of the GPU's memory."""
    fsdp_reduce: Literal["step", "micro_batch"] = "step"
    """When gradients are summed over ranks: once a step, which is fastest but keeps a whole model's gradients
    on every rank while micro-batches accumulate, or after each micro-batch, which keeps only the rank's
    shard."""

    def __post_init__(self) -> None:
        if self.data_parallel_replicate_degree < 1:
            raise ConfigError(
                f"{self.data_parallel_replicate_degree} is below 1", "data_parallel_replicate_degree"
            )
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ConfigError(
                f"{self.data_parallel_shard_degree} is neither -1 nor at least 1",
                "data_parallel_shard_degree",
            )

    def degrees(self, world_size: int) -> tuple[int, int]:
        """(replicate, shard) for a number of ranks. Raises ConfigError if they do not multiply to it."""
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if shard == -1:
            shard = world_size // replicate
        if replicate * shard != world_size:
            raise ConfigError(
                f"data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard} is "
                f"{replicate * shard}, there are {world_size} ranks; a shard degree of -1 takes the rest",
                "parallelism",
            )
        return replicate, shard


@dataclass(frozen=True)
class Mesh:
    """Named views of the ranks. `device_mesh` is None in a single process."""

    replicate: int
    shard: int
    rank: int
    device_mesh: DeviceMesh | None

    @property
    def dp_size(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def dp_rank(self) -> int:
        """Which of them this one is."""
        return self.rank

    @property
    def fsdp(self) -> DeviceMesh:
        """What fully_shard takes: one axis (shard), or two (replicate, shard) for HSDP."""
        assert self.device_mesh is not None, "no process group: nothing to shard over"
        return self.device_mesh if self.replicate > 1 else self.device_mesh["shard"]


def build_mesh(parallelism: Parallelism, device_type: str, rank: int, world_size: int) -> Mesh:
    """The mesh of this job; collective over all ranks."""
    replicate, shard = parallelism.degrees(world_size)
    names = ("replicate", "shard")
    mesh = init_device_mesh(device_type, (replicate, shard), mesh_dim_names=names) if world_size > 1 else None
    return Mesh(replicate, shard, rank, mesh)
