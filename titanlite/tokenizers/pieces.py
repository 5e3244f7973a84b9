"""Vocabularies of pieces of text with byte fallback, as SentencePiece has them.

A blank is part of a piece, written as U+2581. A character without a piece becomes the pieces of its bytes,
`<0x00>` to `<0xFF>`."""

from __future__ import annotations

import re
from typing import Any

BLANK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PROBE = "The quick brown fox, 123 (jumps): caf\u00e9 \u4f60\u597d \U0001f600!"  # NFKC leaves it unchanged
NORMALIZERS = {"Precompiled", "Prepend", "Replace", "Strip", "NFC", "NFKC"}
PRE_TOKENIZERS = {"Metaspace", "Split", "Digits"}


def num_bytes(piece: str) -> int:
    """Return how many bytes of text a piece stands for."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece.replace(BLANK, " ").encode())


def check(tree: dict[str, Any]) -> None:
    """Raise ValueError for a tokenizer.json with pieces that loses unknown characters or blanks. Whether it
    changes letters is tested with PROBE."""
    vocab = tree["model"]["vocab"]
    texts = vocab.keys() if isinstance(vocab, dict) else {text for text, _ in vocab}
    if not tree["model"].get("byte_fallback") or not texts >= set(BYTES):
        raise ValueError("it has no tokens for all bytes (byte_fallback), and would lose unknown characters")
    for step in steps(tree.get("normalizer"), "normalizers"):
        if step.get("type") not in NORMALIZERS:
            raise ValueError(f"it changes text before it encodes it (normalizer {step.get('type')})")
    for step in steps(tree.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") not in PRE_TOKENIZERS or step.get("behavior") == "Removed":
            raise ValueError(f"it may drop text before it encodes it (pre-tokenizer {step.get('type')})")


def steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer. `key`: of the steps of a sequence."""
    return [] if step is None else step.get(key, [step])
