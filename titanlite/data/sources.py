"""Source: the contract of data sources, which `[[data.sources]]` selects, and the source `tokens`,
whose files hold token ids. StreamedSource: the contract of the source `stream`.

A source returns ShardedTokens, a dataset on disk. Everything after that is the same for all sources: packing
numbers the sequences of the shards, and the data order is a function of these numbers. So a source must be
finite and have a fixed content, whose hash (ShardedTokens.fingerprint) belongs to the run's identity.
DocumentSource (corpus/document_source.py) makes shards of the documents of any iterable.

A streamed source has no shards: its documents can only be read in their order. So its sequences depend on the
numbers of ranks and loader workers that share the documents, and much that needs numbered sequences is
refused (stream_sequences.py)."""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from titanlite.config.component import Component, ConfigError, label
from titanlite.config.paths import PathText
from titanlite.data.sharded_tokens import ShardedTokens
from titanlite.data.shards import TokenShards
from titanlite.tokenizers.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Source(Component, makes=(ShardedTokens,)):
    """Base of sources: `[[data.sources]] name = "..."` selects a subclass by its name.

    A subclass implements `build`. To train on documents from Python code, subclass DocumentSource instead,
    which needs two simpler methods. Keys of ConfigErrors are relative to the source, such as `path`.
    `uses_cache`: whether `build` may write to the cache."""

    uses_cache = True

    weight: float = 1.0
    """Share of the training sequences, relative to all weights. 0: read only in stages that give a weight."""
    max_epochs: float = 0.0
    """Epochs of this source that a run may take; 0: no limit."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1e9:
            raise ConfigError(
                f"{self.weight} is not in [0, 1e9]; to exclude a source, delete its table",
                "weight",
            )
        if not 0 <= self.max_epochs < float("inf"):
            raise ConfigError(f"{self.max_epochs} is below 0 or not finite", "max_epochs")

    @abstractmethod
    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> ShardedTokens:
        """Return the source's token shards, encoded with `tokenizer`. A source may cache them in `cache_dir`.

        Rank 0 calls this method first; all other ranks call it afterwards and should use the cached shards.
        The same content must give the same shards. Raises ConfigError for missing, unreadable or empty input.
        """

    def check(self, tokenizer: Tokenizer) -> bool:
        """Raise ConfigError for missing or wrong input, without reading all of the input. Returns True if
        `build` would only open files and tokenise nothing."""
        return False


class StreamedSource(Source):
    """Base of sources whose documents can only be read in their order, from the first one on."""

    only = "sources"  # not validation_sources
    uses_cache = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_epochs:
            raise ConfigError("the epochs of a stream are not counted; limit training.steps", "max_epochs")

    @property
    @abstractmethod
    def max_documents(self) -> int:
        """Number of documents after which the stream begins again; 0: it is read to its end."""

    @property
    def skips_bad_documents(self) -> bool:
        """Whether documents without text are skipped and counted; otherwise they end the run."""
        return False

    def pinned(self, recorded: Mapping[str, Any]) -> StreamedSource:
        """Return a source that reads today's documents at any later time, such as one that names the newest
        commit; by default, this source. `recorded`: the keys of the pinned source of the run that is resumed,
        whose documents it reads if its keys allow; {} for a new run."""
        return self

    @abstractmethod
    def documents(self) -> Iterable[Any]:
        """Return the documents from the first one on, the same in the same order at every call. Raises
        ConfigError for missing or unreadable input.

        If the iterable has the methods `state_dict()`, which returns JSON, and `load_state_dict(state)`, a
        resumed run continues at once; any other iterable is read again from the beginning. If it has
        `num_shards` and `shard(num_shards, index)`, which returns an iterable over a part of the documents,
        the ranks and loader workers read a part each if the parts are alike (has_own_shards in
        stream_batches.py); otherwise each reads all documents and uses its own."""

    @abstractmethod
    def text(self, document: Any, place: str) -> str:
        """Return the text of a document. `place`: names the document in messages. Raises ConfigError if the
        document has no text."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short hash that changes whenever the documents change."""

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> ShardedTokens:
        raise ConfigError("a stream can only be trained on, as the only one of data.sources", "name")


def short_names(sources: Sequence[Source]) -> list[str]:
    """A short name of each source, different from all others, of letters, digits, dots, dashes and
    underscores: as many of the last components of its first path as tell it from the other sources."""
    paths = [getattr(source, "path", "") or source.name for source in sources]
    parts = [PurePath(str(path[0] if isinstance(path, (list, tuple)) else path)).parts for path in paths]
    names: list[str] = []
    for own in parts:
        length = 1
        while length < len(own) and sum(other[-length:] == own[-length:] for other in parts) > 1:
            length += 1
        name = re.sub(r"[^\w.-]", "_", "_".join(own[-length:]), flags=re.ASCII)
        numbered = (f"{name}-{i}" for i in itertools.count(2))
        names.append(name if name not in names else next(n for n in numbered if n not in names))
    return names


@dataclass(frozen=True, kw_only=True)
class Tokens(Source, name="tokens"):
    """A dataset directory made by `titanlite prepare` or by `write_shards`."""

    path: PathText
    """The directory with dataset.json."""
    uses_cache = False

    def check(self, tokenizer: Tokenizer) -> bool:
        self.build(tokenizer, Path())
        return True

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        shards = TokenShards(self.path)
        if shards.tokenizer_fingerprint != tokenizer.fingerprint:
            recorded = shards.prepared.get("tokenizer")
            made_with = label(str(recorded["name"]), str(recorded.get("path", ""))) if recorded else ""
            job_tokenizer = tokenizer.config.label if tokenizer.config else ""
            raise ConfigError(
                f"{self.path} was made with tokenizer {made_with} ({shards.tokenizer_fingerprint}), but "
                f"this job's tokenizer is {job_tokenizer} ({tokenizer.fingerprint}): use the same "
                "[tokenizer], or prepare the data again"
            )
        if shards.vocab_size != tokenizer.vocab_size:
            raise ConfigError(
                f"{self.path}/dataset.json says vocab_size {shards.vocab_size}, its tokenizer has "
                f"{tokenizer.vocab_size}: the file is damaged; prepare the data again"
            )
        return shards
