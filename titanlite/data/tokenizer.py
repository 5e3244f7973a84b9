"""Tokenizers: text to token ids and back, with one fingerprint that data and checkpoints are checked against.

Text is only text: a special token's spelling inside a document is encoded as ordinary characters, unless
`special_tokens_in_text` asks for the token. `encode_documents` frames each document as BOS ... EOS (BOS
alone, where they are the same).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.component import Component, ConfigError
from titanlite.config.shipped import find_file
from titanlite.data.tokenizer_json import LONGEST_RUN, byte_level_files
from titanlite.files import if_on_hub, read_regular

# Llama 3's split: contractions, words with one leading sign, numbers of up to three digits, punctuation,
# blank runs.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


class TextCodec:
    """What `Tokenizer.build()` returns.

    `vocab_size`: ids are 0 .. vocab_size - 1. `fingerprint`: 16 hex digits; where they are equal,
    every text gets the same ids. `bos`, `eos`: ids that frame a document. `stop_ids`: ids that end a text
    which is generated: `eos`, and the others that the model's own files name.
    """

    vocab_size: int
    fingerprint: str
    bos: int
    eos: int
    config: Tokenizer | None = None  # what it was built from

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


class Tokenizer(Component):
    """Kind: `[tokenizer] name = ...`."""

    def build(self) -> TextCodec:
        """Load it. Raises ConfigError if a file is missing or is not what it should be."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Tiktoken(Tokenizer, name="tiktoken"):
    """Byte-level BPE in tiktoken's file format: Llama 3's `tokenizer.model`, or one of titanlite's."""

    path: str = "assets/tokenizer/stdlib.tiktoken"
    """File of `<base64 token> <rank>` lines, relative to the current directory. The default is a small
    tokenizer that comes with titanlite and is found from any directory."""
    pattern: str = LLAMA3_PATTERN
    """Regular expression that splits text before merging; the default is Llama 3's."""
    num_special_tokens: int = 2
    """Ids after the ranks: `<|begin_of_text|>`, `<|end_of_text|>`, then reserved ones. Llama 3 has 256."""
    special_tokens_in_text: bool = False
    """Read special tokens that are spelled out in a document as such; otherwise they are plain text."""

    def __post_init__(self) -> None:
        if self.num_special_tokens < 2:
            raise ConfigError("at least 2: BOS and EOS", "num_special_tokens")

    def build(self) -> TextCodec:
        return _TiktokenCodec(self)


class _TiktokenCodec(TextCodec):
    def __init__(self, config: Tiktoken):
        import tiktoken

        content = read_bytes(config.path, "tokenizer.path")
        ranks = _parse_ranks(content, config.path)
        special = {BOS: len(ranks), EOS: len(ranks) + 1}
        for i in range(2, config.num_special_tokens):
            special[f"<|reserved_special_token_{i - 2}|>"] = len(ranks) + i
        try:
            self._codec = tiktoken.Encoding(
                Path(config.path).stem, pat_str=config.pattern, mergeable_ranks=ranks, special_tokens=special
            )
        except ValueError as e:
            raise ConfigError(f"not a regular expression: {e}", "tokenizer.pattern") from None
        self.vocab_size = len(ranks) + config.num_special_tokens
        self.bos, self.eos = special[BOS], special[EOS]
        self.config = config
        self._ranks, self._special = ranks, special
        self._allowed: Any = "all" if config.special_tokens_in_text else set()
        parts = [content, config.pattern.encode(), str(config.num_special_tokens).encode()]
        if config.special_tokens_in_text:
            parts.append(b"special_tokens_in_text")
        self.fingerprint = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return self._encode_batch([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(list(ids))

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.concatenate([self._encode(p) for p in _without_long_runs(text)]) for text in texts]

    def hugging_face_files(self) -> dict[str, bytes]:
        assert isinstance(self.config, Tiktoken)
        return byte_level_files(self._ranks, self.config.pattern, self._special, BOS, EOS)

    def _encode(self, piece: str) -> np.ndarray:
        return self._codec.encode_to_numpy(piece, allowed_special=self._allowed, disallowed_special=())


def _parse_ranks(content: bytes, path: str) -> dict[bytes, int]:
    """Token to rank. (tiktoken's own loader keeps a cache on disk by path: an edited one would stay.)"""
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    ranks = dict[bytes, int]()
    for number, line in lines:
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            shown = line[:40].decode("utf-8", "backslashreplace")
            raise ConfigError(
                f"{path} is not a tiktoken file: line {number} is no token in base64 and its rank: {shown!r}",
                "tokenizer.path",
            ) from None
    whole = len(ranks) == len(lines) and sorted(ranks.values()) == list(range(len(lines)))
    if not whole or not all(bytes([b]) in ranks for b in range(256)):
        raise ConfigError(
            f"{path} is not a whole tiktoken file: ranks must be 0, 1, 2, ... and all 256 bytes be tokens",
            "tokenizer.path",
        )
    return ranks


def _without_long_runs(text: str) -> list[str]:
    """The text in pieces without runs of over LONGEST_RUN blanks or non-blanks: tiktoken's regular expression
    recurses once a character and would overflow its stack."""
    half = LONGEST_RUN // 2  # a run that long fills one of these windows, which two looks at each tell
    windows = (text[i : i + half] for i in range(0, len(text) - half + 1, half))
    if len(text) <= LONGEST_RUN or all(_BLANK.search(w) and _NO_BLANK.search(w) for w in windows):
        return [text]
    pieces, begin = [], 0
    for run in re.finditer(r"\s+|\S+", text):
        for end in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            pieces.append(text[begin:end])
            begin = end
    return [*pieces, text[begin:]]


_BLANK, _NO_BLANK = re.compile(r"\s"), re.compile(r"\S")


@dataclass(frozen=True, kw_only=True)
class Bytes(Tokenizer, name="bytes"):
    """Raw UTF-8 bytes as ids 0-255, BOS 256, EOS 257. Needs no file."""

    def build(self) -> TextCodec:
        codec = _BytesCodec()
        codec.config = self
        return codec


class _BytesCodec(TextCodec):
    vocab_size, bos, eos, fingerprint = 258, 256, 257, "bytes-0000000001"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def hugging_face_files(self) -> dict[str, bytes]:
        ranks = {bytes([b]): b for b in range(256)}
        return byte_level_files(ranks, None, {BOS: self.bos, EOS: self.eos}, BOS, EOS)


def read_bytes(path: str, key: str) -> bytes:
    """The file's bytes, or a ConfigError that says where it was looked for."""
    try:
        return read_regular(find_file(path))
    except (OSError, ValueError) as e:
        where = "" if Path(path).is_absolute() else f" (relative to {Path.cwd()})"
        fetch = if_on_hub(path) if isinstance(e, FileNotFoundError) else ""
        raise ConfigError(f"cannot read {path!r}{where}: {getattr(e, 'strerror', e)}{fetch}", key) from None
