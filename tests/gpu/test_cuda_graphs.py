"""CUDA graphs: the same bits as without graphs, for each way to run a micro-batch, and one line for a model
that cannot be recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gpu import QWEN3_5, trained
from tests.support.jobs import make_job
from tests.support.runs import FOUR_MICRO_BATCHES, history, weights
from titanlite.parallel.cuda_graphs import _fits

pytestmark = pytest.mark.gpu
WIDE = ["--model.overrides.dim=128", "--model.overrides.hidden_dim=256", "--model.overrides.head_dim=32"]
COMPILE = "--compile.enable"
SETTINGS = {
    "eager": [],
    "compiled": [COMPILE],
    "checkpointing": [COMPILE, "--activation_checkpoint.mode=full"],
    "float8": [*WIDE, COMPILE, "--float8.enable"],
    "z-loss": [COMPILE, "--loss.z_loss_multiplier=1e-2"],
    "one micro-batch": ["--training.local_batch_size=16", "--training.global_batch_size=-1"],
    "average": [COMPILE, "--ema.enable"],
    "batch ramp": [COMPILE, "--training.batch_ramp=[{until='16 sequences', global_batch_size=2}]"],
    "window": [
        COMPILE,
        "--model.name=mistral",
        "--model.overrides.sliding_window=20",
        "--model.overrides.head_dim=16",
    ],
    "stages": [COMPILE, '--stages=[{until="88 sequences"}, {until="end", seq_len=16}]'],
}
# Steps 1, 4, 8, 12 and 16 have a detailed report and run without graphs. Step 6 validates and saves, and the
# run by graphs is resumed there, so that steps 5, 6, 10, 11 and 15 run by graphs. With stages, the graph of
# step 15 is another one, because step 12 begins the second stage.
RUN = [
    "--training.steps=16",
    "--training.deterministic",
    "--metrics.detail_freq=4",
    "--checkpoint.interval=6",
    "--validation.enable",
    "--validation.freq=6",
    "--data.holdout_sequences=4",
]
CANNOT_RECORD = """
from dataclasses import dataclass
from titanlite.losses import CrossEntropy, cross_entropy

@dataclass(frozen=True, kw_only=True)
class Waiting(CrossEntropy, name="waiting"):
    def build(self, backend=None, vocabulary=None):
        def loss(hidden, weight, targets):
            value = cross_entropy(hidden, weight, targets)
            assert value.item() > 0
            return value
        return loss
"""


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_run_by_graphs_has_the_same_bits(tmp_path: Path, corpus: Path, settings: list[str]) -> None:
    logs, jobs = {}, {}
    for name in ("without", "graphs", "lower rate"):
        keys = [*RUN, *settings]
        keys += ["--no-compile.cuda_graphs" if name == "without" else "--compile.cuda_graphs"]
        keys += ["--optimizer.lr=1e-5"] if name == "lower rate" else []  # control
        if name == "graphs":
            assert "recorded a CUDA" in trained(tmp_path, corpus, *keys, "--training.steps=6", name=name)
        logs[name] = trained(tmp_path, corpus, *keys, name=name)
        jobs[name] = make_job(tmp_path, corpus, FOUR_MICRO_BATCHES, *keys, name=name)
    assert "recorded a CUDA graph" in logs["graphs"]
    assert "recorded a CUDA graph" not in logs["without"]
    assert history(jobs["graphs"]) == history(jobs["without"])
    graphs, without, lower = (weights(jobs[name], 16) for name in ("graphs", "without", "lower rate"))
    assert all(torch.equal(graphs[name], without[name]) for name in without)
    assert not all(torch.equal(lower[name], without[name]) for name in without)


def test_a_loss_that_waits_for_the_device_ends_with_one_line(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "waiting_loss.py").write_text(CANNOT_RECORD)
    keys = ['--job.imports=["waiting_loss"]', "--loss.name=waiting", "--compile.cuda_graphs"]
    error = trained(tmp_path, corpus, *keys, code=2)
    assert "cannot be recorded as a CUDA graph" in error.strip().splitlines()[-1]


@pytest.mark.parametrize("model", ["llama3", "gpt", "qwen3_5"])
def test_graphs_by_default_have_the_same_bits(tmp_path: Path, corpus: Path, model: str) -> None:
    own = {"llama3": [], "gpt": [f"--model.name={model}"], "qwen3_5": QWEN3_5}[model]
    keys = [*RUN, COMPILE, *own, "--data.holdout_sequences=0", "--no-validation.enable"]
    default = trained(tmp_path, corpus, *keys, name="default")
    without = trained(tmp_path, corpus, *keys, "--no-compile.cuda_graphs", name="without")
    assert "recorded a CUDA graph" in default
    assert "recorded a CUDA graph" not in without
    jobs = [
        make_job(tmp_path, corpus, FOUR_MICRO_BATCHES, *keys, name=name) for name in ("default", "without")
    ]
    assert history(jobs[0]) == history(jobs[1])
    first, second = (weights(job, 16) for job in jobs)
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize(
    "keys",
    [
        [],  # not compiled
        [COMPILE, "--training.same_bits_on_any_ranks"],
        [COMPILE, '--job.imports=["waiting_loss"]', "--loss.name=waiting"],  # graphs cannot record it
    ],
)
def test_no_graphs_by_default(tmp_path: Path, corpus: Path, keys: list[str]) -> None:
    (tmp_path / "waiting_loss.py").write_text(CANNOT_RECORD)
    assert "CUDA graph" not in trained(tmp_path, corpus, "--training.steps=4", *keys)


def test_optional_graphs_are_left_out_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = torch.Size((2, 8))
    freed = torch.empty(2**28, device="cuda")
    del freed  # 1 GiB stays in the allocator's cache
    assert _fits(shape)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**29, 2**40))
    assert not _fits(shape)
