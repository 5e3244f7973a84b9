"""Pins that words with a standard term in the field do not come back: each pattern names the term to use."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UNITS = "tokens?|tok|sequences?|micro-batch(?:es)?|GiB|MiB|bytes|seconds|once|twice|lines?|files?"

PHRASES = {  # pattern: (the term to use, a text in which the pattern must be found)
    rf"\b(?:{UNITS}) an? (?:step|GPU|rank|token|parameter|sequence|document|shard|node|epoch)\b": (
        "per step, per GPU, per rank ...", "it logs 16 sequences a step",
    ),
    r"\brows? (?:of tokens|number|to train|held out|in (?:each|a) (?:step|batch))|\brows per|held-out row": (
        "sequence", "the rows per step",
    ),
    r"\b(?:no|without|full|with) recompute\b|\brecompute (?:none|full|mode|on|off|in)\b": (
        "activation checkpointing", "bf16, compiled, no recompute",
    ),
    r"\bcodec\b": ("tokenizer", "the codec of the corpus"),
    r"\bset(?:s|ting)? aside\b": ("quarantined", "the checkpoint is set aside"),
    r"\babandon(?:s|ed)?\b": ("archived", "steps that the run has abandoned"),
    r"\b(?:go(?:es)?|went|going) on\b": ("continue", "the run goes on"),
    r"\bOf what\b|\bthat which\b": ("name the thing", "Of what several ranks know, one has the loss."),
}  # fmt: skip
VARIABLES = {"of", "found", "what", "which"}  # a value has a noun as its name
CHECKED = ["titanlite", "docs", "train_configs", "benchmarks", "*.md", "*.sh", "*.slurm", "pyproject.toml"]
NOT_CHECKED = ("benchmarks/results/", "CHANGELOG.md")  # raw output; the list of what was renamed


def files(*paths: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if not name.startswith(NOT_CHECKED)]
    kept = [ROOT / name for name in names if name.endswith((".py", ".md", ".toml", ".sh", ".slurm"))]
    return [path for path in kept if path.exists()]


def left_out(text: str) -> Iterator[str]:
    """The phrases of `text` that have a standard term, each with its line number and that term."""
    for pattern, (term, _) in PHRASES.items():
        for match in re.finditer(pattern, text):
            yield f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: say {term}"


def left_out_variables(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
        if name in VARIABLES:
            yield f"line {node.lineno}: a variable called {name!r}: name it after what it holds"


def offenders(paths: list[Path], look: Callable[[str], Iterator[str]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {text}"
        for path in paths
        for text in look(path.read_text(encoding="utf-8"))
    ]


def test_texts_use_the_standard_terms() -> None:
    assert offenders(files(*CHECKED), left_out) == []


def test_variables_are_nouns() -> None:
    code = [path for path in files("titanlite", "benchmarks", "tests") if path.suffix == ".py"]
    assert offenders(code, left_out_variables) == []


@pytest.mark.parametrize(("pattern", "example"), [(p, example) for p, (_, example) in PHRASES.items()])
def test_control_each_phrase_is_found_by_its_pattern(pattern: str, example: str) -> None:
    assert re.search(pattern, example)
    assert len(list(left_out(example))) == 1


def test_control_a_plain_text_and_a_planted_variable() -> None:
    plain = (
        "The loss of a step is logged. Each row of the matrix is scaled. Buffers are recomputed. 16 per step."
    )
    assert list(left_out(plain)) == []
    assert list(left_out_variables("found = 1\nprint(of)\n")) == [
        "line 1: a variable called 'found': name it after what it holds"
    ]
