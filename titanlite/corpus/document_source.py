"""DocumentSource: the base of sources that make token shards from the documents of Python code."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path

from titanlite.config.component import ConfigError, full_name
from titanlite.corpus.write_shards import Document, write_shards
from titanlite.data.shards import TokenShards
from titanlite.data.text_sources import CachedSource
from titanlite.tokenizers.base import Tokenizer


class DocumentSource(CachedSource):
    """Base of sources that make token shards from documents: a generator, a database, a Hugging Face dataset.

    A subclass with a `name` implements two methods. `documents` yields the documents, and `fingerprint`
    identifies them. tests/examples/iterable_source.py is an example."""

    @abstractmethod
    def documents(self) -> Iterable[Document]:
        """Return the documents, in a form that `write_shards` accepts. The iterable must end, and have the
        same documents in the same order each time. Raises ConfigError for missing or unreadable input."""

    def write(self, path: Path, tokenizer: Tokenizer) -> TokenShards:
        documents = self.documents()
        if not isinstance(documents, Iterable):
            raise ConfigError(
                f"{full_name(type(self))}.documents returned {documents!r}; expected an iterable"
            )
        return write_shards(documents, path, tokenizer)
