"""Tasks have the same scores on every layout, on every rank. A run reports them, also without held-out
sequences."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.gradients import build
from tests.support.jobs import make_job, metrics_of
from tests.support.tiers import full, sampled
from titanlite.attention.shared_prefix import for_shared_prefix as attention
from titanlite.evaluate import score_tasks
from titanlite.losses import VocabularyShard
from titanlite.parallel import sharded_model
from titanlite.ranks import Ranks
from titanlite.report.page import report
from titanlite.report.recorded_run import read_run
from titanlite.tasks.requests import OpenTask, Request
from titanlite.tasks.task import Question, Task
from titanlite.train import train

VOCAB_SIZE = 250  # the model's is 252
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"tp": 2}),
    "dp_shard 2": (2, {}),
    "pp 2": (2, {"pp": 2}),
    "cp 2": (2, {"cp": 2}),
    "dp_replicate 2": (2, {"dp_replicate": 2}),
    "pp 2, zero bubble": (2, {"pp": 2, "schedule": "ZBVZeroBubble", "layers": 4}),
    "expert parallel 2": (2, {"family": "qwen3_moe", "ep": 2}),
    "tp 2, compiled": (2, {"tp": 2, "compile": "aot_eager"}),
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}),
    "cp 2 x dp_shard 2": (4, {"cp": 2}),
}
CASES = [name if name == "tp 2" else full(name) for name in LAYOUTS]


def scores(world_size: int, layout: dict[str, Any], share: bool = True) -> np.ndarray:
    """The scores of 23 requests, of which every second one asks for the model's most likely token, and of 4
    questions with 3 choices, and of one, in a batch of its own, whose last choice has no targets. `share`:
    whether choices may share their context."""
    rank = dist.get_rank() if world_size > 1 else 0
    model = build(world_size, rank, tied=False, **layout)
    rng, requests = random.Random(0), []
    for i in range(23):
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 16))]
        if i % 2:
            last = model.logits(torch.tensor([tokens]))[0, -1, :VOCAB_SIZE]
            tokens.append(int(last.argmax()))
        requests.append(Request(tokens, 1 if i % 2 else 2))
    questions = [Question("", ("x",), None, 1)] * 23
    for num_shared in (1, 4, 9, 10, 40):
        context = [rng.randrange(VOCAB_SIZE) for _ in range(num_shared)]
        for length in (1, 2, 0 if num_shared == 40 else 4):
            requests.append(Request(context + [rng.randrange(VOCAB_SIZE) for _ in range(length)], length))
        questions = (
            [*questions, Question("", ("x", "y", "z"), 0, 1)] if share else [*questions, *questions[:3]]
        )
    task = OpenTask(Task(name="t", path="t.jsonl"), questions, requests)
    runtime: Any = SimpleNamespace(
        mesh=model.mesh, rank=rank, device=torch.device("cpu"), ranks=Ranks(Path())
    )
    return score_tasks(model, [task], VOCAB_SIZE, 64, runtime)[0]


FAMILIES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "a window": {"shape": {"sliding_window": 3}},
    "windows in some layers": {"family": "gemma3"},
    "latent attention": {
        "family": "deepseek_v3",
        "shape": {"n_kv_heads": 4, "rope_head_dim": 4, "v_head_dim": 4},
    },
    "linear attention": {"family": "qwen3_5"},
    "tokens that see the one before": {
        "family": "gpt", "shape": {"sliding_window": 3, "layer_pattern": "SL", "zero_init": False},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(FAMILIES, {"windows in some layers", "linear attention"}))
def test_choices_have_the_scores_of_single_requests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, shared = FAMILIES[name], list[int]()
    monkeypatch.setattr(
        sharded_model, "for_shared_prefix", lambda *args: shared.append(1) or attention(*args)
    )
    single = scores(1, layout, share=False)
    assert not shared
    together = scores(1, layout)
    assert bool(shared) == (name != "linear attention")
    assert together == pytest.approx(single, rel=1e-5)
    if shared:  # controls: choices that see each other, and positions that count their tokens
        for wrong in (
            lambda tokens, s, p: attention(tokens, s * 0, p),
            lambda tokens, s, p: attention(tokens, (s > 0).long(), p),
            *([lambda tokens, s, p: attention(tokens * 0, s, p)] if name.startswith("tokens") else []),
        ):
            monkeypatch.setattr(sharded_model, "for_shared_prefix", wrong)
            assert scores(1, layout) != pytest.approx(single, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_layout_has_the_scores_of_one_process(run_on: Callable[..., Any], name: str) -> None:
    world_size, layout = LAYOUTS[name]
    wanted = scores(1, {key: value for key, value in layout.items() if key in ("layers", "family")})
    results = run_on(world_size, scores, world_size, layout)
    assert all(np.array_equal(result, results[0]) for result in results)
    assert results[0] == pytest.approx(wanted, rel=1e-5)
    assert {0.0, 2.0} <= set(wanted[:, 1])


def unreduced(world_size: int, layout: dict[str, Any]) -> np.ndarray:
    """The scores if each tensor-parallel rank knew only its own shard of the vocabulary."""
    VocabularyShard.log_sum_exp = lambda self, logits_NV: logits_NV.logsumexp(-1)  # type: ignore[method-assign]
    return scores(world_size, layout)


@pytest.mark.full
def test_control_a_missing_reduction_is_noticed(run_on: Callable[..., Any]) -> None:
    results = run_on(2, unreduced, 2, {"tp": 2})
    assert results[0] != pytest.approx(scores(1, {}), rel=1e-5)


TRAINED = ["--data.holdout_sequences=0", "--training.steps=4", "--validation.enable", "--validation.freq=2"]
LINES = [
    {"context": "abc abd", "continuation": " acb"},
    {"context": "", "continuation": "e"},
    {"context": "ja", "continuation": "bc"},
]


def test_a_run_without_held_out_sequences_reports_its_tasks(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the metrics, in the log, in samples.txt and in the report, also of the average of the weights."""
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    keys = [*TRAINED, f"--validation.tasks=[{{name = 't', path = '{file}'}}]", "--ema.enable"]
    job = make_job(tmp_path, corpus, *keys, "--ema.decay=0.5")
    assert train(job) == 0
    metrics = metrics_of(job)
    assert [line["step"] for line in metrics if "tasks/t/acc" in line] == [2, 4]
    last = metrics[-1]
    assert not any(key.startswith("eval/") or key == "time/validation_s" for key in last)
    assert last["time/tasks_s"] > 0
    assert last["tasks/t/ema_perplexity"] != last["tasks/t/perplexity"]
    accuracy = f"t {last['tasks/t/acc']:.1%}"
    log = capsys.readouterr().err
    assert f" validation: tasks in {last['time/tasks_s']:.1f} s: {accuracy}\n" in log
    assert f" accuracy in tasks: {accuracy}\n" in log
    samples = (job.folder / "samples.txt").read_text()
    assert samples.count("--- step 2\ntask t, line 1: ") == samples.count("--- step 4\ntask t, line 1: ") == 1
    assert samples.count("task t, ") == 4
    page = report([read_run(job.folder, "run")])
    assert "<pre>task t, line 1: " in page

    assert train(job) == 0  # nothing to train: the tasks are scored again
    assert f" accuracy in tasks: {accuracy}\n" in capsys.readouterr().err
    assert (job.folder / "samples.txt").read_text() == samples

    newest = make_job(tmp_path, corpus, *keys, "--ema.decay=0.0", name="newest")
    assert train(newest) == 0
    scores = {key: value for key, value in metrics_of(newest)[-1].items() if key.startswith("tasks/")}
    weights = {key: value for key, value in scores.items() if "/ema_" not in key}
    assert weights == {key.replace("ema_", ""): value for key, value in scores.items() if "/ema_" in key}
    assert weights["tasks/t/perplexity"] == last["tasks/t/perplexity"]
