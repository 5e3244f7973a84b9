"""The device mesh: the ranks on named axes. Only this module knows the order of the axes.

Axes, from the outermost in: `pp` (pipeline parallel: stages), `dp_replicate` (HSDP: copies of the model),
`dp_shard` (FSDP: shards of one copy), `cp` (context parallel: chunks of each sequence), `tp` (tensor
parallel: shards of each layer). Ranks along `pp`, `cp` and `tp` read the same sequences; those along
`dp_replicate` and `dp_shard` are the data-parallel ranks. FSDP also shards over `cp`.

Experts have separate axes over the same ranks in the same order: `pp`, `dp_replicate`, `expert_fsdp` and
`expert`. The last two have the ranks of `dp_shard`, `cp` and `tp`, so that `expert`, the innermost, takes the
ranks of `tp` first, then of `cp`, then of `dp_shard`.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titanlite.parallelism import EXPERT, EXPERT_FSDP, REPLICAS, Degrees, Parallelism
from titanlite.torch_compat import flatten_mesh, local_offsets, plain_tensor

DP_SHARD_AND_CP = "dp_shard_cp"  # the flattened axis over which FSDP shards under context parallel
STAGE_SHARDS = "stage_shards"  # the flattened axes over which the parameters of a pipeline stage are sharded


@dataclass(frozen=True)
class Mesh:
    """This rank's place among the ranks, and the axes as DeviceMeshes. `device_mesh` is None in a single
    process that shards nothing. `expert_degree`: parallelism.expert_parallel_degree. `same_bits`:
    training.same_bits_on_any_ranks; results must not depend on the number of data-parallel ranks."""

    degrees: Degrees
    rank: int
    device_mesh: DeviceMesh | None
    expert_degree: int = 1
    same_bits: bool = False

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

    def dp_ranks(self, num_ranks: int) -> list[int]:
        """The numbers among the data-parallel ranks of the `num_ranks` ranks from this one on."""
        ranks = range(self.rank, self.rank + num_ranks)
        return sorted({replace(self, rank=rank).dp_rank for rank in ranks})

    @property
    def shards(self) -> int:
        """The number of ranks over which one copy of the weights is sharded."""
        return math.prod(self.degrees) // self.degrees.dp_replicate

    @property
    def is_data_leader(self) -> bool:
        """True on one rank of each group of ranks that read the same sequences, so that a sum over ranks
        counts each sequence once."""
        return self.coordinate.pp == self.coordinate.cp == self.coordinate.tp == 0

    @property
    def is_tp_leader(self) -> bool:
        """True on tensor-parallel rank 0. All ranks along `tp` have the same loss, and only this rank's loss
        enters sums over ranks."""
        return self.coordinate.tp == 0

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for fully_shard: one axis, or two axes (replicas, shards) for HSDP."""
        assert self.device_mesh is not None, "no process group: nothing to shard over"
        shard = self._fsdp_axis
        with warnings.catch_warnings():  # torch warns about flattened axes, but offers no alternative yet
            warnings.simplefilter("ignore", UserWarning)
            return self.device_mesh[(REPLICAS, shard) if self.degrees.dp_replicate > 1 else shard]

    @property
    def _fsdp_axis(self) -> str:
        return "dp_shard" if self.degrees.cp == 1 else DP_SHARD_AND_CP

    @property
    def cp(self) -> DeviceMesh:
        """The ranks over which the tokens of each sequence are sharded (context parallel)."""
        assert self.device_mesh is not None
        return self.device_mesh["cp"]

    @property
    def tp(self) -> DeviceMesh:
        """The ranks over which each layer is sharded (tensor parallel)."""
        assert self.device_mesh is not None
        return self.device_mesh["tp"]

    @property
    def pp(self) -> DeviceMesh | None:
        """The ranks over which the blocks are partitioned (pipeline parallel); None without pipeline
        parallel."""
        return self.device_mesh["pp"] if self.device_mesh and self.degrees.pp > 1 else None

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that together hold one copy of this pipeline stage's parameters: FSDP, context-parallel
        and tensor-parallel ranks of one replica. None for a single rank. The first use is collective over all
        ranks, because with tensor parallel it makes the group, which only some optimizers need."""
        if self.device_mesh is None or self.shards == self.degrees.pp:
            return None
        axis = self._fsdp_axis
        if self.degrees.tp > 1:
            axes = ("dp_shard", "tp") if self.degrees.cp == 1 else ("dp_shard", "cp", "tp")
            axis = STAGE_SHARDS
            flatten_mesh(self.device_mesh[axes], axis)
        with warnings.catch_warnings():  # as in `fsdp`
            warnings.simplefilter("ignore", UserWarning)
            return self.device_mesh[axis].get_group()

    @property
    def has_expert_axes(self) -> bool:
        """As Parallelism.has_expert_axes."""
        return self.device_mesh is not None and (self.expert_degree > 1 or self.degrees.tp > 1)

    @cached_property
    def experts(self) -> DeviceMesh:
        """The separate axes of experts. The first use is collective over all ranks,
        because it makes the groups, which only models with experts need."""
        assert self.device_mesh is not None
        axes = {
            axis: size
            for axis, size in self.degrees.of_experts(self.expert_degree).items()
            if size > 1 or axis in (EXPERT_FSDP, EXPERT)
        }
        return init_device_mesh(
            self.device_mesh.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )

    @property
    def expert(self) -> DeviceMesh:
        """The ranks over which the experts are partitioned (expert parallel)."""
        return self.experts[EXPERT]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh for fully_shard of experts on separate axes: one axis, or two for HSDP."""
        return self.experts[(REPLICAS, EXPERT_FSDP) if self.degrees.dp_replicate > 1 else EXPERT_FSDP]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that this rank is in, the default group first; none without a DeviceMesh."""
        if self.device_mesh is None:
            return []
        # The flattened axes have groups that are in none of the axes.
        groups = itertools.chain(self.device_mesh.get_all_groups(), self.fsdp.get_all_groups())
        if (stage_group := vars(self).get("stage_group")) is not None:  # only if it is in use
            groups = itertools.chain(groups, [stage_group])
        if (experts := vars(self).get("experts")) is not None:
            groups = itertools.chain(groups, experts.get_all_groups())
        assert dist.group.WORLD is not None
        return list(dict.fromkeys([dist.group.WORLD, *groups]))


ALONE = Mesh(Degrees(1, 1, 1, 1, 1), 0, None)


def build_mesh(
    parallelism: Parallelism,
    device_type: str,
    rank: int,
    world_size: int,
    always: bool = False,
    same_bits: bool = False,
) -> Mesh:
    """The mesh of a job; collective over all ranks. `always`: make a DeviceMesh even for a single process."""
    degrees = parallelism.degrees(world_size)
    if world_size == 1 and not always:
        return Mesh(degrees, rank, None)
    axes = {axis: size for axis, size in degrees._asdict().items() if size > 1 or axis == "dp_shard"}
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if degrees.cp > 1:
        flatten_mesh(mesh["dp_shard", "cp"], DP_SHARD_AND_CP)
    return Mesh(degrees, rank, mesh, parallelism.expert_parallel_degree, same_bits)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replica_group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard of a DTensor, one per copy of the model (HSDP), in the order of the
    copies. None if there is one copy, or if the group cannot send tensors from where the shard is."""
    if not isinstance(tensor, DTensor) or tensor.device.type != tensor.device_mesh.device_type:
        return None
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    if REPLICAS not in names or not tensor.placements[names.index(REPLICAS)].is_replicate():
        return None
    group = mesh.get_group(REPLICAS)
    return group if group.size() > 1 else None


def plain_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a plain tensor, also of weights that FSDP gathers in float8. Shares memory with
    `tensor`."""
    return plain_tensor(local_shard(tensor))


def num_ranks_and_copies(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of ranks that hold a shard or a copy of the tensor, and the number of copies of each shard:
    a sum over ranks counts a shard that often."""
    if not isinstance(tensor, DTensor):
        return 1, 1
    mesh = tensor.device_mesh
    return mesh.size(), math.prod(mesh.size(i) for i, p in enumerate(tensor.placements) if p.is_replicate())


def local_shard_and_offsets(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's shard of a tensor, and the index in the full tensor at which the shard begins, per dim."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    return tensor.to_local(), local_offsets(tensor)
