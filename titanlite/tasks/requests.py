"""Requests of tasks to a model, and batches of them: which tokens are scored after which context.

Tokens, truncation and metrics are those of lm-evaluation-harness 0.4.13 (its `hf` model), so that a task has
the same result here and on the exported model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from titanlite.data.batch import Batch
from titanlite.losses import IGNORE
from titanlite.tasks.task import Question, Task, line_error, read_questions
from titanlite.tokenizers.base import Tokenizer


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

    def metrics(self, scores: np.ndarray) -> dict[str, float]:
        """The metrics of the task. `scores`: fp64 [requests, 2], the log-likelihood of each request's
        targets, and how many of them are not the model's most likely token.

        Multiple choice: the share of questions whose right choice has the highest log-likelihood (`acc`), per
        character (`acc_norm`) and per byte (`acc_bytes`). Cloze: the share of continuations that greedy
        decoding would give (`acc`), and exp(-mean log-likelihood) (`perplexity`). `acc_stderr`: the standard
        error of `acc`."""
        right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
        begin = 0
        for question in self.questions:
            choices = question.choices
            log_likelihoods, misses = scores[begin : begin + len(choices)].T
            begin += len(choices)
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
        return {f"tasks/{self.task.name}/{name}": value for name, value in metrics.items()}


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
