"""SentencePiece's tokenizer.model without a tokenizer.json, run by the library `tokenizers`.

The model is converted to a tokenizer.json, which training and an exported model use alike, so that both have
the same ids. The library sentencepiece is not needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json
from titanlite.config.paths import PathText
from titanlite.contrib.sentencepiece_model import SentencePieceModel, as_tokenizer_json, read_model
from titanlite.tokenizers.base import read_bytes
from titanlite.tokenizers.huggingface import HuggingFace, HuggingFaceTokenizer


@dataclass(frozen=True, kw_only=True)
class SentencePiece(HuggingFace, name="sentencepiece"):
    """SentencePiece's tokenizer.model (BPE or Unigram with byte fallback), such as Llama 2's."""

    FILE: ClassVar = "tokenizer.model"
    path: PathText
    """tokenizer.model, or its directory."""
    bos: str = ""
    """Token before a document; empty: the model's BOS, else EOS."""
    eos: str = ""
    """Token after a document; empty: the model's EOS."""

    def build(self) -> HuggingFaceTokenizer:
        path = Path(self.path)
        path = path / self.FILE if path.is_dir() else path
        data = read_bytes(str(path), "tokenizer.path")
        try:
            model = read_model(data)
        except ValueError as e:
            raise ConfigError(f"{path}: {e}", "tokenizer.path") from None
        if not (model.eos or self.eos):
            raise ConfigError(f"{path} has no EOS: give the token at the end of a document", "tokenizer.eos")
        return SentencePieceTokenizer(self, path, data, model)


class SentencePieceTokenizer(HuggingFaceTokenizer):
    """The tokenizer that SentencePiece.build returns. `data`: the content of tokenizer.model."""

    def __init__(self, config: SentencePiece, path: Path, data: bytes, model: SentencePieceModel):
        self._data = data
        self._names = {"bos": model.bos, "eos": model.eos, "unk": model.pieces[model.unk_id].text}
        super().__init__(config, path, as_json(as_tokenizer_json(model)))

    def _named(self, key: str) -> str:
        return self._names[key]

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return the converted tokenizer.json, the files that go with it, and tokenizer.model."""
        files = super().hugging_face_files()
        config = json.loads(files["tokenizer_config.json"]) | {"unk_token": self._names["unk"]}
        return {**files, "tokenizer_config.json": as_json(config), "tokenizer.model": self._data}
