"""`titanlite tasks import` of the files of benchmarks: recorded prompts, the requests of
lm-evaluation-harness's own tasks, and errors in one line. All questions are invented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.core_bundle import YAML
from titanlite import cli
from titanlite.config import toml
from titanlite.config.shipped import find_config
from titanlite.evaluate import Validation
from titanlite.tasks.task import Task, read_questions

ARC = {
    "id": "1",
    "question": {
        "stem": "What is wet?",
        "choices": [{"text": "rain", "label": "A"}, {"text": "sand", "label": "B"}],
    },
    "answerKey": "B",
}
PIQA = {"goal": "To cut bread,", "sol1": "use a knife.", "sol2": "use soup.", "label": 0}
HELLASWAG = {
    "activity_label": "Baking",
    "ctx_a": "A  man is seen. [header] He [title] Steps",
    "ctx_b": "the Man",
    "endings": ["stirs [step] the bowl.", " flies  away.", "x [title] y", "sleeps"],
    "label": 2,
}
LAMBADA = {"text": "He opened the door\nand saw the  cat"}
WINOGRANDE = {
    "sentence": "The cup fell off the tray because _ was wet .",
    "option1": "the cup",
    "option2": "the tray",
    "answer": "2",
}
BOOLQ = {"question": "is rain wet", "passage": "Rain is water.", "title": "Rain", "answer": True}
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arc": (ARC, {"context": "Question: What is wet?\nAnswer:", "choices": ["rain", "sand"], "answer": 1}),
    "piqa": (
        PIQA,
        {
            "context": "Question: To cut bread,\nAnswer:",
            "choices": ["use a knife.", "use soup."],
            "answer": 0,
        },
    ),
    "hellaswag": (
        HELLASWAG,
        {
            "context": "Baking: A man is seen. He. Steps The man",
            "choices": ["stirs the bowl.", "flies away.", "x. y", "sleeps"],
            "answer": 2,
        },
    ),
    "lambada": (LAMBADA, {"context": "He opened the door\nand saw the ", "continuation": " cat"}),
    "winogrande": (
        WINOGRANDE,
        {
            "contexts": [f"The cup fell off the tray because the {word}" for word in ("cup", "tray")],
            "continuation": " was wet .",
            "answer": 1,
        },
    ),
    "boolq": (
        BOOLQ,
        {
            "context": "Rain is water.\nQuestion: is rain wet?\nAnswer:",
            "choices": ["no", "yes"],
            "answer": 1,
        },
    ),
}


def write(path: Path, *items: object) -> Path:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_prompts_of_a_format(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item, line = EXPECTED[name]
    source = write(tmp_path / "it.jsonl", item, item, item)
    folder = tmp_path / "tasks"
    arguments = ["tasks", "import", name, str(source), "-o", str(folder), "--task=mine", "--limit", "2"]
    assert cli.run(arguments) == 0
    assert capsys.readouterr().out == (
        f"{folder}: 1 task; to score: cat {folder}/tasks.toml >> CONFIG.toml, and --validation.enable\n"
    )
    assert lines(folder / "mine.jsonl") == [line, line]
    tree, locator = toml.read(folder / "tasks.toml")
    (task,) = toml.build(Validation, tree["validation"], locator).tasks
    assert task == Task(name="mine", path=str(folder / "mine.jsonl"))
    assert len(read_questions(task)) == 2


def test_two_imports_are_appended_to_a_configuration_with_a_validation(tmp_path: Path) -> None:
    source, config = write(tmp_path / "it.jsonl", ARC), tmp_path / "config.toml"
    text = find_config("gpt_d12").read_text()
    assert "[validation]" in text
    for name in "ab":
        assert cli.run(["tasks", "import", "arc", str(source), f"-o{tmp_path / name}", f"--task={name}"]) == 0
        text += (tmp_path / name / "tasks.toml").read_text()
    config.write_text(text)
    tree, locator = toml.read(config)
    validation = toml.build(Validation, tree["validation"], locator)
    assert [task.name for task in validation.tasks] == ["a", "b"]
    assert (validation.enable, validation.freq) == (True, 250)


def test_labels_of_piqa_from_the_file_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [{key: PIQA[key] for key in ("goal", "sol1", "sol2")}] * 2
    source = write(tmp_path / "valid.jsonl", *items)
    write(tmp_path / "valid-labels.lst", 1, 0)
    arguments = ["tasks", "import", "piqa", str(source), "-o", str(tmp_path / "tasks")]
    assert cli.run(arguments) == 0
    assert [line["answer"] for line in lines(tmp_path / "tasks/valid.jsonl")] == [1, 0]
    write(tmp_path / "valid-labels.lst", 1)
    assert cli.run([*arguments[:-1], str(tmp_path / "other")]) == 2
    assert f"valid-labels.lst has 1 labels for the 2 questions of {source}" in capsys.readouterr().err


def numbered(name: str, i: int) -> dict[str, Any]:
    """A question of a format that differs from others."""
    text = json.dumps(EXPECTED[name][0])
    for word in ("wet", "bread", "seen", "door", "fell"):
        text = text.replace(word, f"{word} {i}")
    item = json.loads(text)
    return item | ({"answer": str(1 + i % 2)} if name == "winogrande" else {})


def as_on_the_hub(name: str, item: dict[str, Any]) -> dict[str, Any]:
    """A question with the columns that lm-evaluation-harness's task reads."""
    if name == "arc":
        choices = item["question"]["choices"]
        columns = {key: [choice[key] for choice in choices] for key in ("text", "label")}
        return {**item, "question": item["question"]["stem"], "choices": columns}
    return {**item, "label": int(item["answer"])} if name == "boolq" else item


HARNESS = {
    "arc": "arc/arc_easy.yaml",
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "winogrande": "winogrande/default.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}


def harness_requests(
    name: str, items: list[dict[str, Any]], pool: list[dict[str, Any]] | None, shots: int
) -> tuple[list[tuple[str, str]], list[Any]]:
    """The requests of the harness's own task, and the answers. `pool`: examples; None: the other items."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install -e '.[harness]'")
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / HARNESS[name])
    splits = {"test": items} | ({} if pool is None else {"train": pool})
    data = {
        split: datasets.Dataset.from_list([as_on_the_hub(name, i) for i in items])
        for split, items in splits.items()
    }
    config |= {
        "custom_dataset": lambda **_: data, "test_split": "test", "num_fewshot": shots,
        "validation_split": None, "training_split": None if pool is None else "train",
        "fewshot_split": "test" if pool is None else "train",
    }  # fmt: skip
    for key in ("dataset_path", "dataset_name", "dataset_kwargs", "tag"):
        config.pop(key, None)
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    answers = [
        task.doc_to_text(doc) if name == "winogrande" else task.doc_to_target(doc) for doc in task.test_docs()
    ]
    return [instance.args for instance in task.instances], answers


@pytest.mark.full
@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize(("shots", "has_pool"), [(0, False), (3, False), (3, True)])
def test_requests_are_those_of_the_harness(name: str, shots: int, has_pool: bool, tmp_path: Path) -> None:
    items = [numbered(name, i) for i in range(8)]
    items[6] = items[3]  # a question that the file has twice
    pool = [numbered(name, i) for i in range(20, 25)] if has_pool else None
    wanted, answers = harness_requests(name, items, pool, shots)
    source = write(tmp_path / "it.jsonl", *items)
    arguments = ["tasks", "import", name, str(source), "-o", str(tmp_path / "tasks"), f"--shots={shots}"]
    if pool is not None:
        arguments.append(f"--examples={write(tmp_path / 'pool.jsonl', *pool)}")
    assert cli.run(arguments) == 0
    questions = read_questions(Task(name="it", path=str(tmp_path / "tasks/it.jsonl")))
    assert [option for question in questions for option in question.options(" ")] == wanted
    if name == "lambada":
        assert [question.choices[0] for question in questions] == answers
    else:
        assert [question.answer for question in questions] == answers
    if shots:
        assert cli.run([*arguments[:5], str(tmp_path / "other"), *arguments[6:], "--seed=1"]) == 0
        assert (tmp_path / "other/it.jsonl").read_text() != (tmp_path / "tasks/it.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["arc", "good.jsonl", "-o", "there"], "there exists; choose another, or delete it"),
        (["arc", "bad.jsonl"], "bad.jsonl, line 2: answerKey is 'C', expected one of 'A', 'B'"),
        (["arc", "good.jsonl", "--examples=bad.jsonl", "--shots=1"], "bad.jsonl, line 2: answerKey is 'C'"),
        (["boolq", "good.jsonl"], "good.jsonl, line 1: passage is missing"),
        (["piqa", "good.jsonl"], "good-labels.lst cannot be read: No such file or directory"),
        (["arc", "torn.jsonl"], "torn.jsonl, line 2: Expecting value"),
        (["arc", "good.jsonl", "--shots=2"], "good.jsonl: --shots=2 is above 1, the number of examples"),
        (["arc", "good.jsonl", "--limit=0"], "command line, --limit: 0 is neither -1 nor at least 1"),
        (
            ["arc", "good.jsonl", "--shot=2"],
            "command line, --shot: unknown key 'shot'; did you mean 'shots'?",
        ),
        (["arcs", "good.jsonl"], "unknown format 'arcs'; did you mean 'arc'?"),
        (["arc", "good.jsonl", "--task=a/b"], "'a/b' is not made of letters, digits"),
        (["arc"], "expected FORMAT SOURCE"),
        (["arc", "good.jsonl", "-o"], "command line, --output: name a new folder"),
        (["arc", "empty.jsonl"], "empty.jsonl has no questions"),
        (["hellaswag", "unlabelled.jsonl"], "line 2: label is empty: this split has no answers"),
        (["boolq", "words.jsonl"], "line 1: answer is 'yes', expected the number of the right choice"),
        (["core", "bundle"], "eval_meta_data.csv has no task 'facts', which core.yaml has"),
        (["core", "no_csv"], "titanlite: no_csv/eval_meta_data.csv cannot be read: No such file"),
        (["core", "good.jsonl"], "good.jsonl is a file; give its directory"),
        (["arc", "good.jsonl", "--imports=no_such_module"], "cannot import 'no_such_module'"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("good.jsonl"), ARC, ARC)
    write(Path("bad.jsonl"), ARC, {**ARC, "answerKey": "C"})
    Path("torn.jsonl").write_text(f'{json.dumps(ARC)}\n{{"id": ')
    Path("empty.jsonl").write_text("\n\n")
    write(Path("words.jsonl"), {**BOOLQ, "answer": "yes"})
    write(Path("unlabelled.jsonl"), {**HELLASWAG, "label": ""})
    Path("unlabelled.jsonl").write_text("\n" + Path("unlabelled.jsonl").read_text())
    for folder in ("there", "no_csv", "bundle"):
        Path(folder).mkdir()
    Path("bundle/core.yaml").write_text(YAML)
    Path("bundle/eval_meta_data.csv").write_text("Eval Task,Random baseline\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert cli.run(["tasks", "import", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    left = {path.name: list(path.iterdir()) for path in (Path("there"), Path("tasks")) if path.exists()}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "tasks") == before
    assert not any(left.values())
