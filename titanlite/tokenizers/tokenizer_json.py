"""Writes byte-level BPE as Hugging Face's tokenizer.json, which gives the same ids in transformers.

tiktoken merges any two neighbours whose concatenation is a token, the lowest rank first; `tokenizers` needs
an ordered list of the pairs that may be merged. So the file lists all pairs that form each token, in the
order of the ranks. Bytes are written as GPT-2's printable characters. Runs of over LONGEST_RUN characters are
split first, as in `Tiktoken`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from titanlite.config.json_file import as_json

LONGEST_RUN = (
    25_000  # characters; the limit of runs of white space or other characters in Llama 3's reference code
)
SPACE, NO_SPACE = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"  # Python's \s and \S in the library's syntax
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
}


def byte_level_files(
    ranks: Mapping[bytes, int], pattern: str | None, special: Mapping[str, int], bos: str, eos: str
) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json.

    `pattern`: regular expression that splits text before merging; None: text is not split. `special`: ids of
    special tokens. transformers puts `bos` before a text unless it encodes without special tokens."""
    spelled = {token: "".join(_STAND_INS[byte] for byte in token) for token in ranks}
    splits: list[dict[str, Any]] = []
    if pattern is not None:
        splits = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}
            for regex, behavior in ((_long_runs(), "MergedWithPrevious"), (_oniguruma(pattern), "Isolated"))
        ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = bpe_model(
        {spelled[token]: rank for token, rank in ranks.items()},
        [(spelled[left], spelled[right]) for left, right in _merges(ranks)],
        ignore_merges=True,  # a word that is a token is not split further, as in tiktoken
    )
    tree = tokenizer_tree(
        special,
        bos,
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        decoder=byte_level,
        model=model,
    )
    config = {**TOKENIZER_CONFIG, "bos_token": bos, "eos_token": eos}
    return {"tokenizer.json": as_json(tree), "tokenizer_config.json": as_json(config)}


def tokenizer_tree(
    special: Mapping[str, int],
    bos: str,
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    model: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of tokenizer.json. `special`: ids of special tokens. `bos`: the special token that
    transformers puts before a text; empty: none."""
    text, pair = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    first = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos else []
    framing = {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}} if bos else {}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for token, number in special.items()
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*first, text],
            "pair": [*first, text, pair],
            "special_tokens": framing,
        },
        "decoder": decoder,
        "model": model,
    }  # fmt: skip


def bpe_model(
    vocab: Mapping[str, int], merges: Iterable[tuple[str, str]], *, ignore_merges: bool, **fields: Any
) -> dict[str, Any]:
    """Return the `model` of a tokenizer.json with BPE. `fields`: those that differ from the defaults."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        **fields,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": [[left, right] for left, right in merges],
    }


def _long_runs() -> str:
    """Return a regular expression that matches LONGEST_RUN characters of a longer run. A match starts at the
    start of the run or at the end of the previous match (\\G), so that no text is scanned twice."""
    return "|".join(rf"(?:(?<!{kind})|\G){kind}{{{LONGEST_RUN}}}(?={kind})" for kind in (NO_SPACE, SPACE))


def _oniguruma(pattern: str) -> str:
    """Return tiktoken's regular expression in the syntax of `tokenizers`, Oniguruma's. There `{1,3}+` is not
    possessive, `$` and `^` match at every line, and `\\pL` is no property. Other differences stay."""
    written, starts, begin = list[str](), list[int](), 0  # `begin`: of what a quantifier repeats
    has_lines = re.search(r"\(\?\w*m", pattern)  # (?m): `$` and `^` match at every line in tiktoken, too
    anchors = {} if has_lines else {"$": r"\z", "^": r"\A"}
    for item in _SYNTAX.findall(pattern):
        if possessive := re.fullmatch(r"(\{\d+(?:,\d*)?\})\+", item):
            written[begin:] = ["(?>", *written[begin:], possessive[1], ")"]
        elif re.fullmatch(r"[?*+]|\{\d+(?:,\d*)?\}", item):
            written.append(item)
        else:
            begin = len(written) if item != ")" or not starts else starts.pop()
            starts += [begin] if item == "(" else []
            written.append(anchors.get(item) or re.sub(r"^(\\[pP])(\w)$", r"\1{\2}", item))
    return "".join(written)


# A set of characters, which may have sets in it, an escape, a possessive or other quantifier, or a character.
_SET = r"\[\^?\]?(?:\\.|[^\]\[\\]|{})*\]"
_SYNTAX = re.compile(
    rf"{_SET.format(_SET.format('(?!)'))}"
    r"|\\[pPxu]\{[^}]*\}|\\[pP]\w|\\.|\{\d+(?:,\d*)?\}\+?|.",
    re.DOTALL,
)


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping of printable characters to bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_STAND_INS = {byte: character for character, byte in byte_alphabet().items()}


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens that form a token, ordered by its rank, then by the ranks of the pair."""
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges
