"""Loss masks on several ranks, alone and in a mixture with a source without masks: the loss is the mean over
the targets that count, as transformers computes it, and steps without a target change nothing on any rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.chats import CHATML, TURNS, conversations, write_conversations, write_tokenizer
from tests.support.jobs import make_job, metrics_of
from tests.support.models import family, hugging_face, keys_of
from tests.support.runs import CP, TP, train_on_rank
from titanlite.data.batch import IGNORE
from titanlite.data.dataset import SequenceDataset
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.train import train

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.full
MODEL = family(vocab_size=400, max_position=512)
NUM_SEQUENCES = 10  # of the step; the conversations fill as many
LAYOUTS = {
    "one process": (1, []),
    "dp 2": (2, []),
    "tp 2": (2, [TP]),
    "cp 2": (2, [CP]),
    "dp 2, cp 2": (4, [CP]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a template, conversations.jsonl and text.jsonl."""
    folder = write_tokenizer(tmp_path_factory.mktemp("chat") / "t", CHATML)
    write_conversations(folder / "conversations.jsonl", conversations())
    texts = [text * repeats for text in TURNS for repeats in 2 * [1, 2, 3, 4]]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    hugging_face(MODEL).save_pretrained(folder / "model")
    return folder


def keys(folder: Path, weights: dict[str, int], *overrides: str) -> list[str]:
    """The keys of a run on the sources with these weights."""
    files = {"chat": "conversations.jsonl", "text": "text.jsonl"}
    sources = [
        f"{{name = '{name}', path = ['{folder / files[name]}'], weight = {weight}}}"
        for name, weight in weights.items()
    ]
    return [
        f"--data.sources=[{', '.join(sources)}]",
        "--data.holdout_sequences=0",
        f"--data.cache_dir={folder / 'cache'}",
        "--tokenizer.name=huggingface",
        f"--tokenizer.path={folder}",
        *keys_of(MODEL),
        *overrides,
    ]


def start(
    run_on: Callable[..., Any], tmp_path: Path, num_ranks: int, words: list[str], name: str
) -> list[dict[str, Any]]:
    """Train on `num_ranks` ranks, and return the metrics."""
    if num_ranks == 1:
        train(make_job(tmp_path, tmp_path, *words, name=name))
    else:
        run_on(num_ranks, train_on_rank, tmp_path, tmp_path, words, name, num_ranks)
    return metrics_of(make_job(tmp_path, tmp_path, *words, name=name, world_size=num_ranks))


def documents_in(folder: Path, sequences: SequenceDataset) -> list[tuple[list[int], list[int]]]:
    """The ids of the documents in the first sequences, and which of them count: by transformers' mask for
    conversations, all of a text's."""
    masks = {tuple(ids): mask for ids, mask in masked(folder)}
    documents = []
    for sequence in sequences.training(np.arange(NUM_SEQUENCES)):
        tokens = sequence.tokens[: len(sequence.tokens) - sequence.num_padding]
        for part in np.split(tokens, sequence.document_starts[sequence.document_starts > 0]):
            ids = part.tolist()
            documents.append((ids, masks.get(tuple(ids), [1] * len(ids))))
    return documents


def masked(folder: Path) -> list[tuple[list[int], list[int]]]:
    """The ids and masks of the conversations by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    chats = [tokenizer.apply_chat_template(chat, **options) for chat in conversations()]
    return [(chat["input_ids"], chat["assistant_masks"]) for chat in chats]


def mean_loss(
    folder: Path, documents: list[tuple[list[int], list[int]]], shift: int = 0
) -> tuple[float, int]:
    """The mean over the targets that count, by transformers, and their number."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    total, count = 0.0, 0
    for ids, mask in documents:
        labels = torch.where(torch.tensor(mask).roll(shift) > 0, torch.tensor(ids), IGNORE)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        total += F.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORE, reduction="sum").item()
        count += int((labels[1:] != IGNORE).sum())
    return total / count, count


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_mean_over_the_targets_that_count(
    run_on: Callable[..., Any], tmp_path: Path, folder: Path, layout: str, with_text: bool
) -> None:
    whole = ["--data.packing=best_fit", "--data.mask_documents=true", "--training.seq_len=256"]
    weights = dict.fromkeys(["chat", "text"][: 1 + with_text], 1)
    job = make_job(tmp_path, tmp_path, *keys(folder, weights, *whole))
    sequences = job.data.build(HuggingFace(path=str(folder)).build(), seq_len=256, seed=0)
    documents = documents_in(folder, sequences)
    num_ranks, layout_keys = LAYOUTS[layout]
    batch = [f"--training.global_batch_size={NUM_SEQUENCES}", "--training.local_batch_size=1"]
    initial = f"--checkpoint.initial_load_path={folder / 'model'}"
    words = keys(folder, weights, *whole, *batch, initial, "--training.steps=1", *layout_keys)
    (line,) = start(run_on, tmp_path, num_ranks, words, "run")
    expected, num_targets = mean_loss(folder, documents)
    assert line["train/targets"] == num_targets
    assert line["train/loss"] == pytest.approx(expected, abs=2e-5)
    assert line["train/loss"] != pytest.approx(mean_loss(folder, documents, shift=1)[0], abs=2e-4)


@pytest.mark.parametrize("layout", ["dp 2", "tp 2", "cp 2"])
def test_steps_without_a_target_are_those_of_one_rank(
    run_on: Callable[..., Any], tmp_path: Path, folder: Path, layout: str
) -> None:
    """A rank without a target takes part in a step in which another rank has one."""
    short = ["--training.seq_len=16", "--training.global_batch_size=2", "--training.local_batch_size=1"]
    words = keys(folder, {"chat": 1}, *short, "--training.steps=16", "--ema.enable=true")
    alone = start(run_on, tmp_path, 1, words, "alone")
    num_ranks, layout_keys = LAYOUTS[layout]
    lines = start(run_on, tmp_path, num_ranks, [*words, *layout_keys], "ranks")
    assert [line["train/targets"] for line in lines] == [line["train/targets"] for line in alone]
    empty = [line["train/targets"] == 0 for line in lines]
    assert 0 < sum(empty) < len(empty) - 4
    for ours, theirs, is_empty in zip(lines, alone, empty):
        assert (ours["train/loss"] == "nan") == is_empty
        if not is_empty:
            assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)
