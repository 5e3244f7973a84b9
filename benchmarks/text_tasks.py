"""Two tasks from held-out text, for text_by_kind.py: questions in the format of docs/tasks.md.

next_line  Multiple choice: which of four lines of a Python module follows its lines so far? All four are
           indented alike and come from that module, outside the lines shown. Chance: 1/4.
last_word  Cloze: the last word of a paragraph of prose, which occurs earlier in the paragraph. A word drawn
           from the paragraph's words of four letters or more would be right in the share of questions that
           the summary calls `chance`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

NUM_QUESTIONS, PER_DOCUMENT = 500, 8
CONTEXT_LINES, CHOICES = 12, 4
MIN_WORDS, MAX_WORDS = 20, 120
PLAIN_SHARE = 0.85  # of the words of a paragraph that are spelled as in prose
LONG_WORD = re.compile(r"\b[a-z]{4,}\b")
PLAIN_WORD = re.compile(r"[(\"'`]?[A-Za-z][a-z'-]*[)\"'`]?[.,;:!?]?")
LAST_WORD = re.compile(r"(.*\S)( ([a-z]{4,}))\.", re.DOTALL)


def write_tasks(folder: Path, texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Write `next_line.jsonl` from the documents of `texts["code"]` and `last_word.jsonl` from those of
    `texts["prose"]`. Returns the number of questions and the chance of each task."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {}
    for name, kind, ask, chance in (
        ("next_line", "code", next_line, lambda question: 1 / len(question["choices"])),
        ("last_word", "prose", last_word, lambda question: 1 / len(long_words(question["context"]))),
    ):
        questions = list(islice(drawn(texts[kind], ask), NUM_QUESTIONS))
        lines = "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        about[name] = {
            "questions": len(questions),
            "chance": round(statistics.mean(map(chance, questions)), 4) if questions else None,
        }
    return about


def drawn(texts: Iterable[str], ask: Callable[[str], Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """At most PER_DOCUMENT of the possible questions on each document. The same ones in each call."""
    for text in texts:
        questions = ask(text)
        yield from drawing(text).sample(questions, min(len(questions), PER_DOCUMENT))


def next_line(text: str) -> list[dict[str, Any]]:
    """The questions on a Python module: one for each line that three others can be exchanged for."""
    lines, draw, questions = text.split("\n"), drawing(text), []
    once = {line for line in lines if len(line.strip()) >= 20 and lines.count(line) == 1}
    for i in range(CONTEXT_LINES, len(lines)):
        line, context = lines[i], lines[i - CONTEXT_LINES : i]
        if line not in once or not lines[i - 1].strip():
            continue
        others = [
            other
            for other in sorted(once.difference([line, *context]))
            if indent(other) == indent(line) and 2 / 3 < len(other) / len(line) < 3 / 2
        ]
        if len(others) >= CHOICES - 1:
            choices = [line, *draw.sample(others, CHOICES - 1)]
            draw.shuffle(choices)
            questions.append(
                {"context": "\n".join(context), "choices": choices, "answer": choices.index(line)}
            )
    return questions


def last_word(text: str) -> list[dict[str, Any]]:
    """The questions on a text: one for each paragraph of prose whose last word occurs before."""
    questions = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        if not MIN_WORDS <= len(words) <= MAX_WORDS:
            continue
        if sum(bool(PLAIN_WORD.fullmatch(word)) for word in words) < PLAIN_SHARE * len(words):
            continue
        match = LAST_WORD.fullmatch(" ".join(words))
        if match and match[3] in long_words(match[1]):
            questions.append({"context": match[1], "continuation": match[2]})
    return questions


def long_words(text: str) -> set[str]:
    """The words of four letters or more in lower case."""
    return set(LONG_WORD.findall(text))


def indent(line: str) -> int:
    """The number of blanks at the start of a line."""
    return len(line) - len(line.lstrip())


def drawing(text: str) -> random.Random:
    """Random numbers that depend on the text alone."""
    return random.Random(hashlib.sha256(text.encode()).hexdigest())
