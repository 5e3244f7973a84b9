"""Requests of tasks to a model, and batches of them: which tokens are scored after which context.

With protocol "harness", tokens, truncation and metrics equal lm-evaluation-harness 0.4.13 (its `hf` model),
so that a task has the same result here and on the exported model. With "core" they equal nanochat's
evaluation of CORE (Li et al. 2024, arXiv 2406.11794)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from titanlite.data.batch import Batch
from titanlite.losses import IGNORE
from titanlite.tasks.task import Question, Task, line_error, read_questions
from titanlite.tokenizers.base import Tokenizer

SAMPLE_CHARACTERS = 500  # of a context in a sample, from its end, where the question is
SCHEMA_CHARACTERS = 80  # of each context of a schema


@dataclass(frozen=True)
class Request:
    """A context and one choice. `tokens`: both, without the tokens on the left that are too many.
    `num_targets`: the number of tokens at the end that are scored."""

    tokens: Sequence[int]
    num_targets: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", array("i", self.tokens))  # 4 bytes per token, a list needs 36


@dataclass(frozen=True)
class OpenTask:
    """A task with the requests of all its questions, in the order of the questions and their choices."""

    task: Task
    questions: Sequence[Question]
    requests: Sequence[Request]

    def metrics(self, scores: np.ndarray, prefix: str = "") -> dict[str, float]:
        """The metrics of the task, their names behind `tasks/NAME/` and `prefix`. `scores`: fp64 [requests,
        2], the log-likelihood of each request's targets, and how many of them are not the model's most likely
        token.

        Metrics:
            tasks/NAME/acc: multiple choice and schema: questions of [task NAME](tasks.md) whose right choice
                has the highest log-likelihood, with `protocol = "core"` per token; cloze: continuations that
                greedy decoding would give
            tasks/NAME/acc_norm, tasks/NAME/acc_bytes: multiple choice, unless `protocol = "core"`: the same
                for the log-likelihood per character, per byte
            tasks/NAME/acc_stderr: standard error of `acc`
            tasks/NAME/perplexity: cloze: exp(-mean log-likelihood of a continuation), not per token
            tasks/NAME/ema_acc, tasks/NAME/ema_acc_norm, tasks/NAME/ema_acc_bytes, tasks/NAME/ema_acc_stderr,
                tasks/NAME/ema_perplexity: with `[ema]`: the same of the [average of the
                weights](optimizers.md#averages-of-weights)
        """
        right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
        for question, own in self._slices():
            if question.answer is None:
                right["acc"].append(bool(scores[own][0, 1] == 0))
                continue
            right["acc"].append(first_highest(self._judged(own, scores)) == question.answer)
            if question.contexts or self.task.protocol == "core":
                continue
            for name, length in (("acc_norm", len), ("acc_bytes", lambda choice: len(choice.encode()))):
                values = scores[own, 0] / [length(choice) for choice in question.choices]
                right[name].append(first_highest(values) == question.answer)
        metrics = {name: float(np.mean(values)) for name, values in right.items() if values}
        if (num := len(self.questions)) > 1:
            metrics["acc_stderr"] = float(np.std(right["acc"], ddof=1)) / num**0.5
        if self.questions[0].answer is None:
            with np.errstate(over="ignore"):  # inf
                metrics["perplexity"] = float(np.exp(-scores[:, 0].mean()))
        return {f"tasks/{self.task.name}/{prefix}{name}": value for name, value in metrics.items()}

    @property
    def chance(self) -> float:
        """Share of right answers by guessing."""
        if self.task.chance is not None:
            return self.task.chance
        shares = [0.0 if q.answer is None else 1 / q.num_options for q in self.questions]
        return sum(shares) / len(shares)

    def _judged(self, own: slice, scores: np.ndarray) -> np.ndarray:
        """The values of a question's options, of which the highest is the model's answer. An option without
        targets, with which all other choices begin, has NaN."""
        if self.task.protocol == "harness":
            return scores[own, 0]
        with np.errstate(invalid="ignore"):
            return scores[own, 0] / [request.num_targets for request in self.requests[own]]

    def sample(self, scores: np.ndarray) -> str:
        """The first `num_samples` questions as text: whether the model is right, the end of the context, and
        the choices with their log-likelihoods. `scores`: see metrics."""
        first = islice(self._slices(), self.task.num_samples)
        return "\n\n".join(self._sample(question, own, scores) for question, own in first)

    def _sample(self, question: Question, own: slice, scores: np.ndarray) -> str:
        """The sample of one question. `own`: the slice of its requests."""
        log_likelihoods, misses = scores[own].T
        context, options = question.context, question.choices
        if question.answer is None:
            is_right, num = misses[0] == 0, self.requests[own][0].num_targets
            notes = {0: f"  (most likely: {num - misses[0]:.0f} of {num} tokens)"}
        else:
            log_likelihoods = self._judged(own, scores)
            chosen = first_highest(log_likelihoods)
            is_right = chosen == question.answer
            notes = {question.answer: "  (right)", chosen: "  (right, chosen)" if is_right else "  (chosen)"}
        if question.contexts:  # their ends differ
            context = question.choices[0]
            options = tuple(text[-SCHEMA_CHARACTERS:] for text in question.contexts)
        shown = context[-SAMPLE_CHARACTERS:]
        lines = [
            f"task {self.task.name}, line {question.line}: {'right' if is_right else 'wrong'}",
            shown if shown == question.context else f"...{shown}",
        ]
        for i, (option, value) in enumerate(zip(options, log_likelihoods)):
            lines.append(f"{value:12.4f}  {option!r}{notes.get(i, '')}")
        return "\n".join(lines)

    def _slices(self) -> Iterator[tuple[Question, slice]]:
        """Each question, with the slice of its requests."""
        end = 0
        for question in self.questions:
            begin, end = end, end + question.num_options
            yield question, slice(begin, end)


def first_highest(values: np.ndarray) -> int:
    """The index of the highest value, the first of several. NaN is the highest only if it is the first."""
    return max(range(len(values)), key=values.__getitem__)


def task_metrics(
    tasks: Sequence[OpenTask], scores: Sequence[np.ndarray], prefix: str = ""
) -> dict[str, float]:
    """The metrics of tasks and of their groups. `scores`: of each task, and `prefix`: see OpenTask.metrics.

    Metrics:
        tasks/GROUP/centered: mean over the tasks of [group GROUP](tasks.md#core) of (`acc` - `chance`) / (1 -
            `chance`): 0 for guessing, 1 if all is right; of the group that `titanlite tasks import core`
            writes, this is CORE
        tasks/GROUP/ema_centered: with `[ema]`: the same of the average of the weights
    """
    metrics, groups = dict[str, float](), dict[str, list[float]]()
    for task, own in zip(tasks, scores):
        metrics |= task.metrics(own, prefix)
        centered = (metrics[f"tasks/{task.task.name}/{prefix}acc"] - task.chance) / (1 - task.chance)
        groups.setdefault(task.task.group, []).append(centered)
    groups.pop("", None)
    return metrics | {f"tasks/{name}/{prefix}centered": sum(all) / len(all) for name, all in groups.items()}


def open_task(task: Task, tokenizer: Tokenizer, seq_len: int) -> OpenTask:
    """Read and tokenise a task's file. Raises ConfigError, which names the file and the line.

    `seq_len`: the most tokens that the model reads at once; longer contexts lose tokens on the left."""
    questions, requests = read_questions(task), []
    is_core = task.protocol == "core"
    # CORE counts the last token, which is only a target, among the tokens of a text that are kept.
    num_kept = seq_len if is_core else seq_len + 1
    for question in questions:
        options = question.options(task.delimiter)
        least = 0 if is_core and question.kind == "multiple choice" else 1  # see OpenTask._judged
        try:
            encoded = (
                encode_core(tokenizer, question, options)
                if is_core
                else [encode_pair(tokenizer, *option, task.add_bos) for option in options]
            )
            for (_, continuation), (context, targets) in zip(options, encoded):
                if not least <= len(targets) < num_kept:
                    reason = f"tokens after its context, expected 1 to {num_kept - 1}"
                    raise ValueError(f"{continuation!r} has {len(targets)} {reason}")
                requests.append(Request([*context, *targets][-num_kept:], len(targets)))
        except ValueError as e:
            raise line_error(task, question.line, str(e)) from None
    return OpenTask(task, questions, requests)


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str, add_bos: bool
) -> tuple[list[int], list[int]]:
    """The tokens of a context and of its continuation.

    White space at the end of the context belongs to the continuation, because most tokenizers join it with
    the next word. The continuation has the tokens of the whole text after as many as the context has
    alone."""
    stripped = context.rstrip()
    context, continuation = stripped, context[len(stripped) :] + continuation
    tokens = tokenizer.encode(context)
    targets = tokenizer.encode(context + continuation)[len(tokens) :]
    return [tokenizer.bos] * (add_bos or not tokens) + tokens, targets


def encode_core(
    tokenizer: Tokenizer, question: Question, options: Sequence[tuple[str, str]]
) -> list[tuple[list[int], list[int]]]:
    """The tokens of each option: before its targets, and its targets. Raises ValueError.

    Each whole text is tokenised. Targets of choices begin where the tokens of the choices first differ.
    Targets of a schema are the tokens with which all its texts end. Targets of a cloze follow the tokens of
    the context without blanks at its end."""
    texts = [[tokenizer.bos, *tokenizer.encode(context + rest)] for context, rest in options]
    if question.contexts:
        num = num_common([text[:0:-1] for text in texts])  # BOS is no target
        return [(text[: len(text) - num], text[len(text) - num :]) for text in texts]
    if question.answer is not None:
        num = num_common(texts)
    else:
        context = [tokenizer.bos, *tokenizer.encode(question.context.rstrip())]
        num = num_common([context, *texts])
        if num < len(context):
            raise ValueError("the tokens of the context are not the first tokens of the whole text")
    return [(text[:num], text[num:]) for text in texts]


def num_common(texts: Sequence[Any]) -> int:
    """The number of tokens with which all texts begin."""
    first, last = min(texts), max(texts)  # in the order of a dictionary
    return next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), len(first))


@dataclass(frozen=True)
class Row:
    """A sequence of a batch: the first `num_shared` tokens of its requests, which are equal, then the further
    inputs of each request. A single request shares no tokens. `numbers`: of the requests."""

    requests: Sequence[Request]
    numbers: Sequence[int]
    num_shared: int = 0

    @property
    def length(self) -> int:
        """The number of inputs. The last token of a request is only a target."""
        return self.num_shared + sum(len(r.tokens) - 1 - self.num_shared for r in self.requests)


def make_rows(requests: Sequence[Request], sizes: Iterable[int], max_tokens: int) -> list[Row]:
    """Sequences for all requests. `sizes`: how many requests follow each other that may share their first
    tokens in one sequence of at most `max_tokens`: those of a question."""
    rows, end = list[Row](), 0
    for size in sizes:
        begin, end = end, end + size
        own, numbers = requests[begin:end], range(begin, end)
        # The token that predicts a request's first target belongs to the request.
        most = min(len(request.tokens) - 1 - request.num_targets for request in own)
        row = Row(own, numbers, min(num_common([request.tokens for request in own]), most))
        if size > 1 and (row.num_shared == 0 or row.length > max_tokens):
            rows += [Row([request], [number]) for request, number in zip(own, numbers)]
        else:
            rows.append(row if size > 1 else Row(own, numbers))
    return rows


def batched(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """The rows, batched by length, the longest first, those that share tokens before the others. A batch has
    at most `max_tokens` tokens with padding, or one row. Does not depend on ranks."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (row.num_shared == 0, -row.length)):
        first = batches[-1][0] if batches else row
        is_alike = bool(batches) and (first.num_shared == 0) == (row.num_shared == 0)
        if is_alike and (len(batches[-1]) + 1) * first.length <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def make_task_batch(rows: Sequence[Row]) -> tuple[Batch, torch.Tensor, int]:
    """The rows as one batch, padded on the right to the longest. Only tokens that are scored are targets.
    Without rows, one sequence of padding. The other values: for ShardedModel.score, the number of each
    token's request in its row, int64, from 1, and the most requests of a row. The batch has positions if rows
    share tokens."""
    length = max((row.length for row in rows), default=1)
    inputs = torch.zeros(max(len(rows), 1), length, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE)
    positions, segments = torch.zeros_like(inputs), torch.zeros_like(inputs)
    for i, row in enumerate(rows):
        end = row.num_shared
        inputs[i, :end] = torch.tensor(row.requests[0].tokens[:end])
        positions[i, :end] = torch.arange(end)
        for number, request in enumerate(row.requests, 1):
            tokens = torch.tensor(request.tokens[row.num_shared :])
            begin, end = end, end + len(tokens) - 1
            inputs[i, begin:end] = tokens[:-1]
            positions[i, begin:end] = row.num_shared + torch.arange(end - begin)
            targets[i, end - request.num_targets : end] = tokens[len(tokens) - request.num_targets :]
            segments[i, begin:end] = number
    num_targets = sum(request.num_targets for row in rows for request in row.requests)
    are_shared = any(row.num_shared for row in rows)
    batch = Batch(inputs, targets, num_targets, hash=0, positions=positions if are_shared else None)
    return batch, segments, max((len(row.requests) for row in rows), default=1)
