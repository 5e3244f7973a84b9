"""DCP's writer, made safe: each file is hashed as it is written, flushed before it is synced, and never
written over; an error in any thread fails the save; every planned tensor must have been written.

torch's own writer loses errors of its side threads (pytorch issue 191391), syncs `.metadata` before it
flushes it, and does not count what was written. The files are DCP's own: plain DCP reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import FileDigest, HashingFile
from titanlite.files import sync
from titanlite.torch_compat import storage_info

FILE_BYTES = 2 << 30  # a rank's shards are cut into files of about this size, which are hashed in parallel
MAX_FILES = 8  # of one rank
THREADS = 4  # of one rank; the rest of the cores feed the devices


class HashingFileSystem(FileSystem):
    """Records the digest of each file that is written, by name."""

    def __init__(self) -> None:
        self.files: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = HashingFile(Path(path))
        try:
            yield file
        finally:
            file.close()
        self.files[Path(path).name] = file.digest()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class ShardWriter(FileSystemWriter):
    """Writes this rank's shards into `path`; `files` has the digests of what this rank wrote."""

    fs: HashingFileSystem
    path: Path

    def __init__(self, path: Path):
        super().__init__(path, overwrite=False)
        self.fs = HashingFileSystem()
        self._planned: set[Any] = set()

    @property
    def files(self) -> dict[str, FileDigest]:
        """Of this rank, by name."""
        return self.fs.files

    def storage_meta(self) -> StorageMeta:
        """Nothing of its own: the same state gives the same bytes, wherever it is written."""
        return StorageMeta()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: remember what the ranks are about to write."""
        self._planned = {item.index for plan in plans for item in plan.items}
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; raises what any thread raised."""
        named = [
            (f"{plan.storage_data.prefix}{i}.distcp", items) for i, items in enumerate(_files(plan.items))
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            results = list(pool.map(lambda file: self.write_file(file[0], file[1], planner), named))
        sync(self.path)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for of in results for result in of])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: `.metadata`, once every planned item has been written."""
        written = {result.index for of in results for result in of}
        if missing := self._planned - written:
            raise CheckpointError(
                f"{len(missing)} tensors were not written, {next(iter(missing)).fqn} is one"
            )
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                entry.properties.pin_memory = False  # true of a copy in pinned memory, not of the tensor
        super().finish(metadata, results)

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Write items one after another into a new file. Several threads call it, for different files."""
        results = []
        with self.fs.create_stream(self.path / name, "wb") as stream:
            for item in items:
                offset = stream.size
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                write_tensor(tensor, stream)
                length = stream.size - offset
                results.append(WriteResult(item.index, length, storage_info(name, offset, length)))
            os.fsync(stream.fileno())
        return results


def write_tensor(tensor: torch.Tensor, stream: Any) -> None:
    """Append a tensor to a file, as DCP does: each is a torch.save of its own."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().size() != tensor.nbytes:  # torch.save would write all of the storage
        tensor = tensor.clone()
    try:
        torch.save(tensor, stream)
    except RuntimeError as e:  # torch's complaint about the archive, when the disk had complained first
        raise e.__context__ if isinstance(e.__context__, OSError) else e from None


def _files(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Items in files of about equal size, the largest item first to the smallest file."""
    sizes = [_bytes(item) for item in items]
    count = max(1, min(MAX_FILES, -(-sum(sizes) // FILE_BYTES)))
    files: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for size, item in sorted(zip(sizes, items), key=lambda pair: -pair[0]):
        smallest = filled.index(min(filled))
        files[smallest].append(item)
        filled[smallest] += size
    return files


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor: it belongs in train.json"
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize
