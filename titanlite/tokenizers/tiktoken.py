"""Byte-level BPE in tiktoken's file format."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.component import ConfigError
from titanlite.config.paths import PathText
from titanlite.config.shipped import find_file
from titanlite.tokenizers.base import BOS, EOS, Tokenizer, TokenizerConfig, read_bytes
from titanlite.tokenizers.tokenizer_json import LONGEST_RUN, byte_level_files

COPY = "tokenizer.tiktoken"  # name of the file in a run folder
# Llama 3's pattern: contractions, words with one leading sign, numbers of up to three digits, punctuation,
# runs of white space.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class Tiktoken(TokenizerConfig, name="tiktoken"):
    """Byte-level BPE in tiktoken's format, such as Llama 3's `tokenizer.model` and files of `titanlite
    tokenizer train`."""

    path: PathText = "assets/tokenizer/stdlib.tiktoken"
    """File of lines `<base64 token> <rank>`. The default comes with titanlite, and is found from any
    directory."""
    pattern: str = LLAMA3_PATTERN
    """Regular expression that splits text before merging; the default is Llama 3's. An export is refused if
    Hugging Face's library would split otherwise."""
    num_special_tokens: int = 2
    """Special tokens, with the ids after the ranks: `<|begin_of_text|>`, `<|end_of_text|>`, then reserved
    tokens. Llama 3 has 256."""
    special_tokens_in_text: bool = False
    """Encode names of special tokens in documents as these tokens, not as plain text."""

    def __post_init__(self) -> None:
        if self.num_special_tokens < 2:
            raise ConfigError(f"{self.num_special_tokens} is below 2, for BOS and EOS", "num_special_tokens")

    def build(self) -> Tokenizer:
        return _TiktokenTokenizer(self)

    def files(self) -> dict[str, Path]:
        return {COPY: find_file(self.path)}

    def in_folder(self, folder: Path) -> Tiktoken:
        return replace(self, path=str(folder / COPY))


class _TiktokenTokenizer(Tokenizer):
    def __init__(self, config: Tiktoken):
        import tiktoken

        content = read_bytes(config.path, "tokenizer.path")
        ranks = _parse_ranks(content, config.path)
        special = {BOS: len(ranks), EOS: len(ranks) + 1}
        for i in range(2, config.num_special_tokens):
            special[f"<|reserved_special_token_{i - 2}|>"] = len(ranks) + i
        try:
            self._encoding = tiktoken.Encoding(
                Path(config.path).stem, pat_str=config.pattern, mergeable_ranks=ranks, special_tokens=special
            )
        except ValueError as e:
            raise ConfigError(f"invalid regular expression: {e}", "tokenizer.pattern") from None
        self.vocab_size = len(ranks) + config.num_special_tokens
        self.bos, self.eos = special[BOS], special[EOS]
        self.config = config
        self._ranks, self._special = ranks, special
        self._allowed: Any = "all" if config.special_tokens_in_text else set()
        inputs = [content, config.pattern.encode(), str(config.num_special_tokens).encode()]
        if config.special_tokens_in_text:
            inputs.append(b"special_tokens_in_text")
        self.fingerprint = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return self._encode_batch([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.concatenate([self._encode(chunk) for chunk in _without_long_runs(text)]) for text in texts]

    def bytes_per_token(self) -> np.ndarray:
        return self._bytes_per_token({rank: len(token) for token, rank in self._ranks.items()})

    def hugging_face_files(self) -> dict[str, bytes]:
        assert isinstance(self.config, Tiktoken)
        return byte_level_files(self._ranks, self.config.pattern, self._special, BOS, EOS)

    def _encode(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, allowed_special=self._allowed, disallowed_special=())


def _parse_ranks(content: bytes, path: str) -> dict[bytes, int]:
    """Return the rank of each token. tiktoken's loader is not used because it caches files by path and would
    not notice an edited file."""
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    ranks = dict[bytes, int]()
    for number, line in lines:
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            is_other = b"<unk>" in content[:1000]
            other = ". SentencePiece's tokenizer.model is read by the tokenizer 'sentencepiece'" * is_other
            shown = line[:40].decode("utf-8", "backslashreplace")
            raise ConfigError(
                f"{path} is not a tiktoken file: line {number} is not a base64 token and its rank: {shown!r}"
                f"{other}",
                "tokenizer.path",
            ) from None
    is_complete = len(ranks) == len(lines) and sorted(ranks.values()) == list(range(len(lines)))
    if not is_complete or not all(bytes([b]) in ranks for b in range(256)):
        raise ConfigError(
            f"{path} is not a complete tiktoken file: ranks must be 0, 1, 2, ... and include all 256 bytes",
            "tokenizer.path",
        )
    return ranks


def _without_long_runs(text: str) -> list[str]:
    """Split the text so that no run of white space or of other characters is longer than LONGEST_RUN:
    tiktoken's regular expression recurses once per character and would overflow its stack."""
    half = LONGEST_RUN // 2  # a longer run fills at least one window of this size
    windows = (text[i : i + half] for i in range(0, len(text) - half + 1, half))
    if len(text) <= LONGEST_RUN or all(_SPACE.search(w) and _NO_SPACE.search(w) for w in windows):
        return [text]
    chunks, begin = [], 0
    for run in re.finditer(r"\s+|\S+", text):
        for end in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            chunks.append(text[begin:end])
            begin = end
    return [*chunks, text[begin:]]


_SPACE = re.compile(r"\s")
_NO_SPACE = re.compile(r"\S")
