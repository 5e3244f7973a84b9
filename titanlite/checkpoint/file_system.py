"""DCP's access to the files of a checkpoint, which goes through the storage of their path."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from titanlite.checkpoint.digest import FileDigest, HashingFile, new_file
from titanlite.storage import storage_of


class HashingFileSystem(FileSystemBase):
    """Reads files, and writes new ones: each is synced when it is complete, and `files` has its digest."""

    def __init__(self) -> None:
        self.files: dict[str, FileDigest] = {}
        self._begun: list[HashingFile] = []

    @property
    def num_bytes(self) -> int:
        """Bytes written so far, with those of unfinished files, which a bucket does not show."""
        return sum(file.size for file in self._begun)

    def prepare(self, names: Callable[[], Collection[str]]) -> None:
        """Called on all ranks before they read. `names`: returns the names of the files that this rank will
        read."""

    def in_order(self, names: Collection[str]) -> Sequence[str]:
        """The names of files in the order in which they are read."""
        return list(names)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with storage_of(path).open(path) as stream:
                yield stream
            return
        with new_file(path) as file:
            self._begun.append(file)
            yield file
        self.files[path.name] = file.digest()

    def rename(self, path: Any, new_path: Any) -> None:
        storage_of(path).rename(path, new_path)
        self.files[new_path.name] = self.files.pop(path.name)

    def init_path(self, path: Any) -> PurePath:
        return path

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def mkdir(self, path: Any) -> None:
        storage_of(path).make_folder(path)

    def exists(self, path: Any) -> bool:
        return storage_of(path).exists(path)

    def rm_file(self, path: Any) -> None:
        storage_of(path).delete(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
