"""Importer of the evaluation bundle of DCLM's CORE (Li et al. 2024, arXiv 2406.11794). Prompts, examples and
order are those of nanochat's evaluation."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.config.json_file import expect
from titanlite.config.paths import check_folder
from titanlite.contrib.task_importer import (
    WRONG,
    Line,
    TaskFile,
    TaskImporter,
    after,
    as_example,
    error_of,
    read_lines,
    read_text,
)
from titanlite.tasks.task import make_question

ORDER_SEED, EXAMPLES_SEED = 1337, 1234  # nanochat's


@dataclass(frozen=True, kw_only=True)
class Core(TaskImporter, name="core"):
    """CORE: the folder of the extracted bundle, with core.yaml, eval_meta_data.csv and eval_data/."""

    def build(self, source: Path) -> Iterator[TaskFile]:
        check_folder(source)
        baselines, entries = source / "eval_meta_data.csv", source / "core.yaml"
        rows = csv.DictReader(io.StringIO(read_text(baselines)))
        try:
            chances = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
        except WRONG as e:
            raise ConfigError(f"{baselines}: {error_of(e)}") from None
        for entry in read_entries(entries):
            try:
                expect(entry, label=str, dataset_uri=str, num_fewshot=list, icl_task_type=str)
                shots, delimiter = int(entry["num_fewshot"][0]), str(entry.get("continuation_delimiter", " "))
            except WRONG as e:
                raise ConfigError(f"{entries}: {error_of(e)}") from None
            if (name := entry["label"]) not in chances:
                raise ConfigError(f"{baselines} has no task {name!r}, which {entries.name} has")
            keys = {"protocol": "core", "group": "core", "chance": chances[name]}
            path, kind = source / "eval_data" / entry["dataset_uri"], entry["icl_task_type"]
            if kind == "multiple_choice":
                keys["delimiter"] = delimiter
            yield TaskFile(name, self._lines(path, kind, shots, delimiter), keys)

    def _lines(self, path: Path, kind: str, shots: int, delimiter: str) -> list[Line]:
        """The lines of a task's file, with `shots` examples in front of each question."""
        questions = list[tuple[Line, str]]()  # and each as an example
        for number, item in read_lines(path).items():
            try:
                line = as_line(item, kind, delimiter)
                make_question(line, number)
                example = as_example(line, delimiter if kind == "multiple_choice" else "")
            except WRONG as e:
                raise ConfigError(f"{path}, line {number}: {error_of(e)}") from None
            questions.append((line, example))
        random.Random(ORDER_SEED).shuffle(questions)
        questions = list(self.first(questions))
        if shots >= len(questions):
            raise ConfigError(f"{path}: {len(questions)} questions are too few for {shots} examples", "limit")
        lines = []
        for i, (line, _) in enumerate(questions):
            others = questions[:i] + questions[i + 1 :]
            chosen = random.Random(EXAMPLES_SEED + i).sample(others, shots)
            lines.append(after("".join(example for _, example in chosen), line))
        return lines


def as_line(item: Line, kind: str, delimiter: str) -> Line:
    """Return the line of a task's file for a line of the bundle. Raises errors of WRONG."""
    if kind == "multiple_choice":
        choices = [str(choice) for choice in item["choices"]]
        return {"context": str(item["query"]), "choices": choices, "answer": item["gold"]}
    continuation = str(item["continuation"])
    if kind == "schema":
        contexts = [str(context) for context in item["context_options"]]
        return {"contexts": contexts, "continuation": delimiter + continuation, "answer": item["gold"]}
    if kind == "language_modeling":
        return {"context": str(item["context"]).strip() + delimiter, "continuation": continuation}
    raise ValueError(f"tasks of the type {kind!r} are not known")


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of the tasks in core.yaml. Raises ConfigError."""
    try:
        import yaml
    except ImportError:
        raise ConfigError("reading core.yaml needs PyYAML: pip install 'titanlite[data]'") from None
    text = read_text(path)
    try:
        entries = yaml.safe_load(text)["icl_tasks"]
        return [dict(entry) for entry in entries]
    except (yaml.YAMLError, RecursionError, *WRONG) as e:
        reason = " ".join(str(e).split())
        raise ConfigError(f"{path} is not a list `icl_tasks` of tasks: {reason}") from None
