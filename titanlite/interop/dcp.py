"""Reads slices of the tensors in a DCP checkpoint of titanlite or another program, without DCP's planner.

Each rank reads independently, with any dtype and with new names for the tensors. No code from the checkpoint
is executed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError, Damaged
from titanlite.checkpoint.digest import first_fault
from titanlite.checkpoint.find import find_checkpoint
from titanlite.checkpoint.reader import read_metadata
from titanlite.checkpoint.state import AVERAGE, TRAIN
from titanlite.config.component import ConfigError
from titanlite.interop.weights import Chunk, LazyTensor, Region, Weights
from titanlite.models.base import ModelFamily
from titanlite.torch_compat import file_view

MODEL = "model."  # prefix of the weights in a titanlite checkpoint


def is_foreign_dcp(path: Path) -> bool:
    """Return whether `path` is a DCP checkpoint of another program than titanlite."""
    return (path / ".metadata").exists() and not (path / commit.MANIFEST).exists()


def open_titanlite(path: Path, family: ModelFamily | None = None, average: bool = False) -> Weights:
    """Open the weights of a step folder, or of the newest checkpoint of a run. Raises CheckpointError if the
    checkpoint is damaged; the contents of its shards are not checked.

    `family`: the family of the recorded model, whose architecture is then read. `average`: open the average
    of the trained weights in place of the weights. Raises ConfigError if the checkpoint has none."""
    path = find_checkpoint(path)
    try:
        manifest = commit.read_manifest(path)
        metadata = read_metadata(path, manifest)
        identity = json.loads(commit.read_file(path, TRAIN, manifest))["identity"]
    except Damaged as e:
        raise commit.damaged(path, e) from None
    names = _names_in(metadata, MODEL)
    if average:
        averages = _names_in(metadata, f"{AVERAGE}.")
        if not averages:
            why = "it was saved with ema.enable = false, or is itself an average of checkpoints"
            raise ConfigError(f"{path} has no average of the weights: {why}")
        names |= averages
    architecture = _recorded(identity["model"], family, path) if family is not None else {}
    tokenizer = identity.get("data", {}).get("tokenizer", "")
    return Weights(path, "titanlite", stored_tensors(path, metadata, names), architecture, tokenizer)


def _names_in(metadata: Metadata, prefix: str) -> dict[str, str]:
    """The names with this prefix, by the names without it."""
    return {n.removeprefix(prefix): n for n in metadata.state_dict_metadata if n.startswith(prefix)}


def stored_tensors(path: Path, metadata: Metadata, names: Mapping[str, str]) -> dict[str, LazyTensor]:
    """Return tensors of a DCP checkpoint under new names. `names`: new name -> name in the checkpoint. Raises
    CheckpointError for an entry that is not a tensor."""
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    return {new: _stored(path, metadata, name, sizes) for new, name in names.items()}


def _stored(path: Path, metadata: Metadata, name: str, sizes: Mapping[str, int]) -> LazyTensor:
    try:
        entry = metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path}: {name} is not a tensor")
        chunks, file = [], path / ".metadata"
        for chunk in entry.chunks:
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            file = path / info.relative_path
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{file}: {name} is compressed, which is not supported")
            size = sizes.get(info.relative_path, 0)
            if size < info.offset + info.length:
                raise CheckpointError(f"{file} has {size:,} bytes and does not contain all of {name}")
            load = functools.partial(_load, file, name, info.offset, info.length)
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), load))
        return LazyTensor(tuple(entry.size), entry.properties.dtype, file, chunks)
    except (KeyError, TypeError, AttributeError) as e:  # valid pickle, but not written by DCP
        raise CheckpointError(f"{path}: .metadata is damaged: {type(e).__name__}: {e}") from None


def _load(file: Path, name: str, offset: int, length: int, region: Region) -> torch.Tensor:
    try:
        with open(file, "rb") as f:
            chunk = torch.load(file_view(f, offset, length), map_location="cpu", weights_only=True)
        return chunk[region]
    except Exception as e:  # torch.load of damaged bytes may raise almost any error
        reason = str(e).strip().partition("\n")[0]
        raise CheckpointError(f"{file}: {name} cannot be read: {type(e).__name__}: {reason}") from None


def _recorded(model: Mapping[str, Any], family: ModelFamily, path: Path) -> dict[str, Any]:
    """Return the architecture fields of the model in a run identity. Raises ConfigError if the model is of
    another family."""
    if model["name"] != family.name:
        raise ConfigError(f"{path} has a {model['name']} model, the job's model is {family.name}")
    fields = {f.name for f in dataclasses.fields(family.config)}
    known = {key: value for key, value in model.items() if key in fields}
    return dataclasses.replace(family, overrides=known).config.architecture_fields()


def non_finite_in(path: Path) -> list[str]:
    """Return the names of the tensors in a checkpoint, except scalars, that hold NaN or infinity. Reads all
    tensors, one chunk at a time. Raises CheckpointError for a tensor that cannot be read."""
    metadata = read_metadata(path)
    names = {n: n for n, entry in metadata.state_dict_metadata.items() if getattr(entry, "size", ())}
    bad = []
    for name, stored in stored_tensors(path, metadata, names).items():
        blocks = stored.row_blocks() if stored.dtype.is_floating_point else []
        if not all(stored.read(block).isfinite().all() for block in blocks):
            bad.append(name)
    return bad


def check_hashes(path: Path) -> None:
    """Hash every file of a titanlite checkpoint. Raises CheckpointError for a file that differs from its
    recorded hash."""
    if reason := first_fault(path, commit.digests(commit.read_manifest(path))):
        raise commit.damaged(path, reason)
