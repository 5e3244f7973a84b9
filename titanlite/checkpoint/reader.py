"""Loading tensors from a checkpoint: strictly, in parallel, and without executing any of its contents.

DCP's `.metadata` is a pickle; it is read by an unpickler that allows the dozen names that DCP writes and
refuses every other name. The shards are read by torch.load with weights_only.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePath, PurePosixPath
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.futures import Future

from titanlite.checkpoint.commit import CheckpointError, Manifest, read_file
from titanlite.checkpoint.file_system import HashingFileSystem
from titanlite.checkpoint.state import Tensors, flattened, listed
from titanlite.files import FileFault
from titanlite.log import logger
from titanlite.mesh import local_shard, replica_group
from titanlite.optim.base import CLIP_NORM
from titanlite.ranks import Ranks
from titanlite.storage import storage_of

THREADS = 4  # each holds one tensor in host memory while it is copied to the device

ALLOWED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),  # DCP's own writer stores the path that it wrote to
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("pathlib._local", "PosixPath"):  # its name in Python 3.13
            return PurePosixPath
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint contains")
        return super().find_class(module, name)


def read_metadata(path: PurePath, manifest: Manifest | None = None) -> Metadata:
    """Read DCP's `.metadata` of the checkpoint at `path`, without executing code from the file. `manifest`:
    of the checkpoint, whose hash is checked. Raises Damaged if it differs, CheckpointError for a file that
    DCP has not written, or that names files outside the checkpoint."""
    file = path / ".metadata"
    try:
        data = storage_of(file).read(file) if manifest is None else read_file(path, file.name, manifest)
    except (FileFault, FileNotFoundError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from None
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        storage = metadata.storage_data.values() if isinstance(metadata, Metadata) else ()
        files = {info.relative_path for info in storage}
    except Exception as e:  # a damaged pickle may raise almost any error
        raise CheckpointError(f"{file} cannot be read: {type(e).__name__}: {e}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} is not DCP metadata but a {type(metadata).__name__}")
    if outside := [name for name in files if name != PurePath(name).name or name in ("", "..")]:
        raise CheckpointError(f"{file} points to {outside[0]!r}, which is outside the checkpoint")
    return metadata


class SafeReader(FileSystemReader):
    """DCP's file reader, with metadata from read_metadata(). Reads several files in parallel, through
    `files`."""

    def __init__(self, path: PurePath, metadata: Metadata, files: HashingFileSystem | None = None):
        super().__init__(path)
        self._files = files or HashingFileSystem()
        self.fs, self.path, self._metadata = self._files, path, metadata  # type: ignore[assignment]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read several files in parallel; DCP itself reads one after another, at 1.5 GB/s."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        read = super().read_data
        with ThreadPoolExecutor(THREADS) as pool:
            names = self._files.in_order(by_file)
            list(pool.map(lambda name: read(replace(plan, items=by_file[name]), planner), names))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_metadata(self) -> Metadata:
        """The metadata given to the constructor. Takes no keywords, because DCP would use one to ask for each
        rank's own metadata."""
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


class MisfitError(CheckpointError):
    """A checkpoint has other tensors than this job. `differences`: see misfits()."""

    def __init__(self, path: PurePath, differences: list[str]):
        super().__init__(f"{path} does not fit this job: {listed(differences, separator='; ')}")
        self.differences = differences


def load_tensors(
    path: PurePath,
    tensors: Tensors,
    ranks: Ranks | None = None,
    other_optimizer: bool = False,
    optional: Collection[str] = (),
    manifest: Manifest | None = None,
    files: HashingFileSystem | None = None,
) -> set[str]:
    """Load `{"model": {name: tensor}, ...}` in place from the checkpoint at `path`. Returns the names of the
    checkpoint's sections. Collective over `ranks`; None loads whole tensors in this process.

    `other_optimizer`: optimizer state that the checkpoint does not have in this form is set to zero.
    `optional`: sections that are left as they are if the checkpoint does not have them. `manifest`: see
    read_metadata. `files`: reads the shards. Raises MisfitError if a tensor is missing, unexpected, or has
    another shape or dtype, CheckpointError if the checkpoint cannot be read."""
    ranks = ranks or Ranks(path, alone=True)
    try:
        saved = ranks.from_rank_zero(lambda: read_metadata(path, manifest))
        sections = {name.partition(".")[0] for name in saved.state_dict_metadata}
        tensors = {name: t for name, t in tensors.items() if name in sections or name not in optional}
        if other_optimizer:
            tensors, saved = _without_new_state(tensors, saved, ranks)
        if differences := misfits(tensors, saved, ranks):
            raise MisfitError(path, differences)
        own, shared = partition_reads(tensors)
        if files is not None:
            files.prepare(lambda: _files_of(own, saved))
        _read(path, own, saved, ranks, files)
        for tensor, group, reader in shared:
            dist.broadcast(tensor, group=group, group_src=reader)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None
    return sections


def read_tensor(path: PurePath, name: str, metadata: Metadata) -> torch.Tensor:
    """A whole tensor of the checkpoint at `path`, by DCP's name. `metadata`: from read_metadata()."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    dcp_load(tensors, storage_reader=SafeReader(path, metadata), no_dist=True)
    return tensors[name]


class SharedRead(NamedTuple):
    """A local shard that every replica has and one of them reads. `reader`: its rank in `group`."""

    shard: torch.Tensor
    group: dist.ProcessGroup
    reader: int


def partition_reads(tensors: Tensors) -> tuple[Tensors, list[SharedRead]]:
    """The tensors that this rank reads, and the shards that replicas read for each other: every replica reads
    about the same number of bytes, so that the files are read once and not once per replica."""
    own: Tensors = {section: {} for section in tensors}
    shared, num_bytes = list[SharedRead](), dict[int, int]()
    for section, group in tensors.items():
        for name, tensor in group.items():
            replicas, shard = replica_group(tensor), local_shard(tensor)
            if replicas is None or not shard.is_contiguous():
                own[section][name] = tensor
                continue
            reader = min(range(replicas.size()), key=lambda rank: num_bytes.get(rank, 0))
            num_bytes[reader] = num_bytes.get(reader, 0) + shard.nbytes
            shared.append(SharedRead(shard, replicas, reader))
            if dist.get_rank(replicas) == reader:
                own[section][name] = tensor
    return {section: group for section, group in own.items() if group}, shared


def _files_of(tensors: Tensors, saved: Metadata) -> set[str]:
    """The names of the files that hold the local shards of `tensors`."""
    if not tensors:
        return set()
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, saved, is_coordinator=False)
    items = planner.create_local_plan().items
    return {saved.storage_data[item.storage_index].relative_path for item in items}


def _read(
    path: PurePath, tensors: Tensors, saved: Metadata, ranks: Ranks, files: HashingFileSystem | None
) -> None:
    """Read this rank's shards of `tensors`. Each rank makes its own plan: DCP would gather the plans of all
    ranks on rank 0, only to send them back as they are. Raises CheckpointError on all ranks if one of them
    cannot read."""
    problem: str | None = None
    try:
        if tensors:
            dcp_load(tensors, storage_reader=SafeReader(path, saved, files), no_dist=True)
    except CheckpointException as e:  # a BaseException that contains another error
        error, _ = next(iter(e.failures.values()))
        if not isinstance(error, Exception):  # KeyboardInterrupt
            raise error from None
        problem = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    if problem := ranks.first(problem):
        raise CheckpointError(f"{path} cannot be loaded: {problem}")


def _without_new_state(tensors: Tensors, saved: Metadata, ranks: Ranks) -> tuple[Tensors, Metadata]:
    """Set the optimizer state that the checkpoint cannot give to zero. Returns the remaining tensors, and the
    checkpoint's metadata without the optimizer state that is not loaded. Collective.

    The state of a parameter is loaded if the checkpoint has every tensor of it, with the same name, shape and
    dtype; otherwise all of it starts at zero: AdamW's `step`, for example, must not count steps that its
    moments have not seen. The clipper's `clip_norm`, which is not the optimizer's own, is left to misfits().
    """
    by_parameter: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    kept, fresh = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors["optimizer"].items():
        parameter, _, key = name.rpartition(".")
        (kept if key == CLIP_NORM else by_parameter[parameter])[name] = tensor
    for state in by_parameter.values():
        fits = all(_is_saved(f"optimizer.{name}", tensor, saved) for name, tensor in state.items())
        (kept if fits else fresh).update(state)
    for tensor in fresh.values():
        tensor.zero_()
    num_fresh, names = len(ranks.union(fresh)), {f"optimizer.{name}" for name in ranks.union(kept)}
    entries = saved.state_dict_metadata
    unused = {
        name
        for name in entries.keys() - names
        if name.startswith("optimizer.") and not name.endswith(f".{CLIP_NORM}")
    }
    if num_fresh or unused:
        ignored = ", ".join(sorted({name.rpartition(".")[2] for name in unused})) or "nothing"
        logger.info(
            f'checkpoint.allow_changed has "optimizer": of the optimizer\'s state, {len(names)} tensors are '
            f"loaded and {num_fresh} start at zero; ignored in the checkpoint: {ignored}"
        )
    tensors = {section: group for section, group in {**tensors, "optimizer": kept}.items() if group}
    saved = replace(saved, state_dict_metadata={k: v for k, v in entries.items() if k not in unused})
    return tensors, saved


def _is_saved(name: str, tensor: torch.Tensor, saved: Metadata) -> bool:
    """Whether the checkpoint has a tensor of this name, shape and dtype."""
    entry = saved.state_dict_metadata.get(name)
    return (
        isinstance(entry, TensorStorageMetadata)
        and tuple(entry.size) == tuple(tensor.shape)
        and entry.properties.dtype == tensor.dtype
    )


def misfits(tensors: Tensors, saved: Metadata, ranks: Ranks) -> list[str]:
    """The differences between the checkpoint's tensors and the tensors of all ranks, each as a phrase; the
    same list on all ranks. Pipeline ranks have different tensors. The check is needed because DCP ignores
    unexpected tensors and casts dtypes silently."""
    ours = flattened(tensors)
    names = ranks.union(ours)
    theirs = {k: v for k, v in saved.state_dict_metadata.items() if k.partition(".")[0] in tensors}
    differences = [f"{name} is missing" for name in ours if name not in theirs]
    differences += [f"{name} is unexpected" for name in theirs.keys() - set(names)]
    for name in ours.keys() & theirs.keys():
        entry, tensor = theirs[name], ours[name]
        if not isinstance(entry, TensorStorageMetadata):
            differences.append(f"{name} is not a tensor")
        elif tuple(entry.size) != tuple(tensor.shape):
            differences.append(f"{name} has shape {tuple(entry.size)}, the model's is {tuple(tensor.shape)}")
        elif entry.properties.dtype != tensor.dtype:
            differences.append(f"{name} is {entry.properties.dtype}, the model's is {tensor.dtype}")
    return ranks.union(differences)
