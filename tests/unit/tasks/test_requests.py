"""Requests, their batches, and the metrics of hand-made scores."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.config.component import ConfigError
from titanlite.losses import IGNORE
from titanlite.tasks.requests import (
    OpenTask,
    Request,
    Row,
    batched,
    encode_pair,
    make_rows,
    make_task_batch,
    open_task,
    task_metrics,
)
from titanlite.tasks.task import Question, Task
from titanlite.tokenizers.base import Tokenizer
from titanlite.tokenizers.bytes import Bytes


class Joining(Tokenizer):
    """An id per character, but a blank and the next letter are one token, as in byte-level BPE."""

    bos, eos, vocab_size = 1, 2, 1000

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, character in enumerate(text):
            if i and text[i - 1] == " " and character != " ":
                ids[-1] = 500 + ord(character)
            else:
                ids.append(ord(character))
        return ids


def test_white_space_before_a_continuation_belongs_to_it() -> None:
    a, b, blank_b = ord("a"), ord("b"), 500 + ord("b")
    assert encode_pair(Joining(), "a", " b", add_bos=False) == ([a], [blank_b])
    assert encode_pair(Joining(), "a ", "b", add_bos=False) == ([a], [blank_b])
    assert encode_pair(Joining(), "a", "b", add_bos=True) == ([1, a], [b])
    assert encode_pair(Joining(), "a \n", "b", add_bos=False)[0] == [a]


@pytest.mark.parametrize("add_bos", [True, False])
def test_an_empty_context_is_one_bos(add_bos: bool) -> None:
    assert encode_pair(Joining(), "", "b", add_bos) == ([1], [ord("b")])
    assert encode_pair(Joining(), " ", "b", add_bos) == ([1], [500 + ord("b")])


def opened(folder: Path, *lines: dict, seq_len: int = 8, protocol: Any = "harness") -> OpenTask:
    (folder / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = Task(name="t", path=str(folder / "t.jsonl"), protocol=protocol)
    return open_task(task, Bytes().build(), seq_len)


def test_requests_of_a_file(tmp_path: Path) -> None:
    bos = Bytes().build().bos
    choices = opened(tmp_path, {"context": "a", "choices": ["b", "cd"], "answer": 0})
    assert [list(r.tokens) for r in choices.requests] == [[bos, *b"a b"], [bos, *b"a cd"]]
    assert [r.num_targets for r in choices.requests] == [2, 3]  # with the delimiter
    cloze = opened(tmp_path, {"context": "0123456789", "continuation": "xy"})
    assert cloze.requests == [Request(list(b"3456789xy"), 2)]  # seq_len + 1 tokens: the last is only a target
    schema = opened(tmp_path, {"contexts": ["a", "bc"], "continuation": "d", "answer": 0})
    assert schema.requests == [Request([bos, *b"ad"], 1), Request([bos, *b"bcd"], 1)]


def test_requests_of_protocol_core(tmp_path: Path) -> None:
    """Targets begin where choices differ, are what the texts of a schema share at their ends, and of a cloze
    follow the context without its blanks."""
    bos = Bytes().build().bos

    def requests(line: dict) -> list[Request]:
        return list(opened(tmp_path, line, protocol="core").requests)

    choices = requests({"context": "a", "choices": ["bcd", "be"], "answer": 0})
    assert choices == [Request([bos, *b"a bcd"], 2), Request([bos, *b"a be"], 1)]
    choices = requests({"context": "0123456", "choices": ["b", "bc"], "answer": 0})
    assert choices == [Request(list(b"0123456 b"[-8:]), 0), Request(list(b"0123456 bc"[-8:]), 1)]
    schema = requests({"contexts": ["ax", "bcx"], "continuation": "d", "answer": 0})
    assert schema == [Request([bos, *b"axd"], 2), Request([bos, *b"bcxd"], 2)]
    schema = requests({"contexts": ["a", "a"], "continuation": "d", "answer": 0})
    assert schema == [Request([bos, *b"ad"], 2)] * 2  # BOS is no target
    assert requests({"context": "a \n", "continuation": "x"}) == [Request([bos, *b"a \nx"], 3)]
    with pytest.raises(ConfigError, match=r"line 1: 'xxxxxxxx' has 8 tokens .* expected 1 to 7"):
        requests({"context": "a", "continuation": "x" * 8})


def test_a_context_whose_tokens_change_with_the_continuation_is_refused_by_core(tmp_path: Path) -> None:
    class Pairs(Bytes().build().__class__):  # type: ignore[misc]
        def encode(self, text: str) -> list[int]:
            return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    line = {"context": "abc", "continuation": "de"}
    (tmp_path / "t.jsonl").write_text(json.dumps(line))
    task = Task(name="t", path=str(tmp_path / "t.jsonl"), protocol="core")
    with pytest.raises(ConfigError, match=r"t.jsonl, line 1: the tokens of the context are not the first"):
        open_task(task, Pairs(), 8)


def test_a_continuation_that_is_too_long_is_named(tmp_path: Path) -> None:
    lines = [{"context": "a", "continuation": "x" * 8}, {"context": "a", "continuation": "x" * 9}]
    with pytest.raises(ConfigError, match=r"t.jsonl, line 2: 'xxxxxxxxx' has 9 tokens .* expected 1 to 8"):
        opened(tmp_path, *lines)


def test_batches_have_every_request_once_and_bounded_size() -> None:
    rng = random.Random(0)
    requests = [Request([0] * rng.randint(2, 40), 1) for _ in range(200)]
    batches = batched(make_rows(requests, [1] * 200, 100), max_tokens=100)
    assert sorted(i for batch in batches for row in batch for i in row.numbers) == list(range(200))
    lengths = [[row.length for row in batch] for batch in batches]
    assert all(max(batch) * len(batch) <= 100 for batch in lengths)
    flat = [length for batch in lengths for length in batch]
    assert flat == sorted((len(request.tokens) - 1 for request in requests), reverse=True)
    assert len(batches) < sum(flat) / 100 * 1.3  # little padding
    long = make_rows([Request([0] * 50, 1)] * 2, [1, 1], 10)
    assert batched(long, max_tokens=10) == [[long[0]], [long[1]]]
    assert batched([], max_tokens=10) == []


def test_choices_share_the_tokens_before_the_last_one_of_their_context() -> None:
    """The last one predicts their first tokens, which differ."""
    choices = [Request([1, 2, 3, 4, 5], 2), Request([1, 2, 3, 6], 1)]
    schema = [Request([1, 2, 7, 8], 2), Request([1, 2, 9, 9, 8], 2), Request([1, 2, 8], 0)]
    others = [Request([1, 2], 1), Request([3, 2], 1)]
    requests = [*choices, *schema, *others, Request([1, 2, 3], 2)]
    rows = make_rows(requests, [2, 3, 2, 1], 8)
    assert rows == [
        Row(choices, range(2), 2),
        Row(schema, range(2, 5), 1),
        Row(others[:1], [5]),
        Row(others[1:], [6]),
        Row(requests[7:], range(7, 8)),
    ]
    assert [row.length for row in rows] == [5, 7, 1, 1, 2]
    assert [row.num_shared for row in make_rows(requests, [2, 3, 2, 1], 6)] == [2, 0, 0, 0, 0, 0, 0]
    # Those that share come first, and are not mixed with others.
    assert batched(rows, 100) == [[rows[1], rows[0]], [rows[4], rows[2], rows[3]]]
    batch, segments, num_segments = make_task_batch([rows[1], rows[0]])
    assert num_segments == 3
    assert batch.positions is not None
    assert batch.inputs.tolist() == [[1, 2, 7, 2, 9, 9, 2], [1, 2, 3, 4, 3, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 1, 2, 3, 1], [0, 1, 2, 3, 2, 0, 0]]
    assert segments.tolist() == [[0, 1, 1, 2, 2, 2, 3], [0, 0, 1, 1, 2, 0, 0]]
    no = IGNORE
    assert batch.targets.tolist() == [[no, 7, 8, no, 9, 8, no], [no, no, 4, 5, 6, no, no]]
    assert batch.num_targets == 7


def test_a_batch_scores_only_the_continuations() -> None:
    rows = make_rows([Request([5, 6, 7, 8], 2), Request([9, 4], 1), Request([5, 6], 0)], [1, 1, 1], 9)
    batch, segments, num_segments = make_task_batch(rows)
    assert batch.inputs.tolist() == [[5, 6, 7], [9, 0, 0], [5, 0, 0]]
    assert batch.targets.tolist() == [[IGNORE, 7, 8], [4, IGNORE, IGNORE], [IGNORE] * 3]
    assert segments.tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert (batch.num_targets, batch.positions, num_segments) == (3, None, 1)
    padding, _, num_segments = make_task_batch([])
    assert num_segments == 1
    assert padding.inputs.shape == (1, 1)
    assert padding.targets.tolist() == [[IGNORE]]


def scored(questions: list[Question], scores: list[list[float]], prefix: str = "") -> dict[str, float]:
    requests = [Request([0, 1], 1)] * len(scores)
    return OpenTask(Task(name="t", path="t.jsonl"), questions, requests).metrics(np.array(scores), prefix)


def test_metrics_of_multiple_choice() -> None:
    """The first choice has the highest log-likelihood, the second per character, the third per byte."""
    choices = ("ab", "abcde", "\u4e16\u754c\u4e16")  # 2, 5 and 3 characters; 2, 5 and 9 bytes
    scores = [[-2.0, 1], [-4.0, 0], [-6.0, 0]]
    for answer, name in enumerate(("acc", "acc_norm", "acc_bytes")):
        metrics = scored([Question("c", choices, answer, 1)], scores)
        assert [key for key, value in metrics.items() if value] == [f"tasks/t/{name}"]
    questions = [Question("c", choices, 0, 1), Question("c", ("x", "y"), 0, 2)]
    metrics = scored(questions, [*scores, [-1.0, 1], [-0.5, 0]])
    assert metrics == {
        "tasks/t/acc": 0.5, "tasks/t/acc_norm": 0.0, "tasks/t/acc_bytes": 0.0, "tasks/t/acc_stderr": 0.5,
    }  # fmt: skip


def test_metrics_of_a_schema() -> None:
    questions = [Question("", ("x",), answer, 1, ("a", "b")) for answer in (0, 1)]
    metrics = scored(questions, [[-2.0, 1], [-3.0, 0], [-1.0, 1], [-1.0, 0]])
    assert metrics == {"tasks/t/acc": 0.5, "tasks/t/acc_stderr": 0.5}  # of equal ones the first is chosen


def test_core_compares_choices_per_token() -> None:
    questions = [Question("c", ("a", "b", "c"), answer, 1) for answer in (1, 0)]
    scores = np.array([[-2.0, 1], [-3.0, 1], [0.0, 0], [0.0, 0], [-3.0, 1], [-2.0, 1]])
    requests = [Request([0] * 4, num) for num in (1, 2, 0, 0, 2, 1)]
    task = OpenTask(Task(name="t", path="t.jsonl", protocol="core"), questions, requests)
    # A choice without targets is chosen if it is the first one.
    assert task.metrics(scores) == {"tasks/t/acc": 1.0, "tasks/t/acc_stderr": 0.0}


def test_groups_have_the_mean_of_centered_accuracies() -> None:
    choice = [Question("c", ("a", "b"), answer, 1) for answer in (0, 0, 0, 1)]
    schema = [Question("", ("x",), 0, 1, ("a", "b", "c", "d", "e"))]
    requests = [Request([0, 1], 1)] * 8

    def opened(name: str, questions: list[Question], **keys: Any) -> OpenTask:
        return OpenTask(Task(name=name, path="t.jsonl", **keys), questions, requests)

    tasks = [opened("a", choice, group="g"), opened("b", schema, group="g"), opened("c", choice)]
    scores = [np.array([[-1.0, 0], [-2.0, 0]] * 4), np.array([[-2.0, 0], *[[-1.0, 0]] * 4])]
    metrics = task_metrics(tasks, [*scores, scores[0]], "ema_")
    assert [metrics[f"tasks/{name}/ema_acc"] for name in "abc"] == [0.75, 0.0, 0.75]
    assert metrics["tasks/g/ema_centered"] == pytest.approx((0.5 - 0.25) / 2)
    assert {key.split("/")[1] for key in metrics if key.endswith("centered")} == {"g"}
    tasks[1] = opened("b", schema, group="g", chance=0.5)
    assert task_metrics(tasks[:2], scores)["tasks/g/centered"] == pytest.approx((0.5 - 1) / 2)
    cloze = opened("d", [Question("c", ("x",), None, 1)])
    assert (cloze.chance, tasks[0].chance) == (0, 0.5)


def test_metrics_of_a_cloze() -> None:
    questions = [Question("c", ("x",), None, line) for line in (1, 2, 3)]
    metrics = scored(questions, [[-1.0, 0], [-2.0, 1], [-6.0, 2]])
    assert metrics == {
        "tasks/t/acc": pytest.approx(1 / 3),
        "tasks/t/acc_stderr": pytest.approx(1 / 3),
        "tasks/t/perplexity": pytest.approx(math.exp(3)),
    }
    assert scored(questions, [[-1e4, 1]] * 3)["tasks/t/perplexity"] == math.inf
    averaged = scored(questions, [[-1.0, 0]] * 3, "ema_")
    assert averaged["tasks/t/ema_acc"] == 1
    assert all(key.startswith("tasks/t/ema_") for key in averaged)


def sample(questions: list[Question], scores: list[list[float]], num_samples: int) -> str:
    task = Task(name="t", path="t.jsonl", num_samples=num_samples)
    return OpenTask(task, questions, [Request([0] * 8, 3)] * len(scores)).sample(np.array(scores))


def test_samples_show_the_choices_with_their_log_likelihoods() -> None:
    questions = [
        Question("What?\nIt is", ("a", "b", "c\n"), 1, 4),
        Question("x" * 600, ("d", "e"), 1, 6),
        Question("left out", ("f", "g"), 0, 7),
    ]
    scores = [[-1.25, 0], [-3.5, 1], [-12.0, 2], [-2.0, 0], [-1.0, 0], [-1.0, 0], [-2.0, 0]]
    first, second = sample(questions, scores, 2).split("\n\n")
    assert first.splitlines() == [
        "task t, line 4: wrong",
        "What?",
        "It is",
        "     -1.2500  'a'  (chosen)",
        "     -3.5000  'b'  (right)",
        "    -12.0000  'c\\n'",
    ]
    assert second.splitlines() == [
        "task t, line 6: right",
        "..." + "x" * 500,
        "     -2.0000  'd'",
        "     -1.0000  'e'  (right, chosen)",
    ]
    assert sample(questions, scores, 9).startswith(f"{first}\n\n{second}\n\ntask t, line 7: right\n")
    assert sample(questions, scores, 0) == ""


def test_samples_of_a_schema() -> None:
    question = Question("", (" so",), 0, 3, ("It is", "They are"))
    assert sample([question], [[-1.5, 0], [-2.0, 1]], 1).splitlines() == [
        "task t, line 3: right",
        "... so",
        "     -1.5000  'It is'  (right, chosen)",
        "     -2.0000  'They are'",
    ]


def test_samples_of_a_cloze() -> None:
    questions = [Question("It is", (" so",), None, 1), Question("", ("x",), None, 2)]
    assert sample(questions, [[-1.0, 0], [-2.0, 1]], 2).splitlines() == [
        "task t, line 1: right",
        "It is",
        "     -1.0000  ' so'  (most likely: 3 of 3 tokens)",
        "",
        "task t, line 2: wrong",
        "",
        "     -2.0000  'x'  (most likely: 2 of 3 tokens)",
    ]
