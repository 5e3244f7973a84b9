"""Task: a multiple-choice or cloze task in a local file, as lm-evaluation-harness scores them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanlite.config.component import ConfigError, check_at_least
from titanlite.config.json_file import expect, parse
from titanlite.config.paths import PathText
from titanlite.files import read_regular

KEY = "validation.tasks"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A multiple-choice or cloze task to score in each validation."""

    name: str
    """Name in the metrics (`tasks/NAME/acc`): letters, digits, `_`, `-` and `.`."""
    path: PathText
    """JSON Lines file: `{"context": "...", "choices": ["...", "..."], "answer": 0}` per multiple-choice
    question, or `{"context": "...", "continuation": "..."}`. Contexts include few-shot examples."""
    delimiter: str = " "
    """Text between context and choice. A continuation follows directly."""
    add_bos: bool = True
    """Begin contexts with BOS, as documents do in training. An empty context always becomes BOS."""
    limit: int = -1
    """Questions to score, from the beginning of the file; -1: all."""
    num_samples: int = 2
    """First questions to write to samples.txt, with the log-likelihoods of their choices; 0: none."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name, re.ASCII):
            raise ConfigError(f"{self.name!r} is not made of letters, digits, _, - and .", "name")
        if self.limit < 1 and self.limit != -1:
            raise ConfigError(f"{self.limit} is neither -1 nor at least 1", "limit")
        check_at_least(self, 0, "num_samples")


@dataclass(frozen=True)
class Question:
    """A line of a task's file. `choices`: of a cloze, only its continuation. `answer`: the index of the right
    choice; None for a cloze. `line`: its number in the file."""

    context: str
    choices: tuple[str, ...]
    answer: int | None
    line: int


def read_questions(task: Task) -> list[Question]:
    """The questions of a task's file. Raises ConfigError, which names the file and the line."""
    try:
        lines = read_regular(task.path).decode().split("\n")
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {task.path!r}: {getattr(e, 'strerror', None) or e}", KEY) from None
    questions: list[Question] = []
    for number, text in _filled(lines):
        if len(questions) == task.limit:
            break
        try:
            questions.append(_question(parse(text), number))
            if (questions[-1].answer is None) != (questions[0].answer is None):
                raise ValueError("choices and continuations are mixed; put them into two tasks")
        except ValueError as e:
            raise line_error(task, number, str(e)) from None
    if not questions:
        raise ConfigError(f"{task.path!r} has no questions", KEY)
    return questions


def line_error(task: Task, line: int, reason: str) -> ConfigError:
    """The error of a line of a task's file."""
    return ConfigError(f"{task.path}, line {line}: {reason}", KEY)


def _filled(lines: list[str]) -> Iterator[tuple[int, str]]:
    return ((number, text) for number, text in enumerate(lines, 1) if text.strip())


def _question(tree: Any, line: int) -> Question:
    """The question of a line's JSON object. Raises ValueError."""
    expect(tree, context=str)
    if "choices" not in tree:
        if "continuation" not in tree:
            raise ValueError("neither choices nor continuation is given")
        expect(tree, continuation=str)
        choices, answer = [tree["continuation"]], None
    else:
        expect(tree, choices=list, answer=int)
        choices, answer = tree["choices"], tree["answer"]
        if not all(isinstance(choice, str) for choice in choices):
            raise ValueError("choices are not all strings")
        if len(choices) < 2:
            raise ValueError(f"a question has at least 2 choices, this one has {len(choices)}")
        if not 0 <= answer < len(choices):
            raise ValueError(f"answer is {answer}, expected 0 to {len(choices) - 1}")
    if "" in choices:
        raise ValueError("a choice or continuation is empty")
    return Question(tree["context"], tuple(choices), answer, line)
