"""Files of tasks: their questions, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titanlite.config.component import ConfigError
from titanlite.tasks.task import Question, Task, read_questions

CHOICE = {"context": "c", "choices": ["a", "b"], "answer": 1}
CLOZE = {"context": "", "continuation": "x"}
SCHEMA = {"contexts": ["a", "b"], "continuation": "x", "answer": 1}


def task(folder: Path, *lines: object, limit: int = -1) -> Task:
    """A task of these lines; strings are written as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "t.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return Task(name="t", path=str(folder / "t.jsonl"), limit=limit)


def test_questions_of_a_file(tmp_path: Path) -> None:
    third = {**CHOICE, "answer": 0, "id": 7}
    questions = read_questions(task(tmp_path, CHOICE, "", third))
    assert questions == [Question("c", ("a", "b"), 1, 1), Question("c", ("a", "b"), 0, 3)]
    assert read_questions(task(tmp_path, CLOZE)) == [Question("", ("x",), None, 1)]
    assert len(read_questions(task(tmp_path, CLOZE, CLOZE, "not JSON", limit=2))) == 2
    (schema,) = read_questions(task(tmp_path, SCHEMA))
    assert schema == Question("", ("x",), 1, 1, ("a", "b"))
    assert schema.options(" ") == [("a", "x"), ("b", "x")]
    assert questions[0].options(", ") == [("c", ", a"), ("c", ", b")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("3", "3 is not an object"),
        ({"choices": ["a", "b"], "answer": 1}, "context is missing"),
        ({"context": "c"}, "neither choices nor continuation is given"),
        ({"context": "c", "continuation": ""}, "a choice or continuation is empty"),
        ({**CHOICE, "choices": ["a"]}, "a question has at least 2 choices, this one has 1"),
        ({**CHOICE, "choices": ["a", 3]}, "choices are not all strings"),
        ({**CHOICE, "answer": 2}, "answer is 2, expected 0 to 1"),
        ({**CHOICE, "answer": -1}, "answer is -1, expected 0 to 1"),
        ({**CHOICE, "answer": "a"}, "answer is 'a', not an integer"),
        ({**CHOICE, "answer": True}, "answer is True, not an integer"),
        (CLOZE, "multiple choice and cloze are mixed; put them into two tasks"),
        (SCHEMA, "multiple choice and schema are mixed; put them into two tasks"),
        ({**SCHEMA, "contexts": ["a"]}, "a question has at least 2 contexts, this one has 1"),
        ({**SCHEMA, "continuation": 3}, "continuation is 3, not a string"),
        ({**SCHEMA, "continuation": ""}, "a choice or continuation is empty"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_questions(task(tmp_path, CHOICE, "", line))
    assert str(error.value).startswith(f"{tmp_path}/t.jsonl, line 3: {reason}")
    assert "\n" not in str(error.value)
    assert error.value.key == "validation.tasks"


def test_files_without_questions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no questions"):
        read_questions(task(tmp_path, ""))
    with pytest.raises(ConfigError, match=r"cannot read '.*none.jsonl': No such file or directory"):
        read_questions(Task(name="t", path=str(tmp_path / "none.jsonl")))
    (tmp_path / "t.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match=r"cannot read .*can't decode byte 0xff"):
        read_questions(Task(name="t", path=str(tmp_path / "t.jsonl")))


@pytest.mark.parametrize(
    "keys",
    [
        *({"name": "a/b"}, {"name": ""}, {"limit": 0}, {"limit": -2}, {"num_samples": -1}),
        *({"group": "a/b"}, {"chance": 1.0}, {"chance": -0.1}, {"protocol": "core", "add_bos": False}),
    ],
)
def test_wrong_values_of_keys(keys: dict) -> None:
    with pytest.raises(ConfigError):
        Task(**{"name": "t", "path": "t.jsonl", **keys})
