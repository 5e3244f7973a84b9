"""CORE's bundle and its evaluation by protocol "core": question by question the answers of plain
loops in fp64 that read the bundle itself."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.core_bundle import Words, write_bundle
from tests.support.gradients import build
from titanlite import cli
from titanlite.config import toml
from titanlite.evaluate import Validation, score_tasks
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.ranks import Ranks
from titanlite.tasks.requests import OpenTask, task_metrics

yaml = pytest.importorskip("yaml")
TOKENIZER = Words()
SEQ_LEN = 20  # fewer than the tokens of most texts with examples
NUM_QUESTIONS = 16


@pytest.fixture(scope="module")
def model() -> ShardedModel:
    return build(1, 0, tied=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: ShardedModel) -> Path:
    def next_piece(text: str) -> str:
        logits = model.logits(torch.tensor([[0, *TOKENIZER.encode(text)]]))[0, -1, : TOKENIZER.vocab_size]
        return TOKENIZER.pieces[int(logits.argmax())]

    folder = tmp_path_factory.mktemp("core")
    source = write_bundle(folder, next_piece, NUM_QUESTIONS)
    assert cli.run(["tasks", "import", "core", str(source), "-o", str(folder / "tasks")]) == 0
    return folder


def opened(folder: Path, seq_len: int = SEQ_LEN, **keys: Any) -> list[OpenTask]:
    tree, locator = toml.read(folder / "tasks/tasks.toml")
    for table in tree["validation"]["tasks"]:
        table |= keys
    validation = toml.build(Validation, {"enable": True, **tree["validation"]}, locator)
    return validation.open_tasks(TOKENIZER, seq_len)


def scores_of(model: ShardedModel, tasks: list[OpenTask]) -> list[Any]:
    rt: Any = SimpleNamespace(mesh=model.mesh, rank=0, device=torch.device("cpu"), ranks=Ranks(Path()))
    return score_tasks(model, tasks, TOKENIZER.vocab_size, 128, rt)


def right_answers(model: ShardedModel, tasks: list[OpenTask]) -> dict[str, list[bool]]:
    """Whether the model is right, by task and question."""
    right: dict[str, list[bool]] = {}
    for task, scores in zip(tasks, scores_of(model, tasks)):
        right[task.task.name] = []
        for question, own in task._slices():
            metrics = OpenTask(task.task, [question], task.requests[own]).metrics(scores[own])
            right[task.task.name].append(metrics[f"tasks/{task.task.name}/acc"] == 1)
    return right


def texts_of(item: dict[str, Any], examples: list[dict[str, Any]], delimiter: str) -> list[str]:
    """The texts of a question, whose last one is the prompt in the case of a cloze."""
    prompt = ""
    for e in examples:
        if "query" in e:
            prompt += e["query"] + delimiter + e["choices"][e["gold"]] + "\n\n"
        elif "context_options" in e:
            prompt += e["context_options"][e["gold"]] + delimiter + e["continuation"] + "\n\n"
        else:
            prompt += e["context"].strip() + delimiter + e["continuation"] + "\n\n"
    if "query" in item:
        return [prompt + item["query"] + delimiter + choice for choice in item["choices"]]
    if "context_options" in item:
        return [prompt + option + delimiter + item["continuation"] for option in item["context_options"]]
    whole = prompt + item["context"].strip() + delimiter
    return [whole + item["continuation"], whole.strip()]


def is_right(model: ShardedModel, item: dict[str, Any], texts: list[str]) -> bool:
    """Whether the model answers a question, by a forward per text and a loop over tokens."""
    ids = [[TOKENIZER.bos, *TOKENIZER.encode(text)] for text in texts]
    shared = 0
    while all(len(row) > shared for row in ids) and len({row[shared] for row in ids}) == 1:
        shared += 1
    ends = 0
    while all(len(row) > ends for row in ids) and len({row[-1 - ends] for row in ids}) == 1:
        ends += 1
    losses = []
    for row in ids if "gold" in item else ids[:1]:
        cut = max(len(row) - SEQ_LEN, 0)
        first = (len(row) - ends if "context_options" in item else shared) - cut
        logits = model.logits(torch.tensor([row[cut:]]))[0, :, : TOKENIZER.vocab_size].double()
        targets = row[cut:][first:]
        if "gold" not in item:
            return all(int(logits[first - 1 + i].argmax()) == token for i, token in enumerate(targets))
        total = 0.0
        for i, token in enumerate(targets):
            total -= float(logits[first - 1 + i, token] - logits[first - 1 + i].exp().sum().log())
        losses.append(total / len(targets) if targets else float("nan"))
    if losses[0] != losses[0]:  # NaN is the minimum of a list if it is the first one
        return item["gold"] == 0
    return item["gold"] == losses.index(min(loss for loss in losses if loss == loss))


def plainly(model: ShardedModel, bundle: Path) -> dict[str, list[bool]]:
    """right_answers, from the bundle."""
    right = {}
    for entry in yaml.safe_load((bundle / "core.yaml").read_text())["icl_tasks"]:
        lines = (bundle / "eval_data" / entry["dataset_uri"]).read_text().splitlines()
        items = [json.loads(line) for line in lines]
        random.Random(1337).shuffle(items)
        answers = []
        for i, item in enumerate(items):
            others = [items[j] for j in range(len(items)) if j != i]
            examples = random.Random(1234 + i).sample(others, entry["num_fewshot"][0])
            delimiter = entry.get("continuation_delimiter", " ")
            answers.append(is_right(model, item, texts_of(item, examples, delimiter)))
        right[entry["label"]] = answers
    return right


def test_the_answers_to_all_questions_are_those_of_plain_loops(model: ShardedModel, folder: Path) -> None:
    tasks = opened(folder)
    right = right_answers(model, tasks)
    assert right == plainly(model, folder / "bundle")
    assert all(0 < sum(right[name]) < NUM_QUESTIONS for name in ("next", "chosen", "chosen_zero", "pronouns"))
    for control in ({"protocol": "harness"}, {"delimiter": "\n"}):
        assert right_answers(model, opened(folder, **control)) != right
    metrics = task_metrics(tasks, scores_of(model, tasks))
    with open(folder / "bundle/eval_meta_data.csv") as file:
        chances = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
    shares = {name: sum(answers) / NUM_QUESTIONS for name, answers in right.items()}
    assert {name: metrics[f"tasks/{name}/acc"] for name in shares} == pytest.approx(shares)
    centered = [(share - chances[name]) / (1 - chances[name]) for name, share in shares.items()]
    assert metrics["tasks/core/centered"] == pytest.approx(sum(centered) / 5)
    assert metrics["tasks/core/centered"] != pytest.approx(sum(shares.values()) / 5)
