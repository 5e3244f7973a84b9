"""UTF-8 bytes as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titanlite.tokenizers.base import BOS, EOS, Tokenizer, TokenizerConfig
from titanlite.tokenizers.tokenizer_json import byte_level_files


@dataclass(frozen=True, kw_only=True)
class Bytes(TokenizerConfig, name="bytes"):
    """UTF-8 bytes as ids 0-255, BOS 256, EOS 257. Needs no file."""

    def build(self) -> Tokenizer:
        tokenizer = _BytesTokenizer()
        tokenizer.config = self
        return tokenizer


class _BytesTokenizer(Tokenizer):
    vocab_size, bos, eos, fingerprint = 258, 256, 257, "bytes-0000000001"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def bytes_per_token(self) -> np.ndarray:
        return self._bytes_per_token(dict.fromkeys(range(256), 1))

    def hugging_face_files(self) -> dict[str, bytes]:
        ranks = {bytes([b]): b for b in range(256)}
        return byte_level_files(ranks, None, {BOS: self.bos, EOS: self.eos}, BOS, EOS)
