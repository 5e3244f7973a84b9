"""Source: the contract of data sources, which `[[data.sources]]` selects, and the source `tokens`,
whose files hold token ids.

A source returns ShardedTokens, a dataset on disk. Everything after that is the same for all sources: packing
numbers the sequences of the shards, and the data order is a function of these numbers. So a source must be
finite and have a fixed content, whose hash (ShardedTokens.fingerprint) belongs to the run's identity.
DocumentSource (corpus/document_source.py) makes shards of the documents of any iterable."""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from titanlite.config.component import Component, ConfigError, label
from titanlite.config.paths import UrlText
from titanlite.data.remote_shards import open_tokens
from titanlite.data.sharded_tokens import ShardedTokens
from titanlite.data.shards import PreparedTokens
from titanlite.storage import parse_path
from titanlite.tokenizers.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Source(Component, makes=(ShardedTokens,)):
    """Base of sources: `[[data.sources]] name = "..."` selects a subclass by its name.

    A subclass implements `build`. To train on documents from Python code, subclass DocumentSource instead,
    which needs two simpler methods. Keys of ConfigErrors are relative to the source, such as `path`.
    """

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

    @property
    def uses_cache(self) -> bool:
        """Whether `build` may write to the cache."""
        return True

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

    path: UrlText
    """The directory with dataset.json, on this machine or as the URL of a storage, such as s3://bucket/corpus."""

    @property
    def uses_cache(self) -> bool:
        return not isinstance(parse_path(self.path, "path"), Path)

    def check(self, tokenizer: Tokenizer) -> bool:
        self.build(tokenizer, Path())
        return True

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> PreparedTokens:
        shards = open_tokens(self.path, cache_dir)
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
