"""The stream `huggingface`: a dataset of the Hugging Face hub that is read while it is downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from titanlite.config import toml
from titanlite.config.paths import PathText
from titanlite.corpus.hub import COMMIT, HubSplit, commit_of, data_files, hub_errors, open_builder
from titanlite.data.stream_source import Document, DocumentStream


@dataclass(frozen=True, kw_only=True)
class HuggingFace(HubSplit, DocumentStream, name="huggingface"):
    """A dataset of the Hugging Face hub in streaming mode, in any format that the `datasets` library
    streams."""

    path: PathText
    """Name on the hub, or directory of a dataset's files."""

    @cached_property
    def _builder(self) -> Any:
        """The dataset's builder. It asks the hub for the files once, also for the loader workers."""
        return open_builder(self.path, self)

    def build(self) -> Iterable[Document]:
        builder = self._builder
        with hub_errors(self.path):
            dataset = builder.as_streaming_dataset(self.split)
            if dataset.features:  # the types of the columns are known
                dataset = dataset.decode(False)  # images and sounds stay bytes
            files = (builder.config.data_files or {}).get(self.split, ())
            return _HubStream(self.path, dataset, frozenset(map(str, files)))

    def pinned(self) -> HuggingFace:
        return replace(self, revision=commit_of(data_files(self.path, self)) or self.revision)

    def fingerprint(self) -> str:
        if COMMIT.fullmatch(self.revision) and not os.path.isdir(self.path):
            return super().fingerprint()  # a commit never changes, and the hub may be unreachable now
        files = data_files(self.path, self)  # with the commit, if on the hub
        sizes = [os.stat(file).st_size if os.path.exists(file) else 0 for file in files]
        return repr((toml.as_tree(self), files, sizes))


class _HubStream:
    """A streamed Hugging Face dataset whose errors are one line, with the file if it is one of `files`."""

    def __init__(self, path: str, dataset: Any, files: frozenset[str]):
        self._path, self._dataset, self._files = path, dataset, files
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Document]:
        # In a loader worker, `iter(dataset)` would deal out the files once more, by the worker's number.
        with hub_errors(self._path, self._files):
            for batch in self._dataset.iter(batch_size=1):
                yield {column: values[0] for column, values in batch.items()}

    @property
    def num_shards(self) -> int:
        return self._dataset.num_shards

    def shard(self, num_shards: int, index: int) -> _HubStream:
        with hub_errors(self._path):
            dataset = self._dataset.shard(num_shards=num_shards, index=index)
            return _HubStream(self._path, dataset, self._files)
