"""A tokenizer from outside the package: one id per character of a given alphabet. To use it, put this file
into the current directory or install it, and write

    [job]
    imports = ["character_tokenizer"]

    [tokenizer]
    name = "characters"
    alphabet = "0123456789+= "

    [model.overrides]
    vocab_size = 16          # at least the alphabet, BOS, EOS and the id of unknown characters
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.config.component import ConfigError
from titanlite.tokenizers.base import Tokenizer, TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class Characters(TokenizerConfig, name="characters"):
    """One id per character. Characters outside the alphabet share one id."""

    alphabet: str = "abcdefghijklmnopqrstuvwxyz .,"
    """Characters that have an id."""

    def __post_init__(self) -> None:
        if len(set(self.alphabet)) < max(len(self.alphabet), 1):
            raise ConfigError(f"{self.alphabet!r} is empty, or has a character twice", "alphabet")

    def build(self) -> Tokenizer:
        return CharacterTokenizer(self)


class CharacterTokenizer(Tokenizer):
    """Ids: the alphabet, the unknown character, BOS, EOS."""

    def __init__(self, config: Characters):
        self.config = config
        self.alphabet = config.alphabet + "\N{REPLACEMENT CHARACTER}"
        self.ids = {character: i for i, character in enumerate(self.alphabet)}
        self.unknown, self.bos, self.eos = len(self.alphabet) - 1, len(self.alphabet), len(self.alphabet) + 1
        self.vocab_size = self.eos + 1
        # Equal fingerprints must mean equal ids: data and checkpoints are compared by them.
        self.fingerprint = hashlib.sha256(f"characters {config.alphabet}".encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(character, self.unknown) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[i] for i in ids if i < len(self.alphabet))
