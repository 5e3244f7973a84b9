"""Vocabularies of pieces of text with byte fallback, as SentencePiece has them.

A space is part of a piece, written as U+2581. A character without a piece becomes the pieces of its bytes,
`<0x00>` to `<0xFF>`."""

from __future__ import annotations

import base64
import re
from itertools import zip_longest
from typing import Any
from unicodedata import normalize

import numpy as np

SPACE_MARK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# The blocks of Latin, Greek and Cyrillic letters below U+10000.
LETTERS = (
    *range(0x530),
    *range(0x1C80, 0x1C90),  # Cyrillic
    *range(0x1D00, 0x1DC0),  # phonetic
    *range(0x1E00, 0x2000),  # Latin, such as Vietnamese, and ancient Greek
    *range(0x2C60, 0x2C80),  # Latin
    *range(0xA640, 0xA6A0),  # Cyrillic
    *range(0xA720, 0xA800),  # Latin
    *range(0xAB30, 0xAB70),  # Latin and Greek
)
# Text that no Unicode normalisation changes: words between white space of several kinds, then all printable
# ASCII, and all letters of these blocks.
PROBE = "The quick  brown\tfox,\n123 (jumps): \u4f60\u597d \U0001f600! " + " ".join(
    character
    for character in map(chr, LETTERS)
    if (character.isalnum() or "!" <= character <= "~") and normalize("NFKC", character) == character
)
NORMALIZERS = {"Precompiled", "Prepend", "Replace", "Strip", "NFC", "NFKC"}
PRE_TOKENIZERS = {"Metaspace", "Split", "Digits"}


def num_bytes(piece: str) -> int:
    """Return how many bytes of text a piece stands for."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece.replace(SPACE_MARK, " ").encode())


def check(tree: dict[str, Any]) -> None:
    """Raise ValueError for a tokenizer.json with pieces that loses unknown characters or spaces."""
    vocab = tree["model"]["vocab"]
    texts = vocab.keys() if isinstance(vocab, dict) else {text for text, _ in vocab}
    if not tree["model"].get("byte_fallback") or not texts >= set(BYTES):
        raise ValueError("it has no tokens for all bytes (byte_fallback), and would lose unknown characters")
    for step in steps(tree.get("normalizer"), "normalizers"):
        if step.get("type") not in NORMALIZERS:
            raise ValueError(f"it changes text before it encodes it (normalizer {step.get('type')})")
        if step["type"] == "Precompiled" and not _is_charsmap(base64.b64decode(step["precompiled_charsmap"])):
            raise ValueError("the compiled rules of its normalizer (precompiled_charsmap) are damaged")
    for step in steps(tree.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") not in PRE_TOKENIZERS or step.get("behavior") == "Removed":
            raise ValueError(f"it may drop text before it encodes it (pre-tokenizer {step.get('type')})")


def _is_charsmap(data: bytes) -> bool:
    """Whether the library can run the compiled rules of a normalizer; otherwise it may end the process.

    They are the size of a trie in bytes, the trie, and the replacements in UTF-8. The trie is a double array
    of uint32 (darts-clone), whose leaves have positions in the replacements."""
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    if not 0 < size <= len(data) - 4 or size % 4:
        return False
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    nodes = np.flatnonzero((units >> 31 == 0) | (np.arange(len(units)) == 0))  # the others are leaves
    children = nodes ^ ((units[nodes] >> 10) << ((units[nodes] & 0x200) >> 6))
    if not ((children | 0xFF) < len(units)).all():  # any byte of a text may follow
        return False
    positions = units[children[units[nodes] & 0x100 > 0]] & 0x7FFFFFFF
    if not (positions <= len(texts)).all():
        return False
    begins = np.frombuffer(texts + b"\0", np.uint8) & 0xC0 != 0x80  # of a character
    return bool(begins[positions].all())


def check_probe(text: str) -> None:
    """Raise ValueError if `text`, which a tokenizer has made of PROBE, has other words. White space may have
    become other white space, as in models that SentencePiece trains with `remove_extra_whitespaces`."""
    for before, after in zip_longest(PROBE.split(), text.split(), fillvalue=""):
        if before != after:
            raise ValueError(f"it changes text: {before!r} becomes {after!r}")


def steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer. `key`: of the steps of a sequence."""
    return [] if step is None else step.get(key, [step])
