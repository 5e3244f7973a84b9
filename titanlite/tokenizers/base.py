"""Tokenizers: text to token ids and back, with one fingerprint that data and checkpoints are checked against.

Text is only text: a special token's spelling inside a document is encoded as ordinary characters, unless
`special_tokens_in_text` asks for the token. `encode_documents` frames each document as BOS ... EOS (BOS
alone, where they are the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.component import Component, ConfigError
from titanlite.config.shipped import find_file
from titanlite.files import if_on_hub, read_regular

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


class Tokenizer:
    """What `TokenizerConfig.build()` returns.

    `vocab_size`: ids are 0 .. vocab_size - 1. `fingerprint`: 16 hex digits; where they are equal,
    every text gets the same ids. `bos`, `eos`: ids that frame a document. `stop_ids`: ids that end a text
    which is generated: `eos`, and the others that the model's own files name.
    """

    vocab_size: int
    fingerprint: str
    bos: int
    eos: int
    config: TokenizerConfig | None = None  # what it was built from

    @property
    def stop_ids(self) -> set[int]:
        found = self.generation_config()["eos_token_id"]
        return {self.eos, *(found if isinstance(found, list) else [found])}

    def model_ids(self) -> dict[str, Any]:
        """The special ids in Hugging Face's config.json; None for a BOS that the tokenizer does not have."""
        return {"bos_token_id": self.bos, "eos_token_id": self.eos}

    def generation_config(self) -> dict[str, Any]:
        """The content of Hugging Face's generation_config.json: special ids, and defaults of sampling."""
        return self.model_ids()

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without BOS or EOS."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        raise NotImplementedError

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each text framed as BOS ids EOS: uint32 [n]. BOS == EOS is written once, in front."""
        end = [] if self.bos == self.eos else [self.eos]
        encoded = self._encode_batch(texts)
        return [np.concatenate([[self.bos], ids, end], dtype=np.uint32, casting="unsafe") for ids in encoded]

    def hugging_face_files(self) -> dict[str, bytes]:
        """The files, by name, that `AutoTokenizer.from_pretrained` makes this tokenizer from. Raises
        ConfigError if there is no such form."""
        raise ConfigError(
            f"{type(self.config).__name__} has no form that transformers reads", "tokenizer.name"
        )

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(self.encode(text), dtype=np.uint32) for text in texts]


class TokenizerConfig(Component, kind="tokenizer"):
    """Kind: `[tokenizer] name = ...`."""

    def build(self) -> Tokenizer:
        """Load it. Raises ConfigError if a file is missing or is not what it should be."""
        raise NotImplementedError


def read_bytes(path: str, key: str) -> bytes:
    """The file's bytes, or a ConfigError that says where it was looked for."""
    try:
        return read_regular(find_file(path))
    except (OSError, ValueError) as e:
        where = "" if Path(path).is_absolute() else f" (relative to {Path.cwd()})"
        fetch = if_on_hub(path) if isinstance(e, FileNotFoundError) else ""
        raise ConfigError(f"cannot read {path!r}{where}: {getattr(e, 'strerror', e)}{fetch}", key) from None
