"""Source: the contract of what `[[data.sources]]` selects, and the source `tokens`.

A source returns TokenShards, a dataset on disk. Everything after that is the same for all sources: packing
numbers the sequences of the shards, and the data order is a function of these numbers. So a source must have
an end and a fixed content, whose hash (TokenShards.fingerprint) is part of the run's identity. A stream
without an end or without a fixed order is not a source; write the part of it that a run needs with
prepare/write_shards.py, or make it a DocumentSource (prepare/sources.py), which tokenises documents from any
iterable once and caches the shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titanlite.config.component import Component, ConfigError, label
from titanlite.data.shards import TokenShards
from titanlite.tokenizers.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Source(Component):
    """Base of sources: `[[data.sources]] name = "..."` selects a subclass by its name.

    A subclass implements `build`. To train on documents from Python code subclass DocumentSource instead,
    which implements `build` by two simpler methods. Keys of ConfigErrors are relative to the source, such as
    `path`."""

    weight: float = 1.0
    """Share of this source in the training tokens, relative to the weights of the other sources."""
    max_epochs: float = 0.0
    """Largest number of epochs of this source in a run; 0: no limit."""

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1e9:
            raise ConfigError(
                f"{self.weight} is not a number above 0, up to 1e9; to leave a source out, delete it",
                "weight",
            )
        if not 0 <= self.max_epochs < float("inf"):
            raise ConfigError(f"{self.max_epochs} is below 0 or not finite", "max_epochs")

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        """Return the source's token shards, encoded with `tokenizer`; they may be kept in `cache_dir`.

        Called on one rank first and then on the others, which should find what the first call made. The same
        content must give the same shards. Raises ConfigError for missing, unreadable or empty input.
        """
        raise NotImplementedError

    def check(self, tokenizer: Tokenizer) -> bool:
        """Raise ConfigError for input that is missing or wrong, as far as that is seen without reading all of
        it. Returns True if `build` would only open files and tokenise nothing."""
        return False


@dataclass(frozen=True, kw_only=True)
class Tokens(Source, name="tokens"):
    """A dataset directory made by `titanlite prepare` or by `write_shards`."""

    path: str
    """The dataset directory, which holds dataset.json."""

    def check(self, tokenizer: Tokenizer) -> bool:
        self.build(tokenizer, Path())
        return True

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        shards = TokenShards(self.path)
        if shards.tokenizer != tokenizer.fingerprint:
            made_with, ours = (
                shards.prepared.get("tokenizer"),
                tokenizer.config.label if tokenizer.config else "",
            )
            theirs = label(str(made_with["name"]), str(made_with.get("path", ""))) if made_with else ""
            raise ConfigError(
                f"{self.path} was made with tokenizer {theirs} ({shards.tokenizer}), this job's is {ours} "
                f"({tokenizer.fingerprint}): use the same [tokenizer], or prepare the data again"
            )
        if shards.vocab_size != tokenizer.vocab_size:
            raise ConfigError(
                f"{self.path}/dataset.json says vocab_size {shards.vocab_size}, its tokenizer has "
                f"{tokenizer.vocab_size}: the file is damaged; prepare the data again"
            )
        return shards
