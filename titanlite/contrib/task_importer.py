"""Task importers: a kind of component that makes files for `[[validation.tasks]]` from files of others, and
the base of importers of JSON Lines files."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from titanlite.config.component import Component, ConfigError, check_at_least
from titanlite.config.json_file import expect, parse
from titanlite.config.paths import PathText
from titanlite.files import read_regular
from titanlite.tasks.task import make_question

T = TypeVar("T")
Line = dict[str, Any]
WRONG = (ValueError, LookupError, TypeError, AttributeError)  # errors of an object that lacks what is read


@dataclass(frozen=True)
class TaskFile:
    """A task to write. `lines`: of its file. `keys`: of its `[[validation.tasks]]` table, besides `name` and
    `path`."""

    name: str
    lines: Sequence[Line]
    keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskImporter(Component, kind="format", makes=(Iterable,)):
    """Base of importers: `titanlite tasks import NAME SOURCE` selects a subclass by its name. Its fields are
    options of the command."""

    limit: int = -1
    """Questions of each task to write; -1: all."""

    def __post_init__(self) -> None:
        if self.limit < 1 and self.limit != -1:
            raise ConfigError(f"{self.limit} is neither -1 nor at least 1", "limit")

    def first(self, questions: Sequence[T]) -> Sequence[T]:
        """Return the first `limit` questions of a task."""
        return questions if self.limit == -1 else questions[: self.limit]

    @abstractmethod
    def build(self, source: Path) -> Iterable[TaskFile]:
        """Return the tasks that the file or folder `source` holds. Raises ConfigError for wrong input."""


@dataclass(frozen=True, kw_only=True)
class LineImporter(TaskImporter):
    """Base of importers of a JSON Lines file with a question per line. A subclass implements `question`."""

    task: str = ""
    """Name of the task; empty: the name of the file without its ending."""
    shots: int = 0
    """Examples in front of each question, chosen as by lm-evaluation-harness."""
    examples: PathText = ""
    """File of the same format that examples are chosen from; empty: the other questions."""
    seed: int = 1234
    """Seed of the choice of examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "shots")

    @abstractmethod
    def question(self, item: Line) -> Line:
        """Return the line of the task's file for the object of a line of the source. Raises ValueError for a
        wrong object."""

    def items(self, path: Path) -> dict[int, Line]:
        """Return the objects of the lines of a file, by line number. Raises ConfigError."""
        return read_lines(path)

    def build(self, source: Path) -> Iterator[TaskFile]:
        questions = self._read(source)
        pool = self._read(Path(self.examples)) if self.examples else None
        if self.shots > (num := len(questions) - 1 if pool is None else len(pool)):
            raise ConfigError(f"{source}: --shots={self.shots} is above {num}, the number of examples")
        rng, lines = random.Random(self.seed), list[Line]()
        for question in self.first(questions):
            examples = (
                self._others(rng, questions, question) if pool is None else rng.sample(pool, self.shots)
            )
            lines.append(after("".join(as_example(line) for _, line in examples), question[1]))
        yield TaskFile(self.task or source.stem, lines)

    def _read(self, path: Path) -> list[tuple[Line, Line]]:
        """Return the object of each line of a file, with the line of the task's file for it. Raises
        ConfigError."""
        questions = list[tuple[Line, Line]]()
        for number, item in self.items(path).items():
            try:
                questions.append((item, self.question(item)))
                make_question(questions[-1][1], number)
            except WRONG as e:
                raise ConfigError(f"{path}, line {number}: {error_of(e)}") from None
        return questions

    def _others(self, rng: random.Random, questions: Sequence[T], question: T) -> Sequence[T]:
        """Return `shots` questions other than `question`, chosen as by lm-evaluation-harness."""
        if not self.shots:
            return []
        chosen = [other for other in rng.sample(questions, self.shots + 1) if other != question]
        if len(chosen) < self.shots:  # the file has the question more than once
            others = [other for other in questions if other != question]
            return rng.sample(others, min(self.shots, len(others)))
        return chosen[: self.shots]


def as_example(line: Line, delimiter: str = " ") -> str:
    """Return a line of a task's file as an example in front of a question, with its answer. The default of
    `delimiter` is lm-evaluation-harness's, also for a continuation that begins with a blank."""
    if "contexts" in line:
        return f"{line['contexts'][line['answer']]}{line['continuation']}\n\n"
    answer = line["choices"][line["answer"]] if "choices" in line else line["continuation"]
    return f"{line['context']}{delimiter}{answer}\n\n"


def after(prompt: str, line: Line) -> Line:
    """Return a line of a task's file with `prompt` in front of its contexts."""
    if "contexts" in line:
        return {**line, "contexts": [prompt + context for context in line["contexts"]]}
    return {**line, "context": prompt + line["context"]}


def error_of(error: Exception) -> str:
    """Return an error of an importer's input for a message."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def read_lines(path: Path) -> dict[int, Line]:
    """Return the objects of a JSON Lines file, by line number. Raises ConfigError, which names the file and
    the line."""
    lines = dict[int, Line]()
    for number, text in enumerate(read_text(path).split("\n"), 1):
        if not text.strip():
            continue
        try:
            lines[number] = parse(text)
            expect(lines[number])
        except ValueError as e:
            raise ConfigError(f"{path}, line {number}: {e}") from None
    if not lines:
        raise ConfigError(f"{path} has no questions")
    return lines


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        return read_regular(path).decode("utf-8-sig")
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
