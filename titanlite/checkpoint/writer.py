"""A safe variant of DCP's file writer.

Each file is hashed while it is written, flushed before it is synced, and never replaces another file. An
error in any thread fails the save, and every planned tensor must have been written. torch's own writer loses
errors of its threads (pytorch issue 191391), syncs `.metadata` before flushing it, and does not check that
all tensors were written. The files have DCP's format, so plain DCP reads them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint.commit import SHARD_SUFFIX, CheckpointError
from titanlite.checkpoint.digest import FileDigest
from titanlite.checkpoint.file_system import HashingFileSystem
from titanlite.checkpoint.state_digest import HashedShard, hash_shard
from titanlite.storage import storage_of
from titanlite.torch_compat import file_prefix, storage_info

FILE_BYTES = 2 << 30  # a rank's shards are distributed over files of about this size, hashed in parallel
MAX_FILES = 8  # per rank
THREADS = 4  # per rank; the remaining cores feed the devices


class ShardWriter(FileSystemWriter):
    """Writes this rank's shards into the directory `path`. `num_threads`: the number of files that are
    written at the same time. `hashes_state`: also hash the shards for a digest of the state."""

    fs: HashingFileSystem  # type: ignore[assignment]
    path: PurePath

    def __init__(self, path: PurePath, num_threads: int = THREADS, hashes_state: bool = False):
        super().__init__(path, overwrite=False, sync_files=False)  # HashingFileSystem syncs them
        self._num_threads = num_threads
        self.fs, self.path = HashingFileSystem(), path
        self._hashes_state = hashes_state
        self.hashed: list[HashedShard | None] = []
        """The hashes of the shards that this rank has written, if `hashes_state`."""

    @property
    def files(self) -> dict[str, FileDigest]:
        """Digests of the files that this rank has written, by name."""
        return self.fs.files

    def storage_meta(self) -> StorageMeta:
        """Empty metadata: DCP's own names the directory, so the same state would give other bytes there."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Raises the error of any thread."""
        files = _files(plan.items)
        names = [f"{file_prefix(plan)}{i}{SHARD_SUFFIX}" for i in range(len(files))]
        with ThreadPoolExecutor(self._num_threads) as pool:
            # Only the main thread ends at once when the process is interrupted.
            apply = pool.map if self._num_threads > 1 else map
            results = list(apply(lambda name, items: self.write_file(name, items, planner), names, files))
        storage_of(self.path).sync(self.path)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for by_file in results for result in by_file])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` after all ranks have written their items. Called on the coordinator rank. Raises
        CheckpointError if a planned item was not written."""
        missing = set[MetadataIndex]()
        entries = metadata.state_dict_metadata
        for name, entry in entries.items():
            if isinstance(entry, TensorStorageMetadata):
                # Only the copy that is written is in pinned memory. The plan of rank 0 has the same objects.
                entries[name] = replace(entry, properties=replace(entry.properties, pin_memory=False))
                missing |= {MetadataIndex(name, chunk.offsets) for chunk in entry.chunks}
        missing -= {result.index for by_rank in results for result in by_rank}
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors were not written, for example {next(iter(missing)).fqn}"
            )
        super().finish(metadata, results)

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Write `items` into the new file `name`. Called from several threads for different files."""
        results = []
        with self.fs.create_stream(self.path / name, "wb") as stream:
            for item in items:
                offset = stream.size
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                tensor = tensor.detach().cpu()
                write_tensor(tensor, stream)
                if self._hashes_state:
                    self.hashed.append(_hash(item, tensor))
                del tensor  # before the planner makes the next one
                length = stream.size - offset
                results.append(WriteResult(item.index, length, storage_info(name, offset, length)))
        return results


def _hash(item: WriteItem, tensor: torch.Tensor) -> HashedShard | None:
    data = item.tensor_data
    assert data is not None
    return hash_shard(item.index.fqn, tensor, data.size, data.chunk.offsets)


def write_tensor(tensor: torch.Tensor, stream: Any) -> None:
    """Append a tensor to a file with torch.save, as DCP does."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().size() != tensor.nbytes:  # torch.save would write the whole storage
        tensor = tensor.clone()
    try:
        torch.save(tensor, stream)
    except RuntimeError as e:  # torch reports the disk's OSError as an error of its archive
        raise e.__context__ if isinstance(e.__context__, OSError) else e from None


def _files(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Distribute items over files of about equal size: largest item first, each to the smallest file."""
    sizes = [_bytes(item) for item in items]
    num_files = max(1, min(MAX_FILES, -(-sum(sizes) // FILE_BYTES)))
    files: list[list[WriteItem]] = [[] for _ in range(num_files)]
    filled = [0] * num_files
    for size, item in sorted(zip(sizes, items), key=lambda pair: -pair[0]):
        smallest = filled.index(min(filled))
        files[smallest].append(item)
        filled[smallest] += size
    return files


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor; it belongs in train.json"
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize
