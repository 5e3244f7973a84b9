"""The hand-over to EleutherAI's lm-evaluation-harness: its `hf` model type opens an export and finds the log
likelihoods that titanlite's own model has.

The harness is no dependency: what its HFLM does with a directory (0.4.13) is done here by hand, and with the
harness itself where it is installed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

from tests.support.jobs import make_job, metrics_of
from titanlite import cli
from titanlite.interop.huggingface import open_hugging_face
from titanlite.interop.weights import load_weights
from titanlite.models.base import Decoder
from titanlite.tokenizers.base import Tokenizer
from titanlite.train import train

transformers = pytest.importorskip("transformers")

RANKS = Path(__file__).resolve().parents[3] / "assets/tokenizer/stdlib.tiktoken"
PAIRS = [("The def of main", " number 5 is"), ("", " abc def"), ("na\u00efve x =", " 10 ** 3\n\n")]
TEXT = "def main(argv):\n    return 0\n"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Decoder, Tokenizer]:
    """An export of a run with a padded vocabulary; the run's model in fp32; its tokenizer."""
    folder = tmp_path_factory.mktemp("evaluation")
    job = make_job(
        folder, corpus, "--training.steps=5", f"--tokenizer={{name = 'tiktoken', path = '{RANKS}'}}",
        "--model.overrides.vocab_size=8256", "--model.overrides.max_position=512",
    )  # fmt: skip
    train(job)
    assert cli.run(["export", str(job.folder), str(folder / "it"), "--dtype", "float32"]) == 0
    tokenizer = job.tokenizer.build()
    model_family = dataclasses.replace(
        job.model, overrides={**job.model.overrides, "vocab_size": tokenizer.vocab_size}
    )
    net = model_family.build()
    load_weights(open_hugging_face(folder / "it"), net)
    return folder / "it", net, tokenizer


def import_harness() -> None:
    """Skip the test if lm-evaluation-harness is not installed."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install -e '.[harness]'")


def log_likelihood(net: Decoder, before: list[int], tokens: list[int]) -> float:
    """Of `tokens` after `before`, by titanlite's model."""
    inputs = torch.tensor([before + tokens])
    with torch.no_grad():
        log_p = torch.log_softmax(net(inputs[:, :-1]).double(), -1)[0, len(before) - 1 :]
    return sum(log_p[i, token].item() for i, token in enumerate(tokens))


def ours(net: Decoder, tokenizer: Tokenizer, context: str, continuation: str) -> float:
    """As documents are framed in training: BOS, then the text."""
    whole, part = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
    return log_likelihood(net, [tokenizer.bos, *whole[:part]], whole[part:])


CHOICES = [
    {"context": "The def of main", "choices": ["number", "na\u00efve caf\u00e9", "x"], "answer": 1},
    {"context": "return self.assertEqual( ", "choices": ["a", "the value of the", "None, 10"], "answer": 2},
    {"context": "", "choices": ["import os", "zq zq"], "answer": 0},
    {"context": "def f(x):\n    " * 20, "choices": ["return x", "class"], "answer": 0},  # truncated
    {"context": "not in the", "choices": ["e", "list of all", "\u4e16\u754c", "9"], "answer": 3},
]
CLOZES = [
    {"context": "for key, value in", "continuation": " items"},
    {"context": "the test case is ", "continuation": "the\n"},
    {"context": "", "continuation": "x"},
    {"context": "self." * 40, "continuation": "self"},
    *({"context": "abc", "continuation": text} for text in (*" abcdefghij", " a", " b", " j", "the")),
]
SCHEMAS = [
    {"contexts": ["The def of main", "The class"], "continuation": " number 5 is", "answer": 0},
    {"contexts": ["return x ", "return self.x", "not "], "continuation": "in the list", "answer": 2},
    {"contexts": ["def f(x):\n    " * 20, "f"], "continuation": "return x", "answer": 1},  # truncated
    {"contexts": [" ", "abc"], "continuation": "x", "answer": 0},
]
FAMILIES = {  # and overrides of the base job
    "llama3": [],
    "gemma3": [],
    "olmo3": [],
    "gpt_oss": ["--model.overrides.hidden_dim=0"],
    "qwen3_5": ["--model.overrides.n_layers=4"],
    "qwen3_5_moe": ["--model.overrides.n_layers=4", "--model.overrides.hidden_dim=0"],
}
MULTIPLE_CHOICE = {
    "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "acc_bytes"}],
}  # fmt: skip
SCHEMA = {
    "output_type": "multiple_choice", "doc_to_text": "answer", "doc_to_choice": "contexts",
    "doc_to_target": "{{continuation}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
CLOZE = {
    "output_type": "loglikelihood", "doc_to_target": "{{continuation}}",
    "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "add_bos"),
    [
        ("llama3", True),
        ("llama3", False),
        *((family, True) for family in FAMILIES if family != "llama3"),
    ],
)
def test_tasks_have_the_harness_results(tmp_path: Path, corpus: Path, family: str, add_bos: bool) -> None:
    """Of the exported model and of the average of its weights, with contexts that are empty, end in white
    space, and are too long."""
    import_harness()
    from lm_eval import simple_evaluate

    tasks, configs = [], []
    for name, lines, config in (
        ("choices", CHOICES, MULTIPLE_CHOICE),
        ("schemas", SCHEMAS if add_bos else SCHEMAS[:-1], SCHEMA),  # the harness fails at " " without BOS
        ("clozes", CLOZES, CLOZE),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        tasks.append(f"{{name = '{name}', path = '{file}', add_bos = {str(add_bos).lower()}}}")
        data = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")}
        common = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        configs.append({"task": name, **common, "doc_to_text": "{{context}}", **config})
    shape = [f"--model.name={family}", *FAMILIES[family]]
    job = make_job(
        tmp_path, corpus, *shape, f"--tokenizer={{name = 'tiktoken', path = '{RANKS}'}}",
        "--training.steps=5", "--model.overrides.vocab_size=8256", "--validation.enable",
        "--optimizer.lr=0.05", f"--validation.tasks=[{', '.join(tasks)}]", "--ema.enable", "--ema.decay=0.5",
    )  # fmt: skip
    train(job)
    actual = {k: v for k, v in metrics_of(job)[-1].items() if re.match("tasks/(?!.*stderr)", k)}
    wanted = {}
    for prefix, options in (("", []), ("ema_", ["--ema"])):
        folder = str(tmp_path / f"{prefix}it")
        assert cli.run(["export", str(job.folder), folder, "--dtype", "float32", *options]) == 0
        arguments = {"pretrained": folder, "dtype": "float32", "max_length": job.training.seq_len}
        arguments["add_bos_token"] = add_bos
        results = simple_evaluate("hf", arguments, configs, device="cpu", batch_size=3, bootstrap_iters=0)
        wanted |= {
            f"tasks/{task}/{prefix}{key.partition(',')[0]}": value
            for task, values in results["results"].items()
            for key, value in values.items()
            if key.endswith(",none") and "stderr" not in key
        }
    for metrics in (actual, wanted):  # exp() enlarges the rounding of log-likelihoods
        for key in ("perplexity", "ema_perplexity"):
            metrics[f"log {key}"] = math.log(metrics.pop(f"tasks/clozes/{key}"))
    assert actual == pytest.approx(wanted, rel=1e-6)
    if family == "llama3":
        assert 0 < actual["tasks/clozes/acc"] < 1
    assert actual["log perplexity"] != pytest.approx(actual["log ema_perplexity"], rel=1e-3)  # control


@pytest.mark.full
def test_what_the_harness_does_with_a_directory(exported) -> None:
    path, net, tokenizer = exported
    config = transformers.AutoConfig.from_pretrained(path)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    assert config.max_position_embeddings == 512  # where the harness cuts
    assert their_tokenizer.bos_token_id == tokenizer.bos  # what it puts before an empty context
    assert their_tokenizer.eos_token_id == tokenizer.eos
    for context, continuation in PAIRS:
        whole = their_tokenizer.encode(context + continuation)
        before = their_tokenizer.encode(context)
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([whole[:-1]])).logits.double(), -1)[0]
        after = range(len(before), len(whole))
        theirs = sum(log_p[i - 1, whole[i]].item() for i in after)
        assert theirs == pytest.approx(ours(net, tokenizer, context, continuation), abs=1e-4)


@pytest.mark.full
def test_the_harness_itself(exported) -> None:
    import_harness()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    path, net, tokenizer = exported
    harness = HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=2)
    actual = harness.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)])
    for (theirs, _), pair in zip(actual, PAIRS):
        assert theirs == pytest.approx(ours(net, tokenizer, *pair), abs=1e-4)
    # It puts a BOS before a rolling text itself; the tokenizer's would be a second one.
    harness = HFLM(pretrained=str(path), device="cpu", dtype="float32", add_bos_token=False)
    rolling = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (TEXT,), 0)])
    assert rolling[0] == pytest.approx(ours(net, tokenizer, "", TEXT), abs=1e-4)
