"""Sources: where sequences come from. Whatever a source reads, what it gives is TokenShards.

`tokens` opens shards made by `titanlite prepare`. `text` and `python_stdlib` tokenise on first use into a
cache whose key is the content and the tokenizer, so an edited file or another tokenizer never meets old
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titanlite.config.component import Component, ConfigError, label
from titanlite.data.shards import TokenShards
from titanlite.tokenizers.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Source(Component):
    """Kind: `[[data.sources]] name = ...`. Keys of its ConfigErrors are its own, such as `path`."""

    weight: float = 1.0
    """Share of the training tokens that come from here, relative to the other sources' weights."""
    max_epochs: float = 0.0
    """How often the run may pass through the source, at most; 0: without limit."""

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1e9:
            raise ConfigError(
                f"{self.weight} is not above 0 and finite (up to 1e9); to leave a source out, delete it",
                "weight",
            )
        if not 0 <= self.max_epochs < float("inf"):
            raise ConfigError(f"{self.max_epochs} is below 0, or not finite", "max_epochs")

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        """The source's tokens. Raises ConfigError for missing, unreadable or empty input."""
        raise NotImplementedError

    def check(self, tokenizer: Tokenizer) -> bool:
        """Raises ConfigError for input that can be seen to be missing or wrong without reading all of it.
        Returns whether `build` only opens files and tokenises nothing."""
        return False


@dataclass(frozen=True, kw_only=True)
class Tokens(Source, name="tokens"):
    """A directory of shards made by `titanlite prepare`."""

    path: str
    """The directory that holds dataset.json."""

    def check(self, tokenizer: Tokenizer) -> bool:
        self.build(tokenizer, Path())
        return True

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> TokenShards:
        shards = TokenShards(self.path)
        if shards.tokenizer != tokenizer.fingerprint:
            made, ours = shards.prepared.get("tokenizer"), tokenizer.config.label if tokenizer.config else ""
            theirs = label(str(made["name"]), str(made.get("path", ""))) if made else ""
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
