"""Replacements, on torch 2.11 to 2.13, for functions of torch 2.14 that torchtitan 0.3.0 calls. Each is made
only where torch lacks the function; none touches the model's code, a compiled region or a kernel.

Two of them can change the time or the numbers of a step. On several GPUs, the last norm's few KB are
gathered apart from the head, and the backward is spared the head's second all-gather, which torch 2.14 makes
for the group. With tied embeddings, the gradients of the loss's chunks add up in bf16, where torch 2.14 adds
them in fp32; the collectives are the same.

Not possible before torch 2.14: expert parallelism, and tensor parallelism with the release's default backend,
spmd_types (`--parallelism.spmd_backend partial_dtensor` does it).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.attention import flex_attention as flex
from torch.utils import _pytree as pytree

# FSDP of torch 2.14 knows the annotations of spmd_types and torch.distributed.set_timeout; 2.13 has only
# one of the two.
NATIVE = hasattr(torch.distributed, "set_timeout") and hasattr(fsdp, "DataParallelMeshDims")
# FSDP groups of which one forward runs only a part, such as [norm, lm_head] with a chunked loss.
PARTIAL_GROUPS = hasattr(FSDPState, "_force_complete_incomplete_states")
LIFTS_MASK_TENSORS = hasattr(flex, "_extract_callable_pytree")
SEPARATES_FULL_BLOCKS = "separate_full_blocks" in inspect.signature(flex.create_block_mask).parameters


@dataclasses.dataclass
class DataParallelMeshDims:
    """The fields that torchtitan fills and `plain_fsdp` reads."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


def before_import() -> list[str]:
    """Make the changes that importing torchtitan needs. Returns a description of each."""
    changes = []
    if not hasattr(torch.distributed, "set_timeout"):
        from torch.distributed.distributed_c10d import _set_pg_timeout

        torch.distributed.set_timeout = _set_pg_timeout
        changes.append("set_timeout is _set_pg_timeout")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = DataParallelMeshDims
        changes.append("DataParallelMeshDims has its two fields")
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):
        torch.compiler._is_non_strict_tracing = lambda: False
        changes.append("_is_non_strict_tracing is False")
    return changes


def after_import() -> list[str]:
    """Make the changes to torchtitan itself. Returns a description of each."""
    changes = []
    if not NATIVE:
        plain_fsdp()
        changes.append("fully_shard takes a mesh whose dimensions are all sharded")
    if not PARTIAL_GROUPS:
        split_groups()
        changes.append("norm and head are two FSDP groups, tied embeddings belong to the root")
    if not SEPARATES_FULL_BLOCKS:
        drop_separate_full_blocks()
        changes.append("create_block_mask always separates full blocks")
    if not LIFTS_MASK_TENSORS:
        flex.BlockMask._flatten, flex.BlockMask._unflatten = flatten_mask, unflatten_mask
        changes.append("tensors of mask functions are inputs of the CUDA graph")
    return changes


def plain_fsdp() -> None:
    """Let fully_shard take `dp_mesh_dims`, which names the data-parallel dimensions of a mesh, where all of
    the mesh's dimensions are sharded: that is plain FSDP over the flattened mesh."""
    from torchtitan.distributed import fsdp as titan

    original = titan.fully_shard

    @functools.wraps(original)
    def fully_shard(module: Any, *, mesh: Any, dp_mesh_dims: Any = None, **options: Any) -> Any:
        if dp_mesh_dims is not None:
            sharded = dp_mesh_dims.shard if isinstance(dp_mesh_dims.shard, tuple) else (dp_mesh_dims.shard,)
            if tuple(mesh.mesh_dim_names) != sharded:
                raise NotImplementedError(
                    f"torch {torch.__version__} cannot shard over {sharded} of {mesh.mesh_dim_names} with "
                    "spmd_types: pass --parallelism.spmd_backend partial_dtensor"
                )
            if len(sharded) > 1:
                mesh = mesh._flatten()  # the same mesh each time: torch keeps it
        return original(module, mesh=mesh, **options)

    titan.fully_shard = fully_shard


def split_groups() -> None:
    """Shard the modules of a group separately. Before torch 2.13 a group's hooks fire only when all of its
    modules ran in one forward. torchtitan shards [norm, lm_head] as one group and runs the head eight times
    in the loss, so the norm's backward would find its weight freed. [tok_embeddings, norm, lm_head] with tied
    embeddings cannot be split and is left to the root, which keeps its parameters gathered until the end of
    the backward."""
    from torchtitan.distributed import fsdp as titan

    original = titan.fully_shard

    @functools.wraps(original)
    def fully_shard(module: Any, **options: Any) -> Any:
        if not isinstance(module, list):
            return original(module, **options)
        if len(module) == 2:
            norm, head = module
            original(norm, **options)
            original(head, **options)
            norm.set_modules_to_forward_prefetch([head])
        return module

    titan.fully_shard = fully_shard


def drop_separate_full_blocks() -> None:
    """Let create_block_mask take `separate_full_blocks=True`, which is what older versions always do."""
    from torchtitan.models.common import attention

    compiled = attention._compiled_create_block_mask

    def create(*args: Any, separate_full_blocks: bool = True, **options: Any) -> Any:
        if not separate_full_blocks:
            raise NotImplementedError("separate_full_blocks=False needs a newer torch")
        return compiled(*args, **options)

    attention._compiled_create_block_mask = create


@dataclasses.dataclass
class Hollow:
    """A function without the tensors of its closure. Equal to another that was made by the same code and
    whose closure has the same other values: torchtitan compares them in each step, where each mask has a new
    function."""

    function: FunctionType
    spec: Any
    values: list[Any]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Hollow)
            and self.function.__code__ is other.function.__code__
            and self.spec == other.spec
            and self.values == other.values
        )


def hollow(function: FunctionType) -> tuple[list[torch.Tensor], Hollow]:
    """Return the tensors in a function's closure, those of functions in it included, and what is left."""
    leaves, spec = pytree.tree_flatten(tuple(cell.cell_contents for cell in function.__closure__ or ()))
    tensors: list[torch.Tensor] = []
    values: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            values.append(torch.Tensor)
        elif inspect.isfunction(leaf):
            inner, left = hollow(leaf)
            tensors += inner
            values.append(left)
        else:
            values.append(leaf)
    return tensors, Hollow(function, spec, values)


def fill(left: Hollow, tensors: Iterator[torch.Tensor]) -> Callable[..., Any]:
    """The inverse of `hollow`. Takes the tensors from an iterator."""
    leaves = []
    for value in left.values:
        if value is torch.Tensor:
            value = next(tensors)
        elif isinstance(value, Hollow):
            value = fill(value, tensors)
        leaves.append(value)
    old = left.function
    if not old.__closure__:
        return old
    cell = CellType
    cells = tuple(cell(content) for content in pytree.tree_unflatten(leaves, left.spec))
    new = FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, cells)
    new.__kwdefaults__ = old.__kwdefaults__
    new.__dict__.update(old.__dict__)
    return new


def flatten_mask(mask: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """BlockMask._flatten, whose leaves include the tensors of the mask function."""
    tensors, left = hollow(mask.mask_mod)
    blocks = [getattr(mask, name) for name in mask._TENSOR_ATTRS]
    return (*blocks, *tensors), (mask.seq_lengths, mask.BLOCK_SIZE, left)


def unflatten_mask(leaves: tuple[Any, ...], context: tuple[Any, ...]) -> Any:
    """BlockMask._unflatten, the inverse of `flatten_mask`."""
    names = flex.BlockMask._TENSOR_ATTRS
    seq_lengths, block_size, left = context
    blocks = dict(zip(names, leaves))
    mask_mod = fill(left, iter(leaves[len(names) :]))
    return flex.BlockMask(seq_lengths=seq_lengths, BLOCK_SIZE=block_size, mask_mod=mask_mod, **blocks)
