"""The example of a task importer: the command finds it by its name, takes its options, and a run scores its
tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import make_job, metrics_of
from titanlite import cli
from titanlite.config import toml

CSV = """subject,question,right,wrong
water,Is rain wet?,yes,no
water,Is sand wet?,no,yes
fire,"Is ice, or fire, hot?",fire,ice
"""


def run(folder: Path, text: str, *options: str) -> int:
    (folder / "quiz.csv").write_text(text)
    arguments = ["tasks", "import", "quiz", str(folder / "quiz.csv"), "-o", str(folder / "tasks")]
    return cli.run([*arguments, "--imports=tests.examples.quiz_importer", *options])


def test_a_run_scores_the_imported_tasks(tmp_path: Path, corpus: Path) -> None:
    assert run(tmp_path, CSV, "--prompt={}") == 0
    tree, _ = toml.read(tmp_path / "tasks/tasks.toml")
    assert [task["name"] for task in tree["validation"]["tasks"]] == ["quiz_water", "quiz_fire"]
    first = '{"context": "Is rain wet?", "choices": ["yes", "no"], "answer": 0}\n'
    assert (tmp_path / "tasks/quiz_water.jsonl").read_text().startswith(first)
    job = make_job(tmp_path, corpus, "--training.steps=1", "--validation.enable")
    with open(tmp_path / "job.toml", "w") as file:
        file.write(toml.dump(job).replace("tasks = []\n", "") + (tmp_path / "tasks/tasks.toml").read_text())
    assert cli.run(["train", str(tmp_path / "job.toml")]) == 0
    metrics = metrics_of(job)[-1]
    centered = [(metrics[f"tasks/quiz_{name}/acc"] - 0.5) / 0.5 for name in ("water", "fire")]
    assert metrics["tasks/quiz/centered"] == pytest.approx(sum(centered) / 2)


def test_a_row_without_an_answer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "subject,question,right\nwater,Is rain wet?,yes\n") == 2
    assert "quiz.csv: a row has no subject, question, right or wrong answer\n" in capsys.readouterr().err
    assert not (tmp_path / "tasks").exists()
