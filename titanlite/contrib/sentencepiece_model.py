"""Reads SentencePiece's tokenizer.model, and writes it as a tokenizer.json with the same ids.

The file is a protocol buffer (sentencepiece_model.proto of SentencePiece 0.2). Encoding depends on its
pieces, their scores, and the settings of the normalizer. SentencePiece's BPE merges any two neighbours whose
concatenation is a piece, the best score first; `tokenizers` needs an ordered list of the pairs that may be
merged. So the file lists all pairs that form each piece, in the order of the scores. Unigram keeps the
scores. The compiled rules of a normalizer such as nmt_nfkc are run by `tokenizers`, as in transformers: they
differ from SentencePiece's where a combining mark follows a character that has a rule. Unigram
differs in two ways: SentencePiece adds scores in float32, so that some tokens of texts of over 100,000
characters are not the best ones; and its versions score user-defined symbols differently, which matters where
two ways to split a run, such as three line feeds with a symbol of two, score alike."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanlite.tokenizers.pieces import BYTES, SPACE_MARK
from titanlite.tokenizers.tokenizer_json import bpe_model, tokenizer_tree

LONGEST = 512  # characters of a piece, the limit of SentencePiece's trainer
TYPES = range(1, 7)  # of pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = TYPES
UNIGRAM, BPE = 1, 2  # types of models
NOT_A_MODEL = (
    "not a SentencePiece model, or a damaged one; Llama 3's tokenizer.model is read by the tokenizer "
    "'tiktoken', a tokenizer.json by 'huggingface'"
)


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary, whose id is its place."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The settings that encoding depends on. `charsmap`: the compiled rules of the normalizer. `bos`,
    `eos`: pieces, empty if the model has none."""

    pieces: list[Piece]
    type: int
    unk_id: int
    bos: str
    eos: str
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    def special(self) -> dict[str, int]:
        """Return the ids of pieces that stand for no text."""
        return {piece.text: i for i, piece in enumerate(self.pieces) if piece.type in (UNKNOWN, CONTROL)}


def read_model(data: bytes) -> SentencePieceModel:
    """Read a tokenizer.model. Raises ValueError for another file, and for a model that loses text or that
    `tokenizers` cannot run."""
    try:
        fields = _fields(data)
        pieces = [_piece(_fields(piece)) for piece in fields[1]]
        trainer, normalizer = (_fields(fields[number][-1]) if number in fields else {} for number in (2, 3))
        types = {kind: [i for i, piece in enumerate(pieces) if piece.type == kind] for kind in TYPES}
        model = SentencePieceModel(
            pieces=pieces,
            type=_int(trainer, 3, UNIGRAM),
            unk_id=types[UNKNOWN][0],
            bos=_control(pieces, trainer.get(46, [b"<s>"])[-1].decode()),
            eos=_control(pieces, trainer.get(47, [b"</s>"])[-1].decode()),
            charsmap=memoryview(normalizer.get(2, [b""])[-1]).tobytes(),
            add_dummy_prefix=bool(_int(normalizer, 3, 1)),
            remove_extra_whitespaces=bool(_int(normalizer, 4, 1)),
        )
        if not types[NORMAL] or not all(piece.text for piece in pieces):
            raise ValueError
        has_other_spaces = _int(trainer, 24, 0) or not _int(normalizer, 5, 1)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error):
        raise ValueError(NOT_A_MODEL) from None
    if longest := max((piece.text for piece in pieces if len(piece.text) > LONGEST), key=len, default=""):
        raise ValueError(f"it has a piece of {len(longest):,} characters: {longest[:20]!r}...")
    if model.type not in (UNIGRAM, BPE):
        raise ValueError(f"a SentencePiece model of type {model.type}, neither Unigram (1) nor BPE (2)")
    if not {pieces[i].text for i in types[BYTE]} >= set(BYTES):
        raise ValueError("it has no pieces for bytes (byte_fallback), and would lose unknown characters")
    if has_other_spaces:
        raise ValueError("it was trained with treat_whitespace_as_suffix or without escape_whitespaces")
    if types[UNUSED]:
        raise ValueError("it has unused pieces")
    return model


def as_tokenizer_json(model: SentencePieceModel) -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append(
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()}
        )
    if model.remove_extra_whitespaces:
        steps += [_replace({"Regex": rf"\A +|[ {SPACE_MARK}]+\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE_MARK})
    steps.append(_replace({"String": " "}, SPACE_MARK))
    to_text = [_replace({"String": SPACE_MARK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.add_dummy_prefix:
        to_text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in _split_patterns(model)
    ]
    return tokenizer_tree(
        model.special(),
        model.bos,
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer={"type": "Sequence", "pretokenizers": splits} if splits else None,
        decoder={"type": "Sequence", "decoders": to_text},
        model=_bpe(model) if model.type == BPE else _unigram(model),
    )


def _split_patterns(model: SentencePieceModel) -> Iterator[str]:
    """Yield regular expressions whose matches become separate words.

    In BPE, a user-defined symbol is a word, which `ignore_merges` finds in the vocabulary. Names of bytes and
    special pieces, such as `<s>`, are plain text in SentencePiece, but the library finds them in Unigram, and
    as whole words in BPE with `ignore_merges`. To prevent it, a character that is in no other piece is a
    word, too, and in BPE the first character of a word that is such a name."""
    names = [piece.text for piece in model.pieces if piece.type in (UNKNOWN, CONTROL, BYTE)]
    symbols = _symbols(model)
    if model.type == BPE and not symbols:
        return
    known = {character for piece in model.pieces if piece.type == NORMAL for character in piece.text}
    unknown = {character for name in names for character in name} - known
    words = [symbol for symbol in symbols if model.type == BPE or unknown & set(symbol)]
    if words or unknown:
        yield "|".join(map(_escaped, [*words, *sorted(unknown)]))
    if model.type == BPE:
        starts = [f"{_escaped(name[0])}(?={_escaped(name[1:])}" + r"\z)" for name in names]
        yield rf"\A(?:{'|'.join(starts)})"


def _symbols(model: SentencePieceModel) -> list[str]:
    """Return the user-defined symbols, the longest first, because the longest one that matches is taken."""
    return sorted((piece.text for piece in model.pieces if piece.type == USER_DEFINED), key=len, reverse=True)


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _escaped(symbol: str) -> str:
    return re.sub(r"[^\w\s]", lambda match: f"\\x{{{ord(match[0]):x}}}", symbol)


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    vocab = {piece.text: i for i, piece in enumerate(model.pieces)}
    return bpe_model(
        vocab,
        _merges(model),
        ignore_merges=bool(_symbols(model)),  # a symbol is a separate word
        unk_token=model.pieces[model.unk_id].text,
        fuse_unk=True,
        byte_fallback=True,
    )


def _merges(model: SentencePieceModel) -> Iterator[tuple[str, str]]:
    """Yield the pairs that form each piece, the best score first. If several pairs form a piece, the longest
    left one comes first: SentencePiece merges the leftmost of several pairs with equal scores."""
    mergeable = {piece.text: piece.score for piece in model.pieces if piece.type == NORMAL}
    for text, _ in sorted(mergeable.items(), key=lambda item: -item[1]):
        for i in range(len(text) - 1, 0, -1):
            if text[:i] in mergeable and text[i:] in mergeable:
                yield text[:i], text[i:]


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    lowest = min(piece.score for piece in model.pieces if piece.type == NORMAL)

    def score(piece: Piece) -> float:
        if piece.type == USER_DEFINED:
            return 0.1 * (len(piece.text.encode()) - 1)  # of SentencePiece 0.2.3; the file's score is unused
        # The library finds every piece in a text. SentencePiece finds neither bytes nor special pieces in
        # it, so these get a score worse than the score of the characters of their names.
        return piece.score if piece.type == NORMAL else (lowest - 1) * (len(piece.text) + 1)

    vocab = [[piece.text, score(piece)] for piece in model.pieces]
    return {"type": "Unigram", "unk_id": model.unk_id, "vocab": vocab, "byte_fallback": True}


def _piece(fields: dict[int, list[Any]]) -> Piece:
    score = struct.unpack("<f", fields[2][-1])[0] if 2 in fields else 0.0
    return Piece(fields[1][-1].decode(), score, _int(fields, 3, NORMAL))


def _int(fields: dict[int, list[Any]], number: int, default: int) -> int:
    value = fields.get(number, [default])[-1]
    return value - (1 << 64) if value >> 63 == 1 else value


def _control(pieces: list[Piece], name: str) -> str:
    """Return `name` if it is a control piece, else "". As in SentencePiece, a user-defined symbol `<s>` is
    text, not BOS."""
    return name if any(piece.text == name and piece.type == CONTROL for piece in pieces) else ""


def _fields(data: bytes) -> dict[int, list[Any]]:
    """Return the values of a protocol buffer's message by their numbers: int for varints, otherwise bytes."""
    fields: dict[int, list[Any]] = {}
    place = 0

    def varint() -> int:
        nonlocal place
        value, shift = 0, 0
        while shift < 70:
            byte = data[place]
            value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
            if byte < 0x80:
                return value
        raise ValueError("a number of more than ten bytes")

    while place < len(data):
        key = varint()
        value: int | bytes
        if key & 7 == 0:
            value = varint()
        elif key & 7 in (1, 2, 5):
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            value = data[place : place + size]
            place += size
            if place > len(data):
                raise ValueError("a field that exceeds the message")
        else:
            raise ValueError("a field of unknown type")
        fields.setdefault(key >> 3, []).append(value)
    return fields
