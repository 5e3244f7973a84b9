"""One digest of the weights, and one of the whole state of a run, that does not depend on the layout.

It is a tree of SHA-256: over the cells of a tensor, which no data-parallel layout cuts, over the tensor with
its name, dtype and shape, and over all tensors in the order of their names. A cell is a row, or, for tensors
with three dims, a row of a row: FSDP shards experts along their second dim. Cells of up to 32 bytes, such as
the elements of norms, are not hashed but stand for themselves. Each rank hashes its own shards.

The state has the steps that an optimizer counts, and nothing else of steps, sequences and times."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlite.checkpoint.reader import read_metadata, read_tensor

HASH_BYTES = 32


class HashedShard(NamedTuple):
    """The hashes of the cells of a shard, uint8 [*cells along each dim, 32], or, for cells of at most 32
    bytes, the cells themselves. `name`: DCP's name of the tensor, such as `model.norm.weight`. `shape`: of
    the whole tensor. `offsets`: of the shard's cells."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    hashes: np.ndarray


def hash_shard(
    name: str, tensor: torch.Tensor, shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None
) -> HashedShard | None:
    """Hash the cells of a shard on the host. `shape`: of the whole tensor; None: `tensor` is whole. Returns
    None for a shard that cuts cells, as tensor parallel makes them."""
    shape = tuple(tensor.shape if shape is None else shape)
    offsets = tuple([0] * len(shape) if offsets is None else offsets)
    dims = _cell_dims(len(shape))
    if tuple(tensor.shape[dims:]) != shape[dims:]:
        return None
    size = math.prod(shape[dims:]) * tensor.itemsize
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    if size <= HASH_BYTES:
        cells = data.tobytes()
    else:
        cells = b"".join(hashlib.sha256(data[i : i + size]).digest() for i in range(0, len(data), size))
    hashes = np.frombuffer(cells, np.uint8).reshape(*tensor.shape[:dims], min(size, HASH_BYTES))
    return HashedShard(name, str(tensor.dtype), shape, offsets[:dims], hashes)


def _cell_dims(ndim: int) -> int:
    """The leading dims along which a tensor consists of cells."""
    return min(max(ndim - 1, 1), 2, ndim)


def tensor_digests(shards: Iterable[HashedShard]) -> dict[str, str]:
    """The digest of each whole tensor by name, from all of its shards."""
    grids = dict[str, np.ndarray]()
    headers = dict[str, str]()
    for name, dtype, shape, offsets, hashes in shards:
        if name not in grids:
            grids[name] = np.zeros((*shape[: _cell_dims(len(shape))], hashes.shape[-1]), np.uint8)
            headers[name] = f"{name} {dtype} {shape}\n"
        grids[name][tuple(slice(o, o + n) for o, n in zip(offsets, hashes.shape))] = hashes
    return {
        name: hashlib.sha256(headers[name].encode() + grid.tobytes()).hexdigest()
        for name, grid in sorted(grids.items())
    }


def combine(digests: Mapping[str, str]) -> dict[str, str]:
    """`weights` and `state`: the digests of all weights and of all tensors, from the digests of tensors."""
    lines = {name: f"{name} {digest}\n" for name, digest in sorted(digests.items())}
    weights = "".join(line for name, line in lines.items() if name.startswith("model."))
    texts = {"weights": weights, "state": "".join(lines.values())}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


def digests_of_checkpoint(path: PurePath) -> dict[str, str]:
    """The digest of each tensor of a checkpoint, which are read one after the other."""
    metadata = read_metadata(path)

    def shards() -> Iterator[HashedShard]:
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                shard = hash_shard(name, read_tensor(path, name, metadata))
                assert shard is not None, "a whole tensor cuts no cell"
                yield shard

    return tensor_digests(shards())
