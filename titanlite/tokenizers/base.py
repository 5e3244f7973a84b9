"""Tokenizer: converts text to token ids and back. Its fingerprint is recorded in datasets and checkpoints.

A special token's name inside a document is encoded as ordinary characters, unless `special_tokens_in_text` is
set. `encode_documents` frames each document by BOS and EOS, also if both are the same id: no target crosses
from one document to the next under document masks, so only a separate EOS teaches a model to end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from titanlite.config.component import Component, ConfigError, full_name
from titanlite.config.shipped import find_file
from titanlite.files import if_on_hub, read_regular
from titanlite.storage import storage_of
from titanlite.tokenizers.chat import ChatFormat

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


class Tokenizer:
    """Base of tokenizers, which TokenizerConfig.build returns. A subclass implements `encode` and `decode`
    and sets the attributes below. It must be picklable, because `titanlite prepare` sends it to its
    processes.

    `vocab_size`: ids are 0 to vocab_size - 1. `fingerprint`: a short text; tokenizers with equal fingerprints
    must give every text the same ids. `bos`, `eos`: ids that frame a document. `config`: the component that
    built the tokenizer, which datasets record."""

    vocab_size: int
    fingerprint: str
    bos: int
    eos: int
    config: TokenizerConfig | None = None

    @property
    def stop_ids(self) -> set[int]:
        """The ids that end generated text: `eos`, and the EOS ids in the model's generation_config.json."""
        ids = self.generation_config()["eos_token_id"]
        return {self.eos, *(ids if isinstance(ids, list) else [ids])}

    def model_ids(self) -> dict[str, Any]:
        """Return the special ids for Hugging Face's config.json. BOS is None if the tokenizer has no BOS."""
        return {"bos_token_id": self.bos, "eos_token_id": self.eos}

    def generation_config(self) -> dict[str, Any]:
        """Return the content of Hugging Face's generation_config.json: special ids and sampling defaults."""
        return self.model_ids()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS and EOS."""
        raise NotImplementedError(f"{full_name(type(self))} lacks encode")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD."""
        raise NotImplementedError(f"{full_name(type(self))} lacks decode")

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Return the text of ids that follow a text. It differs from `decode` for tokenizers that add a space
        in front of a text, which `decode` removes."""
        return self.decode(ids)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32 [tokens], framed by BOS and EOS."""
        encoded, bos, eos = self._encode_batch(texts), [self.bos], [self.eos]
        return [np.concatenate([bos, ids, eos], dtype=np.uint32, casting="unsafe") for ids in encoded]

    def bytes_per_token(self) -> np.ndarray | None:
        """Return how many bytes of UTF-8 text each id stands for, int64 [vocab_size]; 0 for special tokens.

        If the tokenizer adds a space to each document, EOS has -1, which takes it back. None, the default, if
        an id alone does not tell, as for such a tokenizer whose BOS is its EOS: then validation reports no
        bits per byte."""
        return None

    def chat_format(self) -> ChatFormat:
        """Return the chat template of this tokenizer. Raises ConfigError if it has none, or one that does not
        mark the assistant's text."""
        raise ConfigError(
            f"{type(self.config).__name__} has no chat template; the tokenizer 'huggingface' can have one",
            "tokenizer.name",
        )

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return the files, by name, from which `AutoTokenizer.from_pretrained` reads this tokenizer. Raises
        ConfigError if transformers does not support it."""
        raise ConfigError(
            f"{type(self.config).__name__} cannot be written in a form that transformers reads",
            "tokenizer.name",
        )

    def _bytes_per_token(self, num_bytes: Mapping[int, int]) -> np.ndarray:
        """Return the table of `bytes_per_token` from the bytes of the ids that have any. BOS and EOS, which
        frame documents, have none."""
        table = np.zeros(self.vocab_size, dtype=np.int64)
        table[list(num_bytes.keys())] = list(num_bytes.values())
        table[[self.bos, self.eos]] = 0
        return table

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(self.encode(text), dtype=np.uint32) for text in texts]


class TokenizerConfig(Component, kind="tokenizer", makes=(Tokenizer,)):
    """Base of tokenizer components: `[tokenizer] name = "..."` selects a subclass by its name.

    `[job] imports` (for `titanlite prepare`: `imports`) registers tokenizers from other modules;
    tests/examples/character_tokenizer.py is an example.
    """

    @abstractmethod
    def build(self) -> Tokenizer:
        """Load the tokenizer. Raises ConfigError for a missing or invalid file."""

    def files(self) -> dict[str, Path]:
        """Return the files that `build` reads, by their names in a copy, which a run keeps in its folder. The
        default is a tokenizer without files."""
        return {}

    def in_folder(self, folder: Path) -> TokenizerConfig:
        """Return this component with the copy of its files in `folder`."""
        return self

    def copy_to(self, folder: PurePath) -> None:
        """Copy the files of this component to `folder`. A copy that is up to date is not written again."""
        storage = storage_of(folder)
        for name, file in self.files().items():
            content, copy = read_bytes(str(file), "tokenizer.path"), folder / name
            storage.make_folder(folder)
            if not storage.exists(copy) or storage.read(copy) != content:
                storage.put(copy, content)


def read_bytes(path: str, key: str) -> bytes:
    """Read a file. Raises ConfigError for the key `key`, with the folder of a relative path."""
    try:
        return read_regular(find_file(path))
    except (OSError, ValueError) as e:
        where = "" if Path(path).is_absolute() else f" (relative to {Path.cwd()})"
        fetch = if_on_hub(path) if isinstance(e, FileNotFoundError) else ""
        raise ConfigError(f"cannot read {path!r}{where}: {getattr(e, 'strerror', e)}{fetch}", key) from None
