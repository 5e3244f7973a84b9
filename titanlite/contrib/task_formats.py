"""Importers of the files of ARC, PIQA, HellaSwag, LAMBADA, WinoGrande and BoolQ. Their prompts are those of
lm-evaluation-harness's tasks arc_easy, piqa, hellaswag, lambada_openai, winogrande and boolq."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.component import ConfigError
from titanlite.config.json_file import expect
from titanlite.contrib.task_importer import Line, LineImporter, read_lines, read_text


@dataclass(frozen=True, kw_only=True)
class Arc(LineImporter, name="arc"):
    """ARC as AI2 publishes it: `question.stem`, `question.choices` with `text` and `label`, `answerKey`."""

    def question(self, item: Line) -> Line:
        expect(item, question=dict, answerKey=str)
        expect(item["question"], stem=str, choices=list)
        choices = item["question"]["choices"]
        labels = [choice["label"] for choice in choices]
        return {
            "context": f"Question: {item['question']['stem']}\nAnswer:",
            "choices": [choice["text"] for choice in choices],
            "answer": index(labels, item["answerKey"], "answerKey"),
        }


@dataclass(frozen=True, kw_only=True)
class Piqa(LineImporter, name="piqa"):
    """PIQA: `goal`, `sol1`, `sol2`, and `label` or a file NAME-labels.lst beside NAME.jsonl."""

    def items(self, path: Path) -> dict[int, Line]:
        items = read_lines(path)
        if any("label" in item for item in items.values()):
            return items
        file = path.with_name(f"{path.stem}-labels.lst")
        labels = read_text(file).split()
        if len(labels) != len(items):
            raise ConfigError(f"{file} has {len(labels)} labels for the {len(items)} questions of {path}")
        return {number: {**items[number], "label": label} for number, label in zip(items, labels)}

    def question(self, item: Line) -> Line:
        expect(item, goal=str)
        return {
            "context": f"Question: {item['goal']}\nAnswer:",
            "choices": [item["sol1"], item["sol2"]],
            "answer": number(item, "label"),
        }


@dataclass(frozen=True, kw_only=True)
class HellaSwag(LineImporter, name="hellaswag"):
    """HellaSwag: `activity_label`, `ctx_a`, `ctx_b`, `endings`, `label`."""

    def question(self, item: Line) -> Line:
        expect(item, activity_label=str, ctx_a=str, ctx_b=str, endings=list)
        context = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
        return {
            "context": without_marks(context),
            "choices": [without_marks(ending) for ending in item["endings"]],
            "answer": number(item, "label"),
        }


@dataclass(frozen=True, kw_only=True)
class Lambada(LineImporter, name="lambada"):
    """LAMBADA: `text`, whose last word is the continuation."""

    def question(self, item: Line) -> Line:
        expect(item, text=str)
        context, _, word = item["text"].rpartition(" ")
        return {"context": context, "continuation": f" {word}"}


@dataclass(frozen=True, kw_only=True)
class WinoGrande(LineImporter, name="winogrande"):
    """WinoGrande, and Winograd in its format: `sentence` with `_`, `option1`, `option2`, `answer`."""

    def question(self, item: Line) -> Line:
        expect(item, sentence=str)
        before, gap, rest = item["sentence"].partition("_")
        if not gap:
            raise ValueError("sentence has no _")
        return {
            "contexts": [before + item["option1"], before + item["option2"]],
            "continuation": f" {rest.strip()}",
            "answer": index(["1", "2"], str(item["answer"]), "answer"),
        }


@dataclass(frozen=True, kw_only=True)
class BoolQ(LineImporter, name="boolq"):
    """BoolQ: `passage`, `question`, and `answer` (true, false) or `label` (1, 0)."""

    def question(self, item: Line) -> Line:
        expect(item, passage=str, question=str)
        return {
            "context": f"{item['passage']}\nQuestion: {item['question']}?\nAnswer:",
            "choices": ["no", "yes"],
            "answer": number(item, "answer" if "answer" in item else "label"),
        }


def index(labels: list[str], label: str, key: str) -> int:
    """Return the index of a label. Raises ValueError if it is not among the labels."""
    if label not in labels:
        raise ValueError(f"{key} is {label!r}, expected one of {', '.join(map(repr, labels))}")
    return labels.index(label)


def number(item: Line, key: str) -> int:
    """Return the number of the right choice. Raises ValueError if `item[key]` is none."""
    if item[key] in ("", None):
        raise ValueError(f"{key} is empty: this split has no answers")
    try:
        return int(item[key])
    except (TypeError, ValueError):
        raise ValueError(f"{key} is {item[key]!r}, expected the number of the right choice") from None


def without_marks(text: str) -> str:
    """Return a text of HellaSwag without WikiHow's marks in brackets."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
