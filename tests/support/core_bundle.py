"""A small evaluation bundle in the form of CORE's with invented text, and a tokenizer of its words."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlite.tokenizers.base import Tokenizer

WORDS = re.findall(
    r"\w+", "the of to and a in is it you that he was for on are with as his they be at one have"
)
YAML = """icl_tasks:
- label: facts
  dataset_uri: knowledge/facts.jsonl
  num_fewshot: [2]
  icl_task_type: language_modeling
  continuation_delimiter: "\\n: "
- label: next
  dataset_uri: next.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
  continuation_delimiter: ""
- label: chosen
  dataset_uri: chosen.jsonl
  num_fewshot: [3]
  icl_task_type: multiple_choice
- label: chosen_zero
  dataset_uri: chosen.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\n: "
- label: pronouns
  dataset_uri: pronouns.jsonl
  num_fewshot: [1]
  icl_task_type: schema
"""
CSV = "Eval Task,Type,Random baseline\nfacts,a,0\nnext,a,0\nchosen,b,25.0\nchosen_zero,b,20\npronouns,c,50\n"


class Words(Tokenizer):
    """An id per word with the blank before it. `pieces`: by id."""

    bos, eos, pieces = 0, 1, ("<bos>", "<eos>", "\n", " ", ":", *WORDS, *(f" {word}" for word in WORDS))
    vocab_size = len(pieces)

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(piece) for piece in re.findall(r" ?\w+|\n| |:", text)]


def some_words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def write_bundle(folder: Path, next_piece: Callable[[str], str], questions: int = 12) -> Path:
    """Write the bundle into a new folder, with questions that are right if `next_piece` follows their text.
    Returns the folder."""
    rng, folder = random.Random(0), folder / "bundle"
    (folder / "eval_data/knowledge").mkdir(parents=True)
    (folder / "core.yaml").write_text(YAML)
    (folder / "eval_meta_data.csv").write_text(CSV)
    items: dict[str, list[dict[str, Any]]] = {"knowledge/facts": [], "next": [], "chosen": [], "pronouns": []}
    for i in range(questions):
        text = some_words(rng, 2, 5)
        items["knowledge/facts"].append({"context": f" {text} ", "continuation": rng.choice(WORDS)})
        piece = next_piece(text)
        is_right = i % 2 and piece.startswith(" ") and piece.strip()
        items["next"].append({"context": text, "continuation": piece if is_right else " of to"})
        choices = [some_words(rng, 1, 3) for _ in range(4)]
        if i < 2:  # all choices begin with the first one, or with the second one
            choices = [("of", "of to"), ("of to", "of")][i] + ("of a", "of in")
        items["chosen"].append({"query": text, "choices": choices, "gold": 0 if i < 2 else rng.randrange(4)})
        one, other, start = (some_words(rng, 1, 3) for _ in range(3))
        options, rest = [f"{start} {one}", f"{start} {other}"], some_words(rng, 1, 3)
        items["pronouns"].append({"context_options": options, "continuation": rest, "gold": i % 2})
    for name, lines in items.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"eval_data/{name}.jsonl").write_text(text)
    return folder
