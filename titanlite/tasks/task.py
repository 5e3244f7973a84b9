"""Task: a multiple-choice, schema or cloze task in a local file, and how it is scored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from titanlite.config.component import ConfigError, check_at_least
from titanlite.config.json_file import expect, parse
from titanlite.config.paths import PathText
from titanlite.files import read_regular

KEY = "validation.tasks"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A multiple-choice, schema or cloze task to score in each validation."""

    name: str
    """Name in the metrics (`tasks/NAME/acc`): letters, digits, `_`, `-` and `.`."""
    path: PathText
    """JSON Lines file: `{"context": "...", "choices": ["...", "..."], "answer": 0}` per multiple-choice
    question, `{"contexts": ["...", "..."], "continuation": "...", "answer": 0}` per schema, or `{"context":
    "...", "continuation": "..."}`. Contexts include few-shot examples."""
    delimiter: str = " "
    """Text between context and choice. A continuation follows directly."""
    add_bos: bool = True
    """Begin contexts with BOS, as documents do in training. An empty context always becomes BOS."""
    protocol: Literal["harness", "core"] = "harness"
    """How answers are judged: as by lm-evaluation-harness, or as by DCLM's CORE: by the loss per token."""
    group: str = ""
    """Group of tasks with a common metric `tasks/GROUP/centered`, such as CORE; empty: none."""
    chance: float | None = None
    """Share of right answers by guessing, for `group`; unset: 1 / number of choices, 0 for a cloze."""
    limit: int = -1
    """Questions to score, from the beginning of the file; -1: all."""
    num_samples: int = 2
    """First questions to write to samples.txt, with the log-likelihoods of their choices; 0: none."""

    def __post_init__(self) -> None:
        for key, pattern in (("name", r"[\w.-]+"), ("group", r"[\w.-]*")):
            if not re.fullmatch(pattern, value := getattr(self, key), re.ASCII):
                raise ConfigError(f"{value!r} is not made of letters, digits, _, - and .", key)
        if self.limit < 1 and self.limit != -1:
            raise ConfigError(f"{self.limit} is neither -1 nor at least 1", "limit")
        if self.chance is not None and not 0 <= self.chance < 1:
            raise ConfigError(f"{self.chance} is not a share from 0 to below 1", "chance")
        if self.protocol == "core" and not self.add_bos:
            raise ConfigError("contexts of protocol 'core' begin with BOS", "add_bos")
        check_at_least(self, 0, "num_samples")


@dataclass(frozen=True)
class Question:
    """A line of a task's file. `choices`: of a schema and of a cloze, only the continuation. `answer`: the
    index of the right choice, or context; None for a cloze. `line`: its number in the file. `contexts`: of a
    schema; its `context` is empty."""

    context: str
    choices: tuple[str, ...]
    answer: int | None
    line: int
    contexts: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of question, for messages."""
        return "cloze" if self.answer is None else "schema" if self.contexts else "multiple choice"

    @property
    def num_options(self) -> int:
        """The number of texts that are scored."""
        return len(self.contexts or self.choices)

    def options(self, delimiter: str) -> list[tuple[str, str]]:
        """The texts that are scored: each as a context and what follows. `delimiter`: before choices."""
        if self.contexts:
            return [(context, self.choices[0]) for context in self.contexts]
        between = delimiter if self.kind == "multiple choice" else ""
        return [(self.context, between + choice) for choice in self.choices]


def read_questions(task: Task) -> list[Question]:
    """The questions of a task's file. Raises ConfigError, which names the file and the line."""
    try:
        lines = read_regular(task.path).decode().split("\n")
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {task.path!r}: {getattr(e, 'strerror', None) or e}", KEY) from None
    questions: list[Question] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        if len(questions) == task.limit:
            break
        try:
            questions.append(make_question(parse(text), number))
            if (kind := questions[-1].kind) != (first := questions[0].kind):
                raise ValueError(f"{first} and {kind} are mixed; put them into two tasks")
        except ValueError as e:
            raise line_error(task, number, str(e)) from None
    if not questions:
        raise ConfigError(f"{task.path!r} has no questions", KEY)
    return questions


def line_error(task: Task, line: int, reason: str) -> ConfigError:
    """The error of a line of a task's file."""
    return ConfigError(f"{task.path}, line {line}: {reason}", KEY)


def make_question(tree: Any, line: int) -> Question:
    """The question of a line's JSON object. Raises ValueError."""
    expect(tree)
    is_schema = "contexts" in tree
    expect(tree, **{"continuation" if is_schema else "context": str})
    if is_schema:
        contexts, answer = _options(tree, "contexts")
        question = Question("", (tree["continuation"],), answer, line, contexts)
    elif "choices" in tree:
        question = Question(tree["context"], *_options(tree, "choices"), line)
    elif "continuation" in tree:
        expect(tree, continuation=str)
        question = Question(tree["context"], (tree["continuation"],), None, line)
    else:
        raise ValueError("neither choices nor continuation is given")
    if "" in question.choices:
        raise ValueError("a choice or continuation is empty")
    return question


def _options(tree: dict[str, Any], key: str) -> tuple[tuple[str, ...], int]:
    """The choices or contexts of a line's JSON object, and the index of the right one. Raises ValueError."""
    expect(tree, **{key: list}, answer=int)
    options, answer = tree[key], tree["answer"]
    if not all(isinstance(option, str) for option in options):
        raise ValueError(f"{key} are not all strings")
    if len(options) < 2:
        raise ValueError(f"a question has at least 2 {key}, this one has {len(options)}")
    if not 0 <= answer < len(options):
        raise ValueError(f"answer is {answer}, expected 0 to {len(options) - 1}")
    return tuple(options), answer
