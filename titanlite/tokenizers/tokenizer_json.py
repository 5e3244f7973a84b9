"""Writes byte-level BPE as Hugging Face's tokenizer.json, which gives the same ids in transformers.

tiktoken merges any two neighbours whose concatenation is a token, the lowest rank first; `tokenizers` needs
an ordered list of the pairs that may be merged. So the file lists all pairs that form each token, in the
order of the ranks. Bytes are written as GPT-2's printable characters. Runs of over LONGEST_RUN characters are
split first, as in `Tiktoken`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.config.json_file import as_json

LONGEST_RUN = 25_000  # characters; the limit of runs of blanks or non-blanks in Llama 3's reference code
BLANK, NO_BLANK = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"  # Python's \s and \S in the library's syntax
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
    spelled = {token: _spell(token) for token in ranks}
    splits: list[dict[str, Any]] = []
    if pattern is not None:
        splits = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}
            for regex, behavior in ((_long_runs(), "MergedWithPrevious"), (pattern, "Isolated"))
        ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text, pair = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    tree = {
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
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, pair],
            "special_tokens": {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a word that is a token is not split further, as in tiktoken
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[left], spelled[right]] for left, right in _merges(ranks)],
        },
    }  # fmt: skip
    config = {**TOKENIZER_CONFIG, "bos_token": bos, "eos_token": eos}
    return {"tokenizer.json": as_json(tree), "tokenizer_config.json": as_json(config)}


def _long_runs() -> str:
    """Return a regular expression that matches LONGEST_RUN characters of a longer run. A match starts at the
    start of the run or at the end of the previous match (\\G), so that no text is scanned twice."""
    return "|".join(rf"(?:(?<!{kind})|\G){kind}{{{LONGEST_RUN}}}(?={kind})" for kind in (NO_BLANK, BLANK))


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping of printable characters to bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_STAND_INS = {byte: character for character, byte in byte_alphabet().items()}


def _spell(token: bytes) -> str:
    return "".join(_STAND_INS[byte] for byte in token)


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens that form a token, ordered by its rank, then by the ranks of the pair."""
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges
