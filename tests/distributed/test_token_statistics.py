"""Statistics of token losses change nothing in a run, and find out a loss that is summed in bf16.
test_layouts.py compares them between layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import metrics_of
from tests.support.layouts import COMPILED
from tests.support.runs import history, run_in_hops, weights_sha
from titanlite.job import load_job
from titanlite.metrics import token_statistics
from titanlite.train import train

ROOT = Path(__file__).resolve().parents[2]
DETAIL = ["--metrics.detail_freq=1", "--training.steps=3", "--checkpoint.interval=3"]


def detail(line: dict[str, Any]) -> dict[str, float]:
    """The statistics of token losses in a report."""
    names = ("train/accuracy", "logits/", "loss/", "numerics/")
    return {name: value for name, value in line.items() if name.startswith(names)}


def test_the_statistics_change_nothing(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = run_in_hops(tmp_path, corpus, [3], *DETAIL, "--metrics.detail_freq=0", name="without")
    with_detail = run_in_hops(tmp_path, corpus, [3], *DETAIL, name="with")
    assert all(detail(line) for line in metrics_of(with_detail))
    assert not any(detail(line) for line in metrics_of(without))
    assert history(with_detail) == history(without)
    assert weights_sha(with_detail, 3) == weights_sha(without, 3)

    statistics = token_statistics._statistics

    def careless(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return statistics(hidden.mul_(1.001), *rest)

    monkeypatch.setattr(token_statistics, "_statistics", careless)
    control = run_in_hops(tmp_path, corpus, [3], *DETAIL, name="control")
    assert history(control) != history(without)


@pytest.mark.full
def test_the_statistics_compile_nothing_again(tmp_path: Path, corpus: Path) -> None:
    torch.compiler.reset()
    keys = [*COMPILED, "--metrics.detail_freq=2", "--training.steps=4"]
    lines = metrics_of(run_in_hops(tmp_path, corpus, [4], *keys, name="compiled"))
    assert [bool(detail(line)) for line in lines] == [True, True, False, True]
    assert ["compile/graphs" in line for line in lines] == [True, False, False, False]


SUMMED_IN_BF16 = ["--job.imports=['tests.support.bf16_losses']", "--loss={ name = 'summed_in_bf16' }"]


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "too low precision" in line]


def test_a_loss_summed_in_bf16_is_found_out(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in_hops(tmp_path, corpus, [2], name="right")
    assert not warnings(capsys)
    job = run_in_hops(tmp_path, corpus, [2], *SUMMED_IN_BF16, name="wrong")
    lines = warnings(capsys)
    assert len(lines) == 1, "once in ten reports"
    assert "compute its softmax, logarithm and sum in fp32" in lines[0]
    assert all(abs(line["numerics/loss_minus_fp32"]) > 1e-4 for line in metrics_of(job))


@pytest.mark.full
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_loss_summed_in_bf16_is_found_out_in_the_debug_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], param_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step, with the default of metrics.detail_freq."""
    monkeypatch.chdir(ROOT)
    keys = [
        "--training.mixed_precision_param",
        param_dtype,
        "--no-checkpoint.enable",
        "--no-validation.enable",
    ]
    for name, others in {
        "right": ["--training.steps=20", "--metrics.detail_freq=5"],
        "wrong": ["--training.steps=2", *SUMMED_IN_BF16],
    }.items():
        arguments = [*keys, "--generation.prompts=[]", f"--job.dump_folder={tmp_path / name}", *others]
        train(load_job("train_configs/debug.toml", arguments, allow_imports=True))
        lines = warnings(capsys)
        if name == "right":
            assert not lines
        else:
            assert "step 1: the loss is computed in too low precision" in lines[0]
