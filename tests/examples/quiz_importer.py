"""A task importer from outside the package: a CSV file with the columns subject, question, right and wrong
becomes a task per subject. To use it, put this file into the current directory or install it, and run

    titanlite tasks import quiz quiz.csv --imports=quiz_importer -o tasks/quiz
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.component import ConfigError
from titanlite.contrib.task_importer import Line, TaskFile, TaskImporter, read_text


@dataclass(frozen=True, kw_only=True)
class Quiz(TaskImporter, name="quiz"):
    """Questions with a right and a wrong answer."""

    prompt: str = "Question: {}\nAnswer:"
    """Context of a question, which replaces `{}`."""

    def build(self, source: Path) -> Iterator[TaskFile]:
        subjects: dict[str, list[Line]] = {}
        for row in csv.DictReader(io.StringIO(read_text(source))):
            if not all(row.get(column) for column in ("subject", "question", "right", "wrong")):
                raise ConfigError(f"{source}: a row has no subject, question, right or wrong answer")
            context, choices = self.prompt.replace("{}", row["question"]), [row["right"], row["wrong"]]
            line = {"context": context, "choices": choices, "answer": 0}
            subjects.setdefault(row["subject"], []).append(line)
        for subject, lines in subjects.items():
            yield TaskFile(f"quiz_{subject}", self.first(lines), {"group": "quiz"})
