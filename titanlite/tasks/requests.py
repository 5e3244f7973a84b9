"""Requests of tasks to a model, and batches of them: which tokens are scored after which context.

Tokens, truncation and metrics equal lm-evaluation-harness 0.4.13 (its `hf` model), so that a task has the
same result here and on the exported model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from titanlite.data.batch import Batch
from titanlite.losses import IGNORE
from titanlite.tasks.task import Question, Task, line_error, read_questions
from titanlite.tokenizers.base import Tokenizer

SAMPLE_CHARACTERS = 500  # of a context in a sample, from its end, where the question is


@dataclass(frozen=True)
class Request:
    """A context and one choice. `tokens`: both, without the tokens on the left that are too many.
    `num_targets`: the number of tokens at the end that are scored."""

    tokens: Sequence[int]
    num_targets: int


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
            tasks/NAME/acc: multiple choice: questions of [task NAME](data.md#tasks) whose right choice has
                the highest log-likelihood; cloze: continuations that greedy decoding would give
            tasks/NAME/acc_norm, tasks/NAME/acc_bytes: multiple choice: the same for the log-likelihood per
                character, per byte
            tasks/NAME/acc_stderr: standard error of `acc`
            tasks/NAME/perplexity: cloze: exp(-mean log-likelihood of a continuation), not per token
            tasks/NAME/ema_acc, tasks/NAME/ema_acc_norm, tasks/NAME/ema_acc_bytes, tasks/NAME/ema_acc_stderr,
                tasks/NAME/ema_perplexity: with `[ema]`: the same of the [average of the
                weights](optimizers.md#averages-of-weights)
        """
        right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
        for question, own in self._slices():
            choices, (log_likelihoods, misses) = question.choices, scores[own].T
            if question.answer is None:
                right["acc"].append(bool(misses[0] == 0))
                continue
            lengths = {
                "acc": [1] * len(choices),
                "acc_norm": [len(choice) for choice in choices],
                "acc_bytes": [len(choice.encode()) for choice in choices],
            }
            for name, length in lengths.items():
                right[name].append(int(np.argmax(log_likelihoods / length)) == question.answer)
        metrics = {name: float(np.mean(values)) for name, values in right.items() if values}
        if (num := len(self.questions)) > 1:
            metrics["acc_stderr"] = float(np.std(right["acc"], ddof=1)) / num**0.5
        if self.questions[0].answer is None:
            with np.errstate(over="ignore"):  # inf
                metrics["perplexity"] = float(np.exp(-scores[:, 0].mean()))
        return {f"tasks/{self.task.name}/{prefix}{name}": value for name, value in metrics.items()}

    def sample(self, scores: np.ndarray) -> str:
        """The first `num_samples` questions as text: whether the model is right, the end of the context, and
        the choices with their log-likelihoods. `scores`: see metrics."""
        first = islice(self._slices(), self.task.num_samples)
        return "\n\n".join(
            self._sample(question, self.requests[own][0], scores[own]) for question, own in first
        )

    def _sample(self, question: Question, request: Request, scores: np.ndarray) -> str:
        """The sample of one question. `request`: its first request. `scores`: the scores of its requests."""
        log_likelihoods, misses = scores.T
        if question.answer is None:
            is_right, num = misses[0] == 0, request.num_targets
            notes = {0: f"  (most likely: {num - misses[0]:.0f} of {num} tokens)"}
        else:
            chosen = int(np.argmax(log_likelihoods))
            is_right = chosen == question.answer
            notes = {question.answer: "  (right)", chosen: "  (right, chosen)" if is_right else "  (chosen)"}
        context = question.context[-SAMPLE_CHARACTERS:]
        lines = [
            f"task {self.task.name}, line {question.line}: {'right' if is_right else 'wrong'}",
            context if context == question.context else f"...{context}",
        ]
        for i, (choice, value) in enumerate(zip(question.choices, log_likelihoods)):
            lines.append(f"{value:12.4f}  {choice!r}{notes.get(i, '')}")
        return "\n".join(lines)

    def _slices(self) -> Iterator[tuple[Question, slice]]:
        """Each question, with the slice of its requests."""
        end = 0
        for question in self.questions:
            begin, end = end, end + len(question.choices)
            yield question, slice(begin, end)


def open_task(task: Task, tokenizer: Tokenizer, seq_len: int) -> OpenTask:
    """Read and tokenise a task's file. Raises ConfigError, which names the file and the line.

    `seq_len`: the most tokens that the model reads at once; longer contexts lose tokens on the left."""
    questions, requests = read_questions(task), []
    for question in questions:
        delimiter = "" if question.answer is None else task.delimiter
        for choice in question.choices:
            context, targets = encode_pair(tokenizer, question.context, delimiter + choice, task.add_bos)
            if not 0 < len(targets) <= seq_len:
                reason = f"{choice!r} has {len(targets)} tokens after its context, expected 1 to {seq_len}"
                raise line_error(task, question.line, reason)
            requests.append(Request([*context, *targets][-seq_len - 1 :], len(targets)))
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


def batched(requests: Sequence[Request], max_tokens: int) -> list[list[int]]:
    """The indices of the requests, batched by length, the longest first. A batch has at most `max_tokens`
    tokens with padding, or one request. Does not depend on ranks."""
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(requests)), key=lambda i: (-len(requests[i].tokens), i)):
        if batches and (len(batches[-1]) + 1) * width <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = len(requests[index].tokens) - 1  # the last token is only a target
    return batches


def make_task_batch(requests: Sequence[Request]) -> Batch:
    """The requests as one batch, padded on the right to the longest. Only tokens that are scored are targets.
    Without requests, one sequence of padding."""
    length = max((len(request.tokens) - 1 for request in requests), default=1)
    inputs = torch.zeros(max(len(requests), 1), length, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE)
    for row, request in enumerate(requests):
        tokens, end = torch.tensor(request.tokens), len(request.tokens) - 1
        inputs[row, :end] = tokens[:-1]
        targets[row, end - request.num_targets : end] = tokens[-request.num_targets :]
    return Batch(inputs, targets, sum(request.num_targets for request in requests), hash=0)
