"""A data source from outside the package: a dataset of Hugging Face's library `datasets` (pip install
datasets), from the hub or from files. To use it, put this file into the current directory or install it, and
write

    [job]
    imports = ["datasets_source"]

    [[data.sources]]
    name = "datasets"
    path = "HuggingFaceFW/fineweb-edu"
    config = "sample-10BT"
    revision = "COMMIT"            # the dataset's commit on the hub: 40 hexadecimal digits
    max_documents = 1_000_000

The dataset is streamed: only documents that are read are downloaded, and tokenised into data.cache_dir by the
first run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.corpus.document_source import DocumentSource


@dataclass(frozen=True, kw_only=True)
class Datasets(DocumentSource, name="datasets"):
    """Documents that datasets.load_dataset yields."""

    path: str
    """Name on the hub, a local directory, or a format such as `json`."""
    revision: str
    """Commit of the dataset on the hub. For local data, any text: change it when the data changes."""
    config: str = ""
    """Configuration of the dataset; empty: its default."""
    split: str = "train"
    """Split to read."""
    data_files: str = ""
    """File or glob to read instead of all files."""
    field: str = "text"
    """Column that holds the text."""
    max_documents: int = 0
    """Documents to read, from the first one; 0: all."""

    def fingerprint(self) -> str:
        # The revision stands for the content, because reading all of it would mean downloading it.
        keys = (self.path, self.revision, self.config, self.split, self.data_files, self.field)
        return repr((*keys, self.max_documents))

    def documents(self) -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ConfigError("reading a dataset needs datasets: pip install datasets", "name") from None
        on_hub = {"revision": self.revision} if "/" in self.path else {}
        dataset: Any = load_dataset(
            self.path,
            self.config or None,
            split=self.split,
            data_files=self.data_files or None,
            streaming=True,
            **on_hub,
        )
        examples: Iterator[Mapping[str, Any]] = itertools.islice(dataset, self.max_documents or None)
        for example in examples:
            if self.field not in example:
                raise ConfigError(f"{self.path} has no column {self.field!r} ({', '.join(example)})", "field")
            yield example[self.field]
